"""Collection, packing and windows of the corpus."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from outrider.errors import OutriderError
from outrider.training.config import DataConfig
from outrider.training.corpus import (
    END_OF_TEXT,
    HELD_OUT_MODULES,
    WindowSampler,
    collect_documents,
    encode_documents,
    load_documents,
    load_tokenizer,
    pack,
)
from outrider.training.documents import Document
from outrider.training.evaluation import evaluation_windows

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "bundled"


def test_documents_follow_each_other_with_one_separator() -> None:
    packed = pack([[5, 6], [], [7]], end_of_text=0, max_id=7)
    assert packed.tolist() == [5, 6, 0, 0, 7, 0]
    assert packed.dtype == np.uint16


def test_encoded_documents_report_bytes_and_decode_to_their_texts() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    documents = [Document("a.py", "x = 'é'\n"), Document("b.py", "pass\n")]
    tokens = encode_documents(tokenizer, documents)
    assert tokens.num_documents == 2
    assert tokens.num_bytes == 9 + 5
    assert tokens.bytes_per_id[tokens.token_ids].sum() == 9 + 5
    assert tokens.bytes_per_id[tokenizer.token_to_id("<|endoftext|>")] == 0
    text = tokenizer.decode(tokens.token_ids.tolist(), skip_special_tokens=False)
    assert text == "x = 'é'\n<|endoftext|>pass\n<|endoftext|>"


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OutriderError, match=r"tokenizer\.json: no valid tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("max_id", "dtype"), [(65_535, np.uint16), (65_536, np.uint32), (151_935, np.uint32)]
)
def test_ids_are_as_wide_as_the_vocabulary_needs(max_id: int, dtype: type[np.generic]) -> None:
    vocab = {END_OF_TEXT: 0, **{f"word{number}": number for number in range(1, max_id)}}
    # An id apart from the others: there is one entry less than ids would be.
    del vocab["word9"]
    tokenizer = Tokenizer(models.WordLevel({**vocab, "last": max_id}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    documents = [Document("a", "word1 last"), Document("b", f"last word{max_id - 1}")]
    tokens = encode_documents(tokenizer, documents)
    assert tokens.token_ids.dtype == dtype
    assert tokens.token_ids.tolist() == [1, max_id, 0, max_id, max_id - 1, 0]
    sampler = WindowSampler(tokens.token_ids, window_size=2, batch_size=2, seed=0)
    assert max_id in sampler.batch(0)
    assert evaluation_windows(tokens, 2, 1).tolist() == [[1, max_id, 0, max_id]]


def test_held_out_modules_are_whole_and_apart() -> None:
    train = {document.source for document in collect_documents()}
    held_out = {document.source for document in collect_documents(held_out=True)}
    assert held_out == HELD_OUT_MODULES
    assert not train & held_out
    assert not any(source.split("/")[0] in ("test", "site-packages") for source in train)


def test_without_sources_it_is_the_standard_library() -> None:
    train, held_out = load_documents(DataConfig())
    assert train == collect_documents()
    assert held_out == collect_documents(held_out=True)


def test_named_sources_are_read_and_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    for name, text in (("a.py", "a\n"), ("b.py", "b\n"), ("c.md", "c\n"), ("d.bin", "d\n")):
        (tmp_path / name).write_text(text)
    train, held_out = load_documents(DataConfig(train=(tmp_path,), held_out=(tmp_path / "b.py",)))
    assert [document.text for document in train] == ["a\n", "c\n"]
    assert held_out == [Document((tmp_path / "b.py").as_posix(), "b\n")]
    with pytest.raises(OutriderError, match=r"data\.train: every text in it is one of data\.held"):
        load_documents(DataConfig(train=(tmp_path,), held_out=(tmp_path,)))
    with pytest.raises(OutriderError, match=r"data\.held_out: .*absent: no such file or folder"):
        load_documents(DataConfig(train=(tmp_path,), held_out=(tmp_path / "absent",)))


def test_an_epoch_visits_every_window_once() -> None:
    token_ids = np.arange(1000, dtype=np.uint16)
    sampler = WindowSampler(token_ids, window_size=10, batch_size=9, seed=3)
    assert sampler.num_steps_per_epoch == 11  # 99 windows
    batches = torch.cat([sampler.batch(step) for step in range(11)])
    assert batches.shape == (99, 10)
    assert (batches.diff(dim=1) == 1).all()
    offset = int(batches.min())
    assert sorted(batches[:, 0].tolist()) == [offset + 10 * i for i in range(99)]
    assert batches[:, 0].tolist() != sorted(batches[:, 0].tolist())


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    token_ids = np.arange(1000, dtype=np.uint16)
    first = WindowSampler(token_ids, window_size=10, batch_size=8, seed=3)
    second = WindowSampler(token_ids, window_size=10, batch_size=8, seed=3)
    in_order = [first.batch(step) for step in range(30)]
    for step in (29, 0, 17):
        assert torch.equal(second.batch(step), in_order[step])
    other = WindowSampler(token_ids, window_size=10, batch_size=8, seed=4)
    assert not torch.equal(other.batch(0), in_order[0])


def test_too_short_a_corpus_is_an_error() -> None:
    with pytest.raises(
        OutriderError, match="30 tokens are too few for 3 windows of 10; at least 40"
    ):
        WindowSampler(np.zeros(30, dtype=np.uint16), window_size=10, batch_size=3, seed=0)
