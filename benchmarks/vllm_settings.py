"""What the comparisons with vLLM have in common: prompts, options, and how vLLM drafts."""

from collections.abc import Sequence
from typing import Any

from outrider.bundled import BUNDLED_MODEL_DIR, BUNDLED_SUITES
from outrider.entrypoints.cli.prompt_sources import read_prompts_file
from outrider.entrypoints.llm import LLM
from outrider.errors import ConfigError
from outrider.training.prompts import spread_evenly

MAX_MODEL_LEN = 1024


def prompts_of(llm: LLM, suites: Sequence[str], num_prompts: int) -> list[list[int]]:
    """Held-out prompts.

    Args:
        llm: whose tokenizer encodes them.
        suites: bundled sets of prompts.
        num_prompts: of each suite.

    Returns:
        Token ids of each.

    Raises:
        ConfigError: there is no suite of a name.
    """
    for suite in suites:
        if suite not in BUNDLED_SUITES:
            raise ConfigError(f"--suite: {suite} is none of {', '.join(BUNDLED_SUITES)}")
    texts = [
        text
        for suite in suites
        for text in spread_evenly(read_prompts_file(BUNDLED_SUITES[suite]), num_prompts)
    ]
    return [encoded.token_ids for encoded in llm.encode_prompts(texts)]


def engine_options(max_num_seqs: int = 8, **more: Any) -> dict[str, Any]:
    """Options that vLLM's LLM and our own have under the same names.

    Args:
        max_num_seqs: requests that run at once.
        more: options that come on top, or in place of these.
    """
    return {
        "model": str(BUNDLED_MODEL_DIR),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False,
        **more,
    }


def drafting(k: int, **more: Any) -> dict[str, Any]:
    """Options of vLLM's LLM with which its head drafts; none at K = 0, where nothing does.

    Args:
        k: drafts per step.
        more: fields of `speculative_config`.
    """
    if not k:
        return {}
    # The CPU captures no graphs.
    head = {"method": "mtp", "num_speculative_tokens": k, "enforce_eager": True}
    return {"speculative_config": {**head, **more}}
