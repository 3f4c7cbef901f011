"""What the package exports, and that importing it costs nothing until it is used."""

import importlib.metadata
import subprocess
import sys

import pytest

import outrider


def test_exported_names() -> None:
    assert outrider.__all__ == [
        "LLM",
        "AsyncLLM",
        "CompletionOutput",
        "EngineConfig",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
        "__version__",
    ]
    for name in outrider.__all__:
        value = getattr(outrider, name)
        assert name == "__version__" or value.__name__ == name
    assert set(outrider.__all__) <= set(dir(outrider))
    assert outrider.__version__ == importlib.metadata.version("outrider")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'outrider' has no attribute 'LMM'"):
        outrider.LMM  # noqa: B018


def test_the_rules_are_usable_alone() -> None:
    from outrider.spec_decode import block_verify, coupled_verify, greedy_verify, standard_verify

    for rule in (block_verify, coupled_verify, greedy_verify, standard_verify):
        assert rule.__doc__


@pytest.mark.parametrize(
    "statement",
    [
        "import outrider",
        "from outrider import EngineConfig, RequestOutput, SamplingParams",
        "from outrider import StructuredOutputsParams",
        "from outrider.entrypoints.cli import main; main(['--version'])",
        "from outrider.entrypoints.cli import main; main(['generate', '--help'])",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
