"""A text in pieces, as steps of several tokens may bring it."""

from collections.abc import Iterator


def cuts(text: str) -> Iterator[list[str]]:
    """Pieces of every one size, from single characters to the whole, and every cut in two."""
    yield [text]
    for size in range(1, len(text)):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
