"""A request with a seed whose prompt is read in pieces, through the whole of vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
# A prompt of 40 tokens alone; behind one of 30, which leaves 18 rows of the first step to it; and
# the same as vLLM does it by itself.
CODE = """
import json
from outrider.vllm_plugin import register
register()
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from outrider.bundled import BUNDLED_MODEL_DIR
llm = LLM(
    str(BUNDLED_MODEL_DIR), dtype="float32", max_model_len=128, max_num_seqs=4,
    max_num_batched_tokens=48, enforce_eager=True, enable_prefix_caching=False,
    speculative_config={"method": "mtp", "num_speculative_tokens": 2,
        "rejection_sample_method": "block", "draft_sample_method": "probabilistic"},
)
pieces, hooked = [], GPUModelRunner.sample_tokens
def counting(self, *args):
    pieces.append(int(self.discard_request_mask.np[: self.input_batch.num_reqs].sum()))
    return hooked(self, *args)
def decode(*lengths):
    pieces.clear()
    params = SamplingParams(temperature=1, seed=1, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*range(100, 100 + length)]} for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {"text": list(outputs[-1].outputs[0].token_ids), "pieces": sum(pieces)}
GPUModelRunner.sample_tokens = counting
told = [decode(40), decode(30, 40)]
GPUModelRunner.sample_tokens = hooked.__wrapped__
try:
    told.append(decode(30, 40))
except RuntimeError as error:
    told.append({"error": str(error)})
print(json.dumps(told))
"""


def test_a_text_does_not_depend_on_the_pieces_of_its_prompt() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    whole, in_pieces, upstream = json.loads(ended.stdout.splitlines()[-1])
    assert (whole["pieces"], in_pieces["pieces"]) == (0, 1)
    assert whole["text"] == in_pieces["text"]
    assert upstream == {"error": "CPU Generator does not use offset"}
