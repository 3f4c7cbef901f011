"""What a vLLM with the plugin does not start with: one line each, from the engine itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.errors import ConfigError, OutriderError

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
# The errors of each start, one after another in one process.
CODE = """
import json, sys
from outrider.vllm_plugin import register
register()
from vllm import LLM
for model, options in json.loads(sys.argv[1]):
    try:
        LLM(model=model, dtype="float32", max_model_len=64, **options)
    except Exception as error:
        print("REFUSED " + json.dumps([type(error).__name__, str(error)]), flush=True)
    else:
        print("REFUSED null", flush=True)
"""


def drafting(**options: Any) -> dict[str, Any]:
    """Options of an engine that drafts."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, **options}}


def refusals(*starts: tuple[Path, dict[str, Any]]) -> list[list[str]]:
    """Kind and text of the error of each start."""
    ended = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([(str(model), one) for model, one in starts])],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    told = [line for line in ended.stdout.splitlines() if line.startswith("REFUSED ")]
    assert len(told) == len(starts), ended.stderr[-4000:]
    return [json.loads(line.removeprefix("REFUSED ")) for line in told]


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint without the head's tensors; its configuration still has a head."""
    folder = tmp_path_factory.mktemp("headless") / "checkpoint"
    shutil.copytree(BUNDLED_MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.py", "suites"))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "mtp." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_head(folder: Path, headless: Path, num_layers: int) -> Path:
    """A checkpoint whose configuration has so many layers of a head."""
    shutil.copytree(headless, folder)
    config = json.loads((folder / "config.json").read_text())
    owner = config.get("text_config", config)
    assert owner["mtp_num_hidden_layers"] == 1
    owner["mtp_num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_options_that_the_checkpoint_cannot_be_run_with(headless: Path, tmp_path: Path) -> None:
    undrafted = with_head(tmp_path / "undrafted", headless, 0)
    deep = with_head(tmp_path / "deep", headless, 2)
    assert refusals(
        (undrafted, drafting()),
        (BUNDLED_MODEL_DIR, drafting(num_speculative_tokens=9)),
        (BUNDLED_MODEL_DIR, {**drafting(), "pipeline_parallel_size": 2}),
        (BUNDLED_MODEL_DIR, drafting(index_share_for_mtp_iteration=True)),
        (deep, drafting(num_speculative_tokens=2)),
        (BUNDLED_MODEL_DIR, drafting(**SYNTHETIC)),
        (BUNDLED_MODEL_DIR, {"mamba_cache_dtype": "bfloat16"}),
    ) == [
        [
            "ConfigError",
            f'speculative_config.method "mtp": {undrafted} has no head to draft with, its '
            "mtp_num_hidden_layers is 0; leave speculative_config out",
        ],
        [
            "ConfigError",
            "speculative_config.num_speculative_tokens must be an integer from 1 to 8, got 9",
        ],
        # vLLM's own: the ids that the n-gram embedding reads do not reach later stages.
        [
            "NotImplementedError",
            "Qwen4Exp N-gram PLE embedding requires pipeline_parallel_size=1 because non-first "
            "pipeline ranks do not receive the raw input_ids it needs. Please run with PP=1.",
        ],
        [
            "CheckpointError",
            "index_share_for_mtp_iteration: on the CPU the head selects anew in each draft step; "
            'put "index_share_for_mtp_iteration": false into --speculative-config',
        ],
        ["CheckpointError", "mtp_num_hidden_layers must be 1 to draft with, got 2"],
        [
            "ConfigError",
            'speculative_config.rejection_sample_method "synthetic" is not known to vLLM\'s '
            'kernels for the CPU; write "standard"',
        ],
        ["ConfigError", 'mamba_cache_dtype "bfloat16" is not built: "auto" keeps float32 here'],
    ]


def test_a_head_that_is_missing_from_the_tensors(headless: Path) -> None:
    assert refusals((headless, drafting())) == [
        [
            "CheckpointError",
            f"{headless}: no tensor mtp.*: the checkpoint has no head to draft with; "
            "leave --speculative-config out",
        ]
    ]


def test_tensors_that_are_missing_or_cut_otherwise(tmp_path: Path) -> None:
    """vLLM by itself would run on what was in the memory."""
    tensors = load_file(BUNDLED_MODEL_DIR / "model.safetensors")
    (table,) = {name.rpartition(".shard_")[0] for name in tensors if ".shard_" in name}
    left_out = {
        "trunk": "model.layers.3.self_attn.o_proj.weight",
        "shard": f"{table}.shard_1.weight",
        "head": "mtp.fc_hidden.weight",
    }

    def checkpoint(name: str, tensors: dict[str, torch.Tensor]) -> Path:
        folder = tmp_path / name
        shutil.copytree(BUNDLED_MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.py", "suites"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    folders = [
        checkpoint(kind, {name: one for name, one in tensors.items() if name != missing})
        for kind, missing in left_out.items()
    ]
    whole = torch.cat([tensors[f"{table}.shard_{index}.weight"] for index in range(2)])
    others = {name: one for name, one in tensors.items() if ".shard_" not in name}
    quarters = {
        f"{table}.shard_{index}.weight": part.clone() for index, part in enumerate(whole.chunk(4))
    }
    folders.append(checkpoint("quarters", {**others, **quarters}))
    told = refusals(*((folder, drafting()) for folder in folders))
    assert [kind for kind, _ in told] == ["CheckpointError"] * 4
    for name, (_, message) in zip(left_out.values(), told, strict=False):
        assert name in message
    size = -(-len(whole) // 2)
    assert f"on vLLM a table of {len(whole)} is in shards of {size}" in told[-1][1]


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("cache_dtype", "fp8", "bfloat16"),
        ("mamba_cache_dtype", "float32", "bfloat16"),
        ("mamba_ssm_cache_dtype", "bfloat16", "float32"),
    ],
)
def test_dtypes_of_caches(name: str, given: str, kept: str) -> None:
    from outrider.vllm_plugin.architecture import check_cache_dtypes

    def check(dtype: str) -> None:
        names = ("cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
        cache = SimpleNamespace(**dict.fromkeys(names, "auto") | {name: dtype})
        model = SimpleNamespace(dtype=torch.bfloat16)
        check_cache_dtypes(SimpleNamespace(cache_config=cache, model_config=model))

    check("auto")
    check(kept)
    with pytest.raises(ConfigError) as caught:
        check(given)
    shown = name if name.startswith("mamba") else f"kv_{name}"
    assert str(caught.value) == f'{shown} "{given}" is not built: "auto" keeps {kept} here'


def test_ranks_that_key_heads_cannot_be_shared_among() -> None:
    from outrider.vllm_plugin.sharding import check_shared

    for tp_size in (1, 2, 4):
        check_shared("num_key_value_heads", 2, tp_size)
    check_shared("num_key_value_heads", 4, 2)
    for count, tp_size in ((2, 3), (4, 6), (3, 2)):
        with pytest.raises(OutriderError) as caught:
            check_shared("num_key_value_heads", count, tp_size)
        assert str(caught.value) == (
            f"tensor_parallel_size {tp_size} is neither a divisor nor a multiple of "
            f"num_key_value_heads {count}"
        )
