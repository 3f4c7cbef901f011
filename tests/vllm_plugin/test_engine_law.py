"""The law of texts that vLLM decodes with drafts, whole: scheduler, head, verification."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NUM_REQUESTS = 2000
CODE = (
    "import sys\n"
    "from outrider.vllm_plugin import register\n"
    "register()\n"
    "from tests.vllm_plugin.engine_law import main\n"
    "main(sys.argv[1], int(sys.argv[2]))\n"
)


def start(rule: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", CODE, rule, str(NUM_REQUESTS)],
        env=os.environ | known | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def report_of(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_texts_of_several_tokens_have_the_target_s_law(rule: str) -> None:
    ended = start(rule)
    assert ended.returncode == 0, ended.stderr[-2000:]
    report = report_of(ended)
    assert (report["num_blocks"] > 0) is (rule == "block")
    assert report["num_foreign"] == 0
    assert report["num_texts"] > 20
    assert report["num_accepted"] > report["num_drafts"] / 4
    assert report["p_value"] > 1e-6


def test_without_the_fix_of_their_parameters_they_have_not() -> None:
    """What the memory holds is a temperature and a top_k of any size: it may end the engine."""
    ended = start("standard", OUTRIDER_VLLM_EXPANDED_PARAMETERS="0")
    if ended.returncode == 0:
        report = report_of(ended)
        assert report["num_foreign"] or report["p_value"] < 1e-6
    else:
        assert "selected index k out of range" in ended.stderr
