"""The options of drafting that vLLM is given, beside the bundled checkpoint and edited ones."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.errors import ConfigError
from outrider.vllm_plugin import hooks, register
from outrider.vllm_plugin.architecture import read_architecture
from outrider.vllm_plugin.speculative_config import check_runner

pytestmark = pytest.mark.vllm

MTP = {"method": "mtp", "num_speculative_tokens": 3}
BLOCK = {"rejection_sampler_config": {"enable_block_verify": True}}


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def model_config(folder: Path) -> Any:
    """A model that vLLM is to serve."""
    from vllm.config import ModelConfig

    register()
    return ModelConfig(str(folder), dtype="float32", max_model_len=64)


@pytest.fixture(scope="module")
def target() -> Any:
    return model_config(BUNDLED_MODEL_DIR)


def speculative(target: Any, options: dict[str, Any] | None, **others: Any) -> Any:
    """The SpeculativeConfig that vLLM makes of options."""
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    options = None if options is None else dict(options)
    arguments = EngineArgs(model=target.model, speculative_config=options, **others)
    return arguments.create_speculative_config(target, ParallelConfig())


def rules(config: Any) -> tuple[str, str]:
    return config.rejection_sample_method, config.draft_sample_method


def test_mtp_resolves_to_the_head_of_qwen4_exp(target: Any) -> None:
    from vllm.config import SpeculativeConfig

    config = speculative(target, MTP)
    assert (config.method, config.num_speculative_tokens) == ("mtp", 3)
    draft = SpeculativeConfig.hf_config_override(copy.deepcopy(target.hf_config))
    assert draft.model_type == "qwen4_exp_mtp"
    assert draft.architectures == ["Qwen4ExpMTP"]
    assert draft.n_predict == 1


def test_no_drafts_are_no_options(target: Any) -> None:
    assert speculative(target, None) is None
    unused = {"rejection_sampler_config": {"enable_block_verify": False}}
    assert speculative(target, None, additional_config=unused) is None


@pytest.mark.parametrize(
    ("options", "additional", "expected"),
    [
        (MTP, BLOCK, ("block", "probabilistic")),
        ({**MTP, "rejection_sample_method": "block"}, {}, ("block", "probabilistic")),
        ({**MTP, "draft_sample_method": "greedy"}, BLOCK, ("block", "greedy")),
        (
            MTP,
            {"rejection_sampler_config": {"enable_block_verify": False}},
            ("standard", "greedy"),
        ),
        (MTP, {"another_plugin": 1}, ("standard", "greedy")),
    ],
)
def test_the_rule(
    target: Any,
    options: dict[str, Any],
    additional: dict[str, Any],
    expected: tuple[str, str],
) -> None:
    assert rules(speculative(target, options, additional_config=additional)) == expected


ERRORS = {
    "the draft's type as the method": (
        {"method": "qwen4_exp_mtp", "num_speculative_tokens": 3},
        {},
        'speculative_config.method: write "mtp", not "qwen4_exp_mtp"',
    ),
    "a contradiction": (
        {**MTP, "rejection_sample_method": "standard"},
        BLOCK,
        'speculative_config.rejection_sample_method is "standard" but additional_config.'
        'rejection_sampler_config.enable_block_verify true means "block": give one of the two',
    ),
    "an unknown key": (
        MTP,
        {"rejection_sampler_config": {"enable_block_verfy": True}},
        "unknown option 'additional_config.rejection_sampler_config.enable_block_verfy'; the "
        'nearest is "additional_config.rejection_sampler_config.enable_block_verify"',
    ),
    "a rule without drafts": (
        None,
        BLOCK,
        "additional_config.rejection_sampler_config.enable_block_verify true has no effect without "
        "speculative_config",
    ),
    "an unknown key without drafts": (
        None,
        {"rejection_sampler_config": {"enable_block_verfy": False}},
        "unknown option 'additional_config.rejection_sampler_config.enable_block_verfy'; the "
        'nearest is "additional_config.rejection_sampler_config.enable_block_verify"',
    ),
    "not a truth value": (
        MTP,
        {"rejection_sampler_config": {"enable_block_verify": "yes"}},
        "rejection_sampler_config.enable_block_verify must be true or false, got 'yes'",
    ),
}


@pytest.mark.parametrize(("options", "additional", "told"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(
    target: Any, options: dict[str, Any] | None, additional: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        speculative(target, options, additional_config=additional)
    assert str(caught.value) == told


def test_the_method_as_a_flag_of_its_own(target: Any) -> None:
    with pytest.raises(ConfigError, match='write "mtp", not "qwen4_exp_mtp"'):
        speculative(target, None, spec_method="qwen4_exp_mtp", spec_tokens=3)


def edited(folder: Path, *, drops: str | None = None, **fields: Any) -> Path:
    """A copy of the bundled checkpoint without weights, with fields of its text model."""
    folder.mkdir()
    for path in BUNDLED_MODEL_DIR.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    owner = config.get("text_config", config)
    owner.pop(drops, None)
    owner.update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"method": "mtp"},
        {"method": "qwen3_next_mtp"},
        {"model": str(BUNDLED_MODEL_DIR)},
        {"model": str(BUNDLED_MODEL_DIR), "method": "mtp"},
    ],
    ids=["mtp", "another name of it", "a model alone", "a model and mtp"],
)
def test_k_of_whatever_becomes_mtp(target: Any, options: dict[str, Any]) -> None:
    config = speculative(target, {**options, "num_speculative_tokens": 8})
    assert (config.method, config.num_speculative_tokens) == ("mtp", 8)
    with pytest.raises(ConfigError) as caught:
        speculative(target, {**options, "num_speculative_tokens": 9})
    assert str(caught.value) == (
        "speculative_config.num_speculative_tokens must be an integer from 1 to 8, got 9"
    )


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_checkpoint_without_a_head(target: Any, tmp_path: Path, *, is_nested: bool) -> None:
    folder = tmp_path / "checkpoint"
    if is_nested:
        edited(folder, drops="mtp_num_hidden_layers", mtp={"num_hidden_layers": 0})
    else:
        edited(folder, mtp_num_hidden_layers=0)
    told = (
        f'speculative_config.method "mtp": {folder} has no head to draft with, its '
        "mtp_num_hidden_layers is 0; leave speculative_config out"
    )
    for served, options in ((model_config(folder), {}), (target, {"model": str(folder)})):
        with pytest.raises(ConfigError) as caught:
            speculative(served, {**MTP, **options})
        assert str(caught.value) == told


def test_a_head_of_another_checkpoint(tmp_path: Path) -> None:
    """vLLM loads it from there, whatever the target has."""
    headless = model_config(edited(tmp_path / "headless", mtp_num_hidden_layers=0))
    config = speculative(headless, {**MTP, "model": str(BUNDLED_MODEL_DIR)})
    assert config.draft_model_config.model == str(BUNDLED_MODEL_DIR)


def test_a_head_that_is_described_in_an_object_of_its_own(tmp_path: Path) -> None:
    folder = edited(
        tmp_path / "nested", drops="mtp_num_hidden_layers", mtp={"num_hidden_layers": 1}
    )
    config = speculative(model_config(folder), MTP)
    draft = SimpleNamespace(model_config=config.draft_model_config)
    assert read_architecture(draft).mtp_num_hidden_layers == 1


def test_upstream_divides_by_the_layers_of_no_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.config import SpeculativeConfig

    headless = model_config(edited(tmp_path / "headless", mtp_num_hidden_layers=0))
    upstream = staticmethod(SpeculativeConfig.hf_config_override.__wrapped__)
    monkeypatch.setattr(SpeculativeConfig, "hf_config_override", upstream)
    with pytest.raises(ZeroDivisionError):
        speculative(headless, MTP)


def test_another_model_has_vllm_s_own_limits(target: Any) -> None:
    config = speculative(target, {"method": "ngram", "num_speculative_tokens": 9})
    assert config.num_speculative_tokens == 9


class Config:
    """As much of a configuration of vLLM as the check of the runner looks at."""

    def __init__(self, rule: str, *, is_v2: bool = False) -> None:
        self.speculative_config = type("Speculative", (), {"rejection_sample_method": rule})
        self.use_v2_model_runner = is_v2


def test_a_rule_that_the_runner_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in ("standard", "block"):
        check_runner(Config(rule))
    with pytest.raises(ConfigError, match=r'"synthetic" is not known to vLLM.s kernels'):
        check_runner(Config("synthetic"))
    monkeypatch.setattr(hooks, "_states", {})
    check_runner(Config("standard"))
    check_runner(Config("block", is_v2=True))
    with pytest.raises(ConfigError, match=r'"block" has no effect in vLLM.s V1 model runner'):
        check_runner(Config("block"))
