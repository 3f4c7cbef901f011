"""Many steps with requests that come and go: what is held in memory stays the same."""

import pytest
import torch

from outrider.engine.engine import LLMEngine
from tests.engine.random_workload import MAX_K, TOKENIZER, Visit, check, random_visits
from tests.held_memory import STATM, Held
from tests.tiny_engine import make_engine, tiny_model

# One layer of each kind, so that the steps are many and not long.
SHALLOW = {
    "num_hidden_layers": 2,
    "layer_types": ("linear_attention", "indexed_attention"),
    "ple_layer_ids": (1,),
}


def run(engine: LLMEngine, num_steps: int, visits: list[Visit]) -> None:
    """So many steps, with a few requests always there, then to the end of all."""
    last, index = engine.num_steps + num_steps, 0
    while engine.num_steps < last or engine.has_unfinished_requests():
        while engine.num_steps < last and len(engine.scheduler._requests) < 8:
            visit = visits[index % len(visits)]
            engine.add_request(str(index), visit.prompt, visit.params)
            index += 1
        outputs = engine.step()
        for output in outputs:
            if len(output.new_token_ids) > 2 and int(output.request_id) % 7 == 0:
                engine.abort_request(output.request_id)
        check(engine)


@pytest.mark.skipif(not STATM.exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("warm_up", "num_steps"), [(150, 300), pytest.param(2000, 18_000, marks=pytest.mark.slow)]
)
def test_memory_is_flat(warm_up: int, num_steps: int) -> None:
    model = tiny_model(torch.float32, **SHALLOW)
    options = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 6}
    bytes_per_block = make_engine(model, MAX_K, TOKENIZER, **options).cache_plan.bytes_per_block
    engine = make_engine(model, MAX_K, TOKENIZER, kv_cache_memory=16 * bytes_per_block, **options)
    visits = random_visits(200, seed=0)
    run(engine, warm_up, visits)
    before = Held.measure()
    run(engine, num_steps, visits)
    after = Held.measure()
    print(f"after {warm_up} steps {before}, at the end {after}")  # noqa: T201 - shown by -s
    assert engine.num_steps >= warm_up + num_steps
    assert engine.scheduler.num_preemptions > num_steps / 100
    assert after.num_tensors == before.num_tensors
    assert after.num_objects <= before.num_objects + 20
    assert after.resident_mib <= before.resident_mib + 8
