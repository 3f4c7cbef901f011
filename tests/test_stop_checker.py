"""An output ends where it would if its tokens came one by one, and its text is never taken back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.sampling_params import SamplingParams
from outrider.stop_checker import EmittedRun, StopChecker
from tests.piece_tokenizer import piece_tokenizer

# Few letters, so that stop strings overlap; a character of two bytes and one of four in parts, and
# a byte that is in no character.
PIECES = [b"a", b"b", b"ab", b"ba", b"aab", b"c", b"\xc3", b"\xa9", b"a\xf0\x9f", b"\x8e", b"\x89b"]
PIECES += [b"\xff", b"bc\xc3\xa9"]
SPECIAL, EOS = len(PIECES), len(PIECES) + 1
TOKENIZER = piece_tokenizer(PIECES, ["<a>", "<eos>"], [EOS])
A, B, AB, BA, AAB, C, E1, E2, PARTY1, PARTY2, PARTY3, WRONG, BCE = range(SPECIAL)


@dataclass
class Ended:
    """What a checker made of a list of tokens.

    Attributes:
        token_ids: emitted.
        pieces: the texts of the runs.
        finish_reason: None where it goes on.
        stop_reason: as in `EmittedRun`.
    """

    token_ids: list[int]
    pieces: list[str]
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def checker(max_output_tokens: int = 1000, **params: Any) -> StopChecker:
    given_params = SamplingParams(max_tokens=None, **params)
    stop_token_ids = frozenset(given_params.stop_token_ids or ())
    if not given_params.ignore_eos:
        stop_token_ids |= {EOS}
    return StopChecker(given_params, stop_token_ids, max_output_tokens, TOKENIZER)


def run(stops: StopChecker, runs: Sequence[Sequence[int]], *, is_flushed: bool = False) -> Ended:
    """Feeds runs up to the end, and then as an abort would flush."""
    result = Ended([], [], None, None)
    for token_ids in runs:
        emitted: EmittedRun = stops.extend(token_ids)
        result.token_ids += emitted.token_ids
        result.pieces.append(emitted.text)
        result.finish_reason = emitted.finish_reason
        result.stop_reason = emitted.stop_reason
        if emitted.finish_reason is not None:
            break
    if is_flushed:
        result.pieces.append(stops.flush())
    return result


def one_by_one(token_ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


# Stop strings, tokens, then what comes out: text, number of tokens, stop string.
CASES = {
    "one token": (["b"], [A, B, C], "a", 2, "b"),
    "inside a token": (["a"], [C, BA, C], "cb", 2, "a"),
    "over two tokens": (["ab"], [C, A, B, C], "c", 3, "ab"),
    "over three tokens": (["abc"], [B, A, B, C, C], "b", 4, "abc"),
    "begins inside a token": (["bc"], [A, AB, C, C], "aa", 3, "bc"),
    "ends inside a token": (["aba"], [AB, AB, C], "", 2, "aba"),
    "all that follows is dropped": (["a"], [BA, B], "b", 1, "a"),
    "begins again after a false start": (["aab"], [A, A, A, B, C], "a", 4, "aab"),
    "the one that begins first": (["bc", "abc"], [A, B, C], "", 3, "abc"),
    "at one place the one listed first": (["ab", "aba"], [A, BA], "", 2, "ab"),
    "at one place, listed the other way": (["aba", "ab"], [A, BA], "", 2, "aba"),
    "a prefix of another ends first": (["abc", "ab"], [A, B, C], "", 2, "ab"),
    "the one that ends first, though it begins later": (["abcc", "bc"], [A, B, C, C], "a", 3, "bc"),
    "another occurrence": (["ac", "b"], [A, A, B], "aa", 3, "b"),
    "a character of two tokens": (["é"], [A, E1, E2, B], "a", 3, "é"),
    "half a character behind it": (["a"], [B, PARTY1, PARTY2], "b", 2, "a"),
    "a character over three tokens": (["🎉"], [B, PARTY1, PARTY2, PARTY3, B], "ba", 4, "🎉"),
    "what stands for a wrong byte": (["\ufffdb"], [A, WRONG, B, B], "a", 3, "\ufffdb"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_stop_strings(case: tuple[list[str], list[int], str, int, str]) -> None:
    stop, token_ids, text, num_tokens, reason = case
    for runs in ([token_ids], one_by_one(token_ids)):
        for includes_stop in (False, True):
            got = run(
                checker(stop=stop, include_stop_str_in_output=includes_stop), runs, is_flushed=True
            )
            assert got.text == text + (reason if includes_stop else "")
            assert got.token_ids == token_ids[:num_tokens]
            assert (got.finish_reason, got.stop_reason) == ("stop", reason)


def test_held_back_is_what_may_become_a_stop_string_and_no_more() -> None:
    got = run(checker(stop=["abc", "bab"]), one_by_one([C, A, B, AB, A, C]))
    # "ab", then "bab" is found from there on; before that nothing but the end in question waits.
    assert got.pieces == ["c", "", "", "a"]
    assert got.stop_reason == "bab"
    got = run(checker(stop=["abc"]), one_by_one([C, A, B, AB, A, C, C]))
    assert got.pieces == ["c", "", "", "ab", "ab", "ac", "c"]


@pytest.mark.parametrize("is_flushed", [False, True])
def test_nothing_is_held_for_ever(is_flushed: bool) -> None:
    """What is held comes out with the last token there is room for, or when it is asked for."""
    stops = checker(1000 if is_flushed else 3, stop=["abc"])
    got = run(stops, one_by_one([C, A, B, C][: 3 if is_flushed else 4]), is_flushed=is_flushed)
    assert got.text == "cab"
    assert got.finish_reason == (None if is_flushed else "length")
    assert stops.flush() == "", "what is flushed is gone"


@pytest.mark.parametrize("token_id", [EOS, B])
def test_held_text_comes_out_before_a_stop_id(token_id: int) -> None:
    got = run(checker(stop=["aab"], stop_token_ids=[B]), one_by_one([C, A, token_id, C]))
    assert (got.pieces, got.token_ids) == (["c", "", "a"], [C, A, token_id])
    assert (got.finish_reason, got.stop_reason) == ("stop", None if token_id == EOS else B)


def test_the_text_of_a_stop_id() -> None:
    for includes_stop, text in ((False, "a"), (True, "ab")):
        stops = checker(stop_token_ids=[B], include_stop_str_in_output=includes_stop)
        got = run(stops, [[A, B, C]])
        assert (got.text, got.token_ids, got.stop_reason) == (text, [A, B], B)
    for skips, text in ((True, "a"), (False, "a<eos>")):
        stops = checker(include_stop_str_in_output=True, skip_special_tokens=skips)
        got = run(stops, [[A, EOS, C]])
        assert (got.text, got.token_ids, got.stop_reason) == (text, [A, EOS], None)


def test_half_a_character_before_a_stop_id() -> None:
    got = run(checker(), [[A, E1, EOS]])
    assert got.text == "a\ufffd"


def test_the_end_of_sequence_may_be_ignored() -> None:
    got = run(checker(4, ignore_eos=True), [[A, EOS, B, EOS, C]])
    assert (got.token_ids, got.text) == ([A, EOS, B, EOS], "ab")
    assert (got.finish_reason, got.stop_reason) == ("length", None)
    # Named as a stop id it ends the output all the same, and is named as what did.
    got = run(checker(ignore_eos=True, stop_token_ids=[EOS]), [[A, EOS, B]])
    assert (got.finish_reason, got.stop_reason) == ("stop", EOS)


def test_which_end_counts_where_one_token_is_two() -> None:
    """A stop string goes before the cap, and so does a stop id."""
    assert run(checker(2, stop=["b"]), [[A, B, C]]).stop_reason == "b"
    assert run(checker(2, stop_token_ids=[B]), [[A, B, C]]).stop_reason == B
    # The text of a stop id is in the output only where it is asked for: only there is it looked at.
    both = {"stop": ["b"], "stop_token_ids": [B]}
    assert run(checker(**both), [[A, B, C]]).stop_reason == B
    got = run(checker(**both, include_stop_str_in_output=True), [[A, B, C]])
    assert (got.text, got.stop_reason) == ("ab", "b")


def test_the_first_tokens_end_nothing() -> None:
    token_ids = [B, A, B, EOS, A, B]
    for params, expected in (
        ({"stop": ["b"]}, ("bab", token_ids[:3], "b")),
        ({"stop_token_ids": [B]}, ("ba", token_ids[:3], B)),
        ({}, ("bab", token_ids[:4], None)),
    ):
        stops = checker(min_tokens=2, include_stop_str_in_output="stop" in params, **params)
        got = run(stops, [token_ids])
        assert (got.text, got.token_ids, got.stop_reason) == expected
    got = run(checker(min_tokens=4, stop=["b"], stop_token_ids=[B]), [token_ids])
    assert (got.text, len(got.token_ids), got.stop_reason) == ("baba", 6, B)
    # The cap is one for them as well.
    assert run(checker(2, min_tokens=3), [token_ids]).finish_reason == "length"


def test_a_stop_string_counts_if_some_of_its_text_came_after_the_first_tokens() -> None:
    got = run(checker(min_tokens=2, stop=["abc"]), one_by_one([A, B, C, A]))
    assert (got.text, len(got.token_ids)) == ("", 3)
    got = run(checker(min_tokens=3, stop=["abc"]), one_by_one([A, B, C, A, B, C, A]))
    assert (got.text, len(got.token_ids)) == ("abc", 6)
    got = run(checker(min_tokens=3, stop=["aba"]), one_by_one([A, B, A, BA, C]))
    assert (got.text, len(got.token_ids)) == ("ab", 4)


def test_special_tokens_leave_no_text() -> None:
    got = run(checker(stop=["ab"]), one_by_one([C, A, SPECIAL, B]))
    assert (got.pieces, got.stop_reason) == (["c", "", "", ""], "ab")
    got = run(checker(stop=["ab", "<a"], skip_special_tokens=False), one_by_one([C, A, SPECIAL, B]))
    assert (got.pieces, got.stop_reason) == (["c", "", "a"], "<a")


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER])
def test_without_text_ids_end_an_output_all_the_same(tokenizer: Any) -> None:
    params = SamplingParams(detokenize=tokenizer is None, stop_token_ids=[B])
    stops = StopChecker(params, frozenset([B]), 10, tokenizer)
    got = run(stops, [[A, C], [A, B, C]], is_flushed=True)
    assert (got.text, got.token_ids, got.stop_reason) == ("", [A, C, A, B], B)


def decoded(token_ids: Sequence[int], *, is_end: bool = False) -> str:
    """All the text of a list, without a character that has yet to be completed."""
    spelled = [b"" if token_id >= SPECIAL else PIECES[token_id] for token_id in token_ids]
    data = b"".join(spelled)
    for num_open in range(0 if is_end else 3, 0, -1):
        if num_open <= len(data) and _is_beginning(data[-num_open:]):
            return data[:-num_open].decode(errors="replace")
    return data.decode(errors="replace")


def _is_beginning(data: bytes) -> bool:
    """Whether these bytes are the beginning of one character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


def naive(token_ids: Sequence[int], room: int, params: SamplingParams) -> Ended:
    """The rule, written on all the text there is after each token."""
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}  # type: ignore[misc]
    for n in range(1, len(token_ids) + 1):
        ids, last = list(token_ids[:n]), token_ids[n - 1]
        is_stop_id = n > params.min_tokens and last in stop_ids
        shown = ids[:-1] if is_stop_id and not params.include_stop_str_in_output else ids
        text, before = decoded(shown), decoded(ids[: params.min_tokens])
        places = []
        for index, stop in enumerate(params.stop or ()):
            place = text.find(stop, max(len(before) - len(stop) + 1, 0))
            if place >= 0 and n > params.min_tokens:
                places.append((place, index, stop))
        if places:
            place, _, stop = min(places)
            end = place + (len(stop) if params.include_stop_str_in_output else 0)
            return Ended(ids, [text[:end]], "stop", stop)
        if is_stop_id:
            reason = last if last in params.stop_token_ids else None  # type: ignore[operator]
            return Ended(ids, [decoded(shown, is_end=True)], "stop", reason)
        if n == room:
            return Ended(ids, [decoded(ids, is_end=True)], "length", None)
    return Ended(list(token_ids), [decoded(token_ids, is_end=True)], None, None)


@st.composite
def cut_outputs(draw: st.DrawFn) -> tuple[list[list[int]], int, SamplingParams]:
    """Tokens in runs, and parameters under which they may end anywhere."""
    letters = st.sampled_from(["a", "b", "c", "é", "🎉", "\ufffd"])
    params = SamplingParams(
        max_tokens=None,
        stop=draw(st.lists(st.text(letters, min_size=1, max_size=4), max_size=4)),
        stop_token_ids=draw(st.lists(st.sampled_from([C, BCE, EOS]), max_size=1)),
        min_tokens=draw(st.integers(0, 4)),
        ignore_eos=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
    )
    # Mostly the letters that the stop strings are made of.
    tokens = st.one_of(st.sampled_from([A, B, AB]), st.integers(0, EOS))
    runs = draw(st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=6))
    return runs, draw(st.integers(1, 16)), params


@settings(max_examples=400)
@given(cut_outputs())
@example(([[A, B], [A, B, C]], 9, SamplingParams(stop=["abc", "bab"], max_tokens=None)))
def test_agrees_with_the_rule_however_the_tokens_are_cut(
    case: tuple[list[list[int]], int, SamplingParams],
) -> None:
    runs, room, params = case
    token_ids = [token_id for one in runs for token_id in one]
    expected = naive(token_ids, room, params)
    stop_ids = frozenset(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    for cut in (runs, [token_ids], one_by_one(token_ids)):
        got = run(StopChecker(params, stop_ids, room, TOKENIZER), cut, is_flushed=True)
        assert got.text == expected.text
        assert got.token_ids == expected.token_ids
        assert (got.finish_reason, got.stop_reason) == (
            expected.finish_reason,
            expected.stop_reason,
        )


@given(cut_outputs())
def test_as_much_as_can_be_is_shown(case: tuple[list[list[int]], int, SamplingParams]) -> None:
    """After each token all is out but a character's half and the beginning of a stop string."""
    runs, room, params = case
    stop_ids = frozenset(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    stops = StopChecker(params, stop_ids, room, TOKENIZER)
    shown, token_ids = "", []
    for token_id in (token_id for one in runs for token_id in one):
        emitted = stops.extend([token_id])
        token_ids.append(token_id)
        shown += emitted.text
        if emitted.finish_reason is not None:
            return
        text = decoded(token_ids)
        assert text.startswith(shown)
        beginnings = [text[place:] for place in range(len(text) + 1)]
        assert text[len(shown) :] == next(
            rest
            for rest in beginnings
            if not rest or any(stop != rest and stop.startswith(rest) for stop in params.stop or ())
        )
