"""Copies are found by the passages they share, also where one was edited."""

import pytest

from outrider.training.near_duplicates import PassageIndex, passages


def text(words: str, num_lines: int = 60) -> str:
    return "".join(f"    line {i} of {words}, with some more text\n" for i in range(num_lines))


def test_a_copy_shares_everything_and_white_space_does_not_matter() -> None:
    index = PassageIndex()
    index.add(passages(text("a file"), "code"))
    spaced = text("a file").replace("\n", "  \n\n").replace("    line", "\tline")
    assert index.shared_fraction(passages(spaced, "code")) == 1.0
    assert index.shared_fraction(passages(text("other words"), "code")) == 0.0


def test_one_edited_line_changes_the_passages_it_stands_in() -> None:
    index = PassageIndex()
    index.add(passages(text("a file"), "code"))
    edited = passages(text("a file").replace("line 30 ", "row 30 "), "code")
    assert len(edited) == 58
    assert index.shared_fraction(edited) == pytest.approx(55 / 58)


def test_a_text_is_no_copy_of_itself() -> None:
    index = PassageIndex()
    found = passages(text("a file"), "prose")
    index.add(found)
    assert index.shared_fraction(found, own=1) == 0.0
    index.add(found)
    assert index.shared_fraction(found, own=1) == 1.0


def test_brackets_alone_are_no_passage() -> None:
    assert passages("}\n]\n" * 30, "json") == set()
    assert PassageIndex().shared_fraction(set()) == 0.0
