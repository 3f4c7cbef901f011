"""How drafts are made: what each method takes, and what it leaves open."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.config import EngineConfig, SpeculativeConfig


def test_a_look_up_needs_no_head() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    config = EngineConfig.from_kwargs(speculative_config={**given, "prompt_lookup_min": 2})
    assert config.speculative == SpeculativeConfig(
        "ngram", 4, prompt_lookup_max=4, prompt_lookup_min=2
    )
    assert not config.uses_mtp
    assert config.num_speculative_tokens == 4
    assert not EngineConfig().uses_mtp


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"method": "mtp"}, "probabilistic"),
        ({"method": "mtp", "draft_sample_method": "greedy"}, "greedy"),
        ({"method": "ngram"}, "greedy"),
        ({"method": "ngram", "draft_sample_method": "greedy"}, "greedy"),
    ],
)
def test_how_drafts_are_drawn(given: dict[str, Any], method: str) -> None:
    """The value in the tree is what is done, whoever looks at it."""
    config = EngineConfig.from_kwargs(speculative_config=given).speculative
    assert config is not None
    assert config.draft_sample_method == method
    assert replace(config, num_speculative_tokens=2).draft_sample_method == method


@pytest.mark.parametrize(
    ("given", "longest", "shortest"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 4}, 4, 4),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, 4, 2),
    ],
)
def test_the_lengths_of_a_lookup(given: dict[str, Any], longest: int, shortest: int) -> None:
    config = SpeculativeConfig(method="ngram", **given)
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == (longest, shortest)
