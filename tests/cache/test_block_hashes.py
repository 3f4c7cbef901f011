"""The hash of a block names all tokens up to its end, and the salt."""

from outrider.cache.block_hashes import extend_block_hashes


def hashes(token_ids: list[int], salt: str | None = None, block_size: int = 4) -> list[bytes]:
    found: list[bytes] = []
    extend_block_hashes(found, token_ids, block_size, salt)
    return found


def test_only_whole_blocks_have_one() -> None:
    for length in range(10):
        assert len(hashes([1] * length)) == length // 4


def test_they_are_the_same_whenever_they_are_asked_for() -> None:
    token_ids, found = list(range(23)), []
    for length in (0, 3, 4, 9, 9, 16, 23):
        extend_block_hashes(found, token_ids[:length], 4, "salt")
    assert found == hashes(token_ids, "salt")


def test_each_token_before_the_end_counts() -> None:
    token_ids = list(range(12))
    expected = hashes(token_ids)
    for place in range(12):
        changed = [*token_ids]
        changed[place] += 1 << 40
        found = hashes(changed)
        first = place // 4
        assert found[:first] == expected[:first]
        assert not set(found[first:]) & set(expected)
    # Neither is it a sum, nor do neighbours run together.
    assert not set(hashes([2, 1, 3, 4])) & set(hashes([1, 2, 3, 4]) + hashes([12, 3, 4, 5]))
    assert len({*hashes([1] * 12)}) == 3, "the same tokens after others are another block"


def test_salts_have_nothing_in_common() -> None:
    salts = [None, "", "a", "b", "None", "\ud800"]
    found = [one for salt in salts for one in hashes([1] * 8, salt)]
    assert len(set(found)) == len(found)
