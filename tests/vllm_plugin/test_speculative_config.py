"""The options of drafting that vLLM is given, beside the bundled checkpoint and edited ones."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.errors import ConfigError
from outrider.vllm_plugin import hooks, register
from outrider.vllm_plugin.speculative_config import check_runner

pytestmark = pytest.mark.vllm

MTP = {"method": "mtp", "num_speculative_tokens": 3}
BLOCK = {"rejection_sampler_config": {"enable_block_verify": True}}


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@pytest.fixture(scope="module")
def hf_config() -> Any:
    """The bundled checkpoint's configuration, as vLLM reads it."""
    from vllm.transformers_utils.config import get_config

    return get_config(str(BUNDLED_MODEL_DIR), trust_remote_code=False)


@dataclass
class Options:
    """Gives vLLM options beside a target model, and returns those its own configuration gets."""

    hf_config: Any

    def __call__(self, options: dict[str, Any] | None, **others: Any) -> SimpleNamespace:
        from vllm.engine.arg_utils import EngineArgs

        arguments = EngineArgs(model=str(BUNDLED_MODEL_DIR), speculative_config=options, **others)
        target = SimpleNamespace(
            model="target",
            hf_config=self.hf_config,
            hf_text_config=self.hf_config.get_text_config(),
        )
        return arguments.create_speculative_config(target, None)


@pytest.fixture
def speculative(hf_config: Any, monkeypatch: pytest.MonkeyPatch) -> Options:
    from vllm.engine import arg_utils

    monkeypatch.setattr(arg_utils, "SpeculativeConfig", SimpleNamespace)
    return Options(hf_config)


def rules(config: SimpleNamespace) -> tuple[str | None, str | None]:
    return tuple(
        getattr(config, name, None) for name in ("rejection_sample_method", "draft_sample_method")
    )


def test_mtp_resolves_to_the_head_of_qwen4_exp(speculative: Options) -> None:
    from vllm.config import SpeculativeConfig

    config = speculative(dict(MTP))
    assert (config.method, config.num_speculative_tokens) == ("mtp", 3)
    draft = SpeculativeConfig.hf_config_override(copy.deepcopy(speculative.hf_config))
    assert draft.model_type == "qwen4_exp_mtp"
    assert draft.architectures == ["Qwen4ExpMTP"]
    assert draft.n_predict == 1


def test_no_drafts_are_no_options(speculative: Options) -> None:
    assert speculative(None) is None


@pytest.mark.parametrize(
    ("options", "additional", "expected"),
    [
        (MTP, BLOCK, ("block", "probabilistic")),
        ({**MTP, "rejection_sample_method": "block"}, {}, ("block", "probabilistic")),
        ({**MTP, "draft_sample_method": "greedy"}, BLOCK, ("block", "greedy")),
        (
            MTP,
            {"rejection_sampler_config": {"enable_block_verify": False}},
            ("standard", None),
        ),
        (MTP, {"another_plugin": 1}, (None, None)),
    ],
)
def test_the_rule(
    speculative: Options,
    options: dict[str, Any],
    additional: dict[str, Any],
    expected: tuple[str | None, str | None],
) -> None:
    assert rules(speculative(dict(options), additional_config=additional)) == expected


ERRORS = {
    "the draft's type as the method": (
        {"method": "qwen4_exp_mtp", "num_speculative_tokens": 3},
        {},
        'speculative_config.method: write "mtp", not "qwen4_exp_mtp"',
    ),
    "K over 8": (
        {**MTP, "num_speculative_tokens": 9},
        {},
        "speculative_config.num_speculative_tokens must be an integer from 1 to 8, got 9",
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
    "not a truth value": (
        MTP,
        {"rejection_sampler_config": {"enable_block_verify": "yes"}},
        "rejection_sampler_config.enable_block_verify must be true or false, got 'yes'",
    ),
}


@pytest.mark.parametrize(("options", "additional", "told"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(
    speculative: Options, options: dict[str, Any], additional: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        speculative(dict(options), additional_config=additional)
    assert str(caught.value) == told


def test_the_method_as_a_flag_of_its_own(speculative: Options) -> None:
    with pytest.raises(ConfigError, match='write "mtp", not "qwen4_exp_mtp"'):
        speculative(None, spec_method="qwen4_exp_mtp", spec_tokens=3)


@pytest.mark.parametrize("num_layers", [0, None])
def test_a_checkpoint_without_a_head(speculative: Options, num_layers: int | None) -> None:
    speculative.hf_config = copy.deepcopy(speculative.hf_config)
    speculative.hf_config.get_text_config().mtp_num_hidden_layers = num_layers
    with pytest.raises(ConfigError) as caught:
        speculative(dict(MTP))
    assert str(caught.value) == (
        'speculative_config.method "mtp": target has no head to draft with, its '
        "mtp_num_hidden_layers is 0; leave speculative_config out"
    )


def test_another_model_has_vllm_s_own_limits(speculative: Options) -> None:
    speculative.hf_config = copy.deepcopy(speculative.hf_config)
    speculative.hf_config.model_type = "another"
    assert speculative({**MTP, "num_speculative_tokens": 9}).num_speculative_tokens == 9


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
