"""Hundreds of prompts of mixed lengths at once, through the Python API and streamed."""

import asyncio
import random
from pathlib import Path

from outrider import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from outrider.entrypoints.output_processor import merge_outputs

NUM_PROMPTS = 200
# float64: what else is in the batch changes no last bit that matters.
OPTIONS = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    "dtype": "float64",
    "max_model_len": 96,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 160,
    "block_size": 4,
    "kv_cache_memory": "128KiB",
}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled ones, some with two completions, with penalties here and there."""
    choose = random.Random(5)
    prompts = [
        [choose.randrange(300) for _ in range(choose.randint(1, 40))] for _ in range(NUM_PROMPTS)
    ]
    params = [
        SamplingParams(
            n=1 + (i % 17 == 0),
            temperature=choose.choice((0.0, 1.0)),
            rejection_sample_method="coupled",
            seed=i,
            max_tokens=choose.randint(1, 6),
            num_speculative_tokens=choose.choice((None, 0, 1, 2)),
            presence_penalty=choose.choice((0.0, 0.7)),
            output_kind=RequestOutputKind.DELTA,
        )
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


def said(outputs: list[RequestOutput]) -> list[list[tuple[str, list[int], str | None]]]:
    return [[(c.text, c.token_ids, c.finish_reason) for c in out.outputs] for out in outputs]


def test_all_at_once_in_pieces_and_one_by_one(model_dir: Path) -> None:
    prompts, params = requests()
    llm = LLM(model_dir, **OPTIONS)
    together = llm.generate(prompts, params)
    assert llm.llm_engine.metrics.num_accepted_tokens > 5
    alone = [llm.generate([prompts[i]], params[i])[0] for i in range(0, NUM_PROMPTS, 20)]
    assert said(alone) == said(together[::20])

    async def stream(engine: AsyncLLM, i: int) -> RequestOutput:
        await asyncio.sleep(0.0005 * i)
        whole: RequestOutput | None = None
        async for output in engine.generate(prompts[i], params[i], request_id=str(i)):
            kind = RequestOutputKind.DELTA
            whole = output if whole is None else merge_outputs(whole, output, kind)
        assert whole is not None
        return whole

    async def stream_all(engine: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(stream(engine, i) for i in range(NUM_PROMPTS)))

    engine = AsyncLLM(model_dir, **OPTIONS)
    try:
        streamed = asyncio.run(stream_all(engine))
    finally:
        engine.shutdown()
    assert said(streamed) == said(together)
