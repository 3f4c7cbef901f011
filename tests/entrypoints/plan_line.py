"""The line about the caches that every command writes to stderr once its engine is there."""

import re

PLAN_LINE = re.compile(r"^caches: \d+ blocks of .*\n", re.MULTILINE)


def without_plan(err: str) -> str:
    """What a command wrote to stderr, less that line; there is at most one."""
    rest, count = PLAN_LINE.subn("", err)
    assert count <= 1, err
    return rest
