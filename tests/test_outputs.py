import pytest

from outrider.outputs import DecodeStep


@pytest.mark.parametrize(
    ("num_tokens", "num_draft_tokens", "num_accepted_tokens", "sources"),
    [
        (1, 0, 0, ["plain"]),
        (1, 3, 0, ["recovered"]),
        (2, 3, 1, ["accepted_1", "recovered"]),
        (3, 3, 2, ["accepted_1", "accepted_2", "recovered"]),
        (4, 3, 3, ["accepted_1", "accepted_2", "accepted_3", "bonus"]),
        (2, 1, 1, ["accepted_1", "bonus"]),
        # Cut within the accepted drafts, and just after them.
        (2, 3, 2, ["accepted_1", "accepted_2"]),
        (3, 3, 3, ["accepted_1", "accepted_2", "accepted_3"]),
        # A pass whose probabilities were broken.
        (0, 3, 0, []),
        (0, 0, 0, []),
    ],
)
def test_sources(
    num_tokens: int, num_draft_tokens: int, num_accepted_tokens: int, sources: list[str]
) -> None:
    step = DecodeStep(num_tokens, num_draft_tokens, num_accepted_tokens)
    assert step.token_sources == sources
