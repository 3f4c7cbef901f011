"""docs/training.md lists the options there are, and no others."""

import dataclasses
import re
from pathlib import Path

import pytest

from outrider.training import config, evaluation

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
TABLES = {
    "run": config.RunConfig,
    "data": config.DataConfig,
    "loss": config.LossConfig,
    "optimizer": config.OptimizerConfig,
    "schedule": config.ScheduleConfig,
}


def documented(table: str) -> set[str]:
    """The keys in the column below "key of `[table]`"."""
    lines = iter(TEXT.splitlines())
    head = next(line for line in lines if f"key of `[{table}]`" in line)
    column = head.split("|").index(f" key of `[{table}]` ")
    next(lines)
    keys: set[str] = set()
    for line in lines:
        if not line.startswith("|"):
            break
        keys.update(re.findall(r"`(\w+)`", line.split("|")[column]))
    return keys


@pytest.mark.parametrize("table", TABLES)
def test_every_option_is_listed(table: str) -> None:
    assert documented(table) == {field.name for field in dataclasses.fields(TABLES[table])}


def test_every_figure_of_an_evaluation_is_explained() -> None:
    names = {field.name for field in dataclasses.fields(evaluation.Evaluation)}
    assert names <= set(re.findall(r"`(\w+)`", TEXT))
