"""One vLLM engine decodes prompts: the child process of the comparisons with vLLM.

Reads a task from the file named first, writes what came out to the one named second.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

METRICS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:prefix_cache_hits": "num_cached_tokens",
}

Decode = Callable[[list[SamplingParams]], Awaitable[list[list[int]]]]


@dataclass(frozen=True)
class Round:
    """All prompts decoded once.

    Attributes:
        token_ids: of each prompt's output.
        seconds: from the first prompt to the last token.
        num_drafts: windows with drafts.
        num_draft_tokens: drafts in them.
        num_accepted_tokens: drafts that were kept.
        num_cached_tokens: of prompts, taken from the prefix cache.
    """

    token_ids: list[list[int]]
    seconds: float
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0


def counts() -> Counter[str]:
    """What this process has counted until now, over the ranks of data parallelism."""
    found: Counter[str] = Counter()
    for metric in get_metrics_snapshot():
        if metric.name in METRICS:
            found[METRICS[metric.name]] += metric.value
    return found


def round_params(asked: dict[str, Any], num_prompts: int) -> list[SamplingParams]:
    """For each prompt of a round; its number is the seed, so that no two draw alike."""
    schema = asked.get("schema")
    return [
        SamplingParams(
            temperature=asked["temperature"],
            max_tokens=asked["max_tokens"],
            seed=number if asked["temperature"] else None,
            ignore_eos=asked.get("ignore_eos", False),
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )
        for number in range(num_prompts)
    ]


async def measure_rounds(task: dict[str, Any], decode: Decode) -> list[Round]:
    """Decodes the prompts in each round's way."""
    rounds = []
    for asked in task["rounds"]:
        before, started = counts(), time.perf_counter()
        token_ids = await decode(round_params(asked, len(task["prompts"])))
        seconds = time.perf_counter() - started
        # With data parallelism the last step's counts come after its tokens.
        await asyncio.sleep(0.2)
        found = counts() - before
        rounds.append(Round(token_ids, seconds, **found))
    return rounds


async def one_engine(task: dict[str, Any]) -> dict[str, Any]:
    """Runs a task in this process, with workers beside it where the layout has several."""
    started = time.perf_counter()
    llm = LLM(disable_log_stats=False, **task["engine"])
    start_up = time.perf_counter() - started
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]

    async def decode(params: list[SamplingParams]) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    rounds = await measure_rounds(task, decode)
    return {
        "seconds_to_start": start_up,
        "request_bytes": request_bytes(llm),
        "rounds": [asdict(one) for one in rounds],
    }


def request_bytes(llm: LLM) -> dict[str, int]:
    """What a request of the longest length takes in the caches of one rank.

    Returns:
        "states", of the layers that keep one, and "all".
    """
    config = llm.llm_engine.vllm_config
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    found = Counter({"states": 0, "all": 0})
    for group in groups:
        spec = group.kv_cache_spec
        num_bytes = spec.max_memory_usage_bytes(config) * len(group.layer_names)
        found["all"] += num_bytes
        found["states"] += num_bytes if hasattr(spec, "mamba_type") else 0
    return dict(found)


async def several_engines(task: dict[str, Any]) -> dict[str, Any]:
    """Runs a task with data parallelism; the prompts go round the ranks."""
    started = time.perf_counter()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(disable_log_stats=False, **task["engine"]))
    start_up = time.perf_counter() - started
    num_ranks = task["engine"]["data_parallel_size"]

    async def decode_one(number: int, params: SamplingParams) -> list[int]:
        prompt = {"prompt_token_ids": task["prompts"][number]}
        name = f"{time.monotonic_ns()}-{number}"
        token_ids: list[int] = []
        async for output in llm.generate(
            prompt, params, name, data_parallel_rank=number % num_ranks
        ):
            token_ids = list(output.outputs[0].token_ids)
        return token_ids

    async def decode(params: list[SamplingParams]) -> list[list[int]]:
        return list(await asyncio.gather(*(decode_one(*one) for one in enumerate(params))))

    try:
        rounds = await measure_rounds(task, decode)
    finally:
        llm.shutdown()
    return {"seconds_to_start": start_up, "rounds": [asdict(one) for one in rounds]}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Runs a task.

    Args:
        task: "prompts", token ids each; "engine", vLLM's options; "rounds", how all prompts are
            decoded each time: "temperature", "max_tokens", and "schema" (a JSON schema) and
            "ignore_eos" where they are wanted.

    Returns:
        "seconds_to_start", "rounds" (`Round`), and "request_bytes" without data parallelism.
    """
    is_divided = task["engine"].get("data_parallel_size", 1) > 1
    return asyncio.run(several_engines(task) if is_divided else one_engine(task))


if __name__ == "__main__":
    outcome = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(outcome))
