"""The log of a run: one JSON object a line, appended as the run goes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError
from outrider.models.qwen4_exp.checkpoint_writer import flush_to_disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends to the log of an output folder.

    Args:
        path: the file; made at the first record.
        last_step: of the checkpoint that the run goes on from. What an earlier process logged
            after it is dropped, since these steps run again.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        self._evaluated: set[int] = set()
        if path.exists():
            kept = [record for record in read_log(path) if record["step"] <= last_step]
            self._evaluated = {one["step"] for one in kept if one["kind"] == "eval"}
            self._replace(kept)

    def has_evaluation(self, step: int) -> bool:
        """Whether the log tells of an evaluation at this step."""
        return step in self._evaluated

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one record, floats cut to five digits, and returns it as it was written."""
        rounded = {name: _rounded(value) for name, value in record.items()}
        if record.get("kind") == "eval":
            self._evaluated.add(record["step"])
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rounded) + "\n")
        except OSError as error:
            raise self._failure(error) from error
        return rounded

    def _replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            temporary.write_text(
                "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
            )
            flush_to_disk(temporary)
            temporary.replace(self._path)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutriderError:
        return OutriderError(
            f"{self._path}: the log could not be written ({error.strerror or error})"
        )


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a log; a last line that a crash cut short is left out.

    Raises:
        OutriderError: the file cannot be read, or another line is no record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"{path}: cannot be read ({error})") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not {"kind", "step", "num_tokens"} <= record.keys():
            raise OutriderError(f"{path}: line {number} is no record of a training run")
        records.append(record)
    return records


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
