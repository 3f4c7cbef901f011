"""One vLLM engine decodes prompts greedily: the child process of `benchmarks.vllm_agreement`.

Reads a task from the file named first, writes what came out to the one named second.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

METRICS = {
    "num_drafts": "vllm:spec_decode_num_drafts",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "num_cached_tokens": "vllm:prefix_cache_hits",
}


def decode(task: dict[str, Any]) -> dict[str, Any]:
    """Runs a task.

    Args:
        task: "prompts", token ids each; "engine", vLLM's options; "max_tokens"; "schema", a JSON
            schema or None; "num_rounds", how often the prompts are sent.

    Returns:
        "token_ids" of the last round, "seconds" to start and to decode it, "num_tokens" of it, and
        the counts of METRICS over all rounds.
    """
    started = time.perf_counter()
    llm = LLM(disable_log_stats=False, **task["engine"])
    start_up = time.perf_counter() - started
    schema = task["schema"]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=task["max_tokens"],
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
    )
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    token_ids: list[list[int]] = []
    seconds = 0.0
    for _ in range(task["num_rounds"]):
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "token_ids": token_ids,
        "num_tokens": sum(map(len, token_ids)),
        "seconds_to_start": start_up,
        "seconds": seconds,
        **{name: counts.get(metric, 0) for name, metric in METRICS.items()},
    }


if __name__ == "__main__":
    found = decode(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
