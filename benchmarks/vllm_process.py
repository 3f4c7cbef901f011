"""Runs `benchmarks.vllm_run`, an engine of vLLM, in a process of its own and keeps its log."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

TIMEOUT_S = 1800
_LOG_TAIL = 6000


class VllmError(OutriderError):
    """A vLLM that ended with an error.

    Attributes:
        reason: the last line of its log that names an error.
    """

    def __init__(self, status: int | None, log: str) -> None:
        named = [line for line in log.splitlines() if "Error: " in line]
        self.reason = named[-1].strip() if named else ""
        ended = f"did not end within {TIMEOUT_S} s" if status is None else f"ended with {status}"
        super().__init__(f"vLLM {ended}, its log ends with:\n{log[-_LOG_TAIL:]}")


def num_workers(engine: dict[str, Any]) -> int:
    """Of a layout in vLLM's options."""
    product = 1
    for kind in ("tensor", "data", "pipeline"):
        product *= int(engine.get(f"{kind}_parallel_size", 1))
    return product


def run_vllm(task: dict[str, Any]) -> dict[str, Any]:
    """Decodes a task of `benchmarks.vllm_run`.

    Raises:
        VllmError: it did not come to its end.
    """
    cores = sorted(os.sched_getaffinity(0))
    # A worker has a core, and shares it where there are fewer.
    binding = "|".join(
        str(cores[index % len(cores)]) for index in range(num_workers(task["engine"]))
    )
    with tempfile.TemporaryDirectory() as folder:
        asked, found, log = (Path(folder) / name for name in ("task.json", "found.json", "log"))
        asked.write_text(json.dumps(task))
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.vllm_run", str(asked), str(found)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_CPU_OMP_THREADS_BIND": binding,
                    **os.environ,
                },
                cwd=Path(__file__).parents[1],
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # Its workers too, of which an engine that failed may leave some.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status != 0 or not found.exists():
            raise VllmError(status, log.read_text())
        outcome: dict[str, Any] = json.loads(found.read_text())
        return outcome
