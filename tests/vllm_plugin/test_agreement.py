"""What vLLM writes with the plugin is what our own engine writes, for each way to run it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def compare(*arguments: str) -> list[dict[str, Any]]:
    """Rows of `benchmarks.vllm_agreement`, K = 0 first; see `Agreement`."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_agreement", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])["results"]
    return rows


def check_float32(plain: dict[str, Any], drafted: dict[str, Any]) -> None:
    """In float32 nothing separates the engines but near-ties."""
    for row in (plain, drafted):
        assert row["num_agreeing"] >= row["num_tokens"] - 1
        assert row["largest_gap"] < 1e-4
    assert drafted["num_same_texts"] >= drafted["num_texts"] - 1
    assert plain["mean_acceptance_length"] == 1.0
    assert drafted["mean_acceptance_length"] > 1.8


@pytest.mark.vllm
def test_one_worker() -> None:
    plain, drafted = compare("-k", "3", "--num-prompts", "6", "--max-tokens", "32")
    check_float32(plain, drafted)
    assert plain["num_tokens"] > 150


@pytest.mark.vllm
def test_two_workers_with_experts_divided() -> None:
    layout = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    plain, drafted = compare(
        "-k", "3", "--num-prompts", "2", "--max-tokens", "16", "--engine", json.dumps(layout)
    )
    check_float32(plain, drafted)


@pytest.mark.vllm
@pytest.mark.slow
def test_prefix_cache_hits_change_nothing() -> None:
    plain, drafted = compare("-k", "3", "--num-prompts", "4", "--prefix-caching")
    check_float32(plain, drafted)
    assert plain["num_cached_tokens"] > 0
    assert drafted["num_cached_tokens"] > 0


@pytest.mark.vllm
@pytest.mark.slow
def test_pieces_of_prompts_change_nothing() -> None:
    from benchmarks.vllm_judge import Judge

    layout = {"max_num_batched_tokens": 48}
    assert max(map(len, Judge().prompts(("code",), 4))) > 2 * layout["max_num_batched_tokens"]
    check_float32(*compare("-k", "3", "--num-prompts", "4", "--engine", json.dumps(layout)))


@pytest.mark.vllm
@pytest.mark.slow
def test_drafts_that_a_schema_cuts_change_nothing() -> None:
    plain, drafted = compare("-k", "3", "--num-prompts", "4", "--json-schema", "--suite", "json")
    assert drafted["num_draft_tokens_missing"] > 0
    assert drafted["num_same_texts"] == plain["num_texts"]
    assert drafted["mean_acceptance_length"] > 1.0


@pytest.mark.vllm
@pytest.mark.slow
def test_bfloat16_drafts_as_well_as_it_decodes_plainly() -> None:
    plain, drafted = compare("-k", "3", "--num-prompts", "6", "--dtype", "bfloat16")
    assert plain["num_agreeing"] / plain["num_tokens"] > 0.95
    assert drafted["num_agreeing"] / drafted["num_tokens"] > (
        plain["num_agreeing"] / plain["num_tokens"] - 0.01
    )


# vLLM's own model imports torchvision for its images, and scripts/setup-vllm leaves that out.
TORCHVISION = """
import importlib.abc, importlib.machinery, sys

__version__ = "0.28"

class Attribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Attribute(name, (), {})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(Attribute("Module", (), {}), name)

sys.meta_path.append(Finder())
"""


@pytest.fixture
def torchvision(tmp_path: Path) -> Path:
    """A folder with a package of that name, in which every name is there and none does a thing."""
    for name, text in (
        ("torchvision/__init__.py", TORCHVISION),
        ("torchvision-0.28.dist-info/METADATA", "Name: torchvision\nVersion: 0.28\n"),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.vllm
def test_without_the_plugin_vllm_does_not_run_the_checkpoint(torchvision: Path) -> None:
    """The failure that the plugin is there for: vLLM's own model wants an accelerator."""
    code = (
        "from vllm import LLM\n"
        "from outrider.bundled import BUNDLED_MODEL_DIR\n"
        "LLM(model=str(BUNDLED_MODEL_DIR), dtype='bfloat16', max_model_len=256)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{torchvision}",
            "OUTRIDER_VLLM_QWEN4_EXP_MODEL": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert found.returncode != 0
    trace = found.stderr.split("Traceback (most recent call last):")[-1]
    assert "RuntimeError: pin_memory=True requires a CUDA" in trace.splitlines()[-1]
    assert "vllm/models/qwen4_exp/nvidia" in trace
