"""How a bad word is spelled in tokens."""

from itertools import pairwise

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests.piece_tokenizer import piece_tokenizer, tokenizer_with_bos
from tests.tiny_engine import VOCAB_SIZE, Job, decode, greedy, make_engine, tiny_model

PIECES = [bytes([value]) for value in range(ord(" "), ord(" ") + VOCAB_SIZE - 1)]
WHITE = [b" ", b"\n", b"\t"]


@pytest.mark.parametrize("k", [0, 3])
def test_what_goes_around_every_text_is_no_part_of_a_word(k: int) -> None:
    tokenizer = tokenizer_with_bos(PIECES)
    assert tokenizer.encode("!") == [len(PIECES), 1]
    engine = make_engine(tiny_model(), k, tokenizer)
    prompt = [5, 9, 23]
    (plain,) = decode(engine, [Job(prompt, greedy(12))])
    assert len(plain.text) == 12
    pairs = [(x, y) for x, y in pairwise(plain.token_ids) if x]
    for x, y in pairs[:4]:
        word = (PIECES[x] + PIECES[y]).decode()
        (got,) = decode(engine, [Job(prompt, greedy(12, bad_words=[word]))])
        assert (x, y) not in pairwise(got.token_ids)
        place = plain.token_ids.index(x)
        assert got.token_ids[: place + 1] == plain.token_ids[: place + 1]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("piece", WHITE)
def test_white_space_is_a_word_like_any_other(piece: bytes, k: int) -> None:
    tokenizer = piece_tokenizer([*WHITE, *PIECES[1:-2]])
    tokenizer._backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    engine = make_engine(tiny_model(), k, tokenizer)
    biases = {token_id: 100.0 if white == piece else 50.0 for token_id, white in enumerate(WHITE)}
    word = piece.decode()
    (wanted,) = decode(engine, [Job([5, 9], greedy(6, logit_bias=biases))])
    assert wanted.text == word * 6
    (got,) = decode(engine, [Job([5, 9], greedy(6, logit_bias=biases, bad_words=[word]))])
    assert len(got.token_ids) == 6
    assert {WHITE[token_id] for token_id in got.token_ids} <= {*WHITE} - {piece}


def test_the_choices_of_a_request_share_their_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, spelled = tokenizer_with_bos(PIECES), list[str]()
    encode = tokenizer.encode

    def counted(text: str, add_special_tokens: bool = True) -> list[int]:
        spelled.append(text)
        return encode(text, add_special_tokens)

    engine = make_engine(tiny_model(), 0, tokenizer)
    monkeypatch.setattr(engine.tokenizer, "encode", counted)
    for number, words in enumerate((["AB"], ["AB"], ["C"], ["AB"], [])):
        engine.add_request(str(number), [5, 9], greedy(2, bad_words=words))
    assert spelled == ["AB", " AB", "C", " C", "AB", " AB"]
    banned = [request.bad_words_token_ids for request in engine.scheduler._waiting]
    assert banned[0] == banned[1] == banned[3] == [encode(text, False) for text in ("AB", " AB")]
    assert banned[2] == [encode(text, False) for text in ("C", " C")]
    assert not banned[4]
