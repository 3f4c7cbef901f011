"""Tests marked `vllm` import it inside, and run where it is installed."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm") is None:
            continue
        if find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
        # What vLLM and its many dependencies warn of is theirs.
        item.add_marker(pytest.mark.filterwarnings("default"))
