"""vLLM's options of drafting, read as strictly as this package reads its own.

What would be ignored is an error at start that names the option, before a checkpoint is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.config import MAX_SPECULATIVE_TOKENS, RejectionSamplerConfig
from outrider.config.checks import check_int
from outrider.config.parsing import read_object, take_known
from outrider.errors import ConfigError
from outrider.vllm_plugin import block_verification
from outrider.vllm_plugin.architecture import num_head_layers
from outrider.vllm_plugin.hooks import is_active
from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK_VERIFY = "additional_config.rejection_sampler_config"
_HEAD_TYPE = "qwen4_exp_mtp"


def obstacle() -> None:
    """The options are the same on every platform."""


def install() -> None:
    """Checks the options where vLLM turns them into its configuration."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    replace(SpeculativeConfig, "hf_config_override", _with_layers_of_head)
    replace(EngineArgs, "create_speculative_config", _checked)
    replace(EngineArgs, "create_engine_config", _honoured)


def _checked(create: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        options = {
            **{
                key.replace("-", "_"): value
                for key, value in (self.speculative_config or {}).items()
            },
            **_given(method=self.spec_method, num_speculative_tokens=self.spec_tokens),
        }
        if not options:
            _check_without_drafts(self.additional_config)
        else:
            if options.get("method") == _HEAD_TYPE:
                raise ConfigError(f'speculative_config.method: write "mtp", not "{_HEAD_TYPE}"')
            chosen = _rule_options(options, self.additional_config)
            self.speculative_config = {**(self.speculative_config or {}), **chosen}
        config = create(self, target_model_config, target_parallel_config)
        if config is not None:
            _check_head(config)
        return config

    return checked


def _with_layers_of_head(override: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def with_layers_of_head(hf_config: Any) -> Any:
        """Counts the layers of a head where vLLM does not look, and says None of no layers.

        vLLM divides K by their number before anything can be said of it.
        """
        config = override(hf_config)
        if config.model_type == _HEAD_TYPE:
            config.update({"n_predict": num_head_layers(config) or None})
        return config

    return with_layers_of_head


def _honoured(create: Callable[..., Any]) -> Callable[..., Any]:
    def honoured(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        check_runner(config)
        return config

    return honoured


def _check_head(config: Any) -> None:
    """Refuses a K or a checkpoint that a head of Qwen4-Exp cannot draft with.

    Args:
        config: a SpeculativeConfig, which has found its method and its head.
    """
    draft = config.draft_model_config
    if config.method != "mtp" or draft.hf_config.model_type != _HEAD_TYPE:
        return
    name, k = "speculative_config.num_speculative_tokens", config.num_speculative_tokens
    check_int(name, k, 1, MAX_SPECULATIVE_TOKENS)
    if not draft.hf_config.n_predict:
        raise ConfigError(
            f'speculative_config.method "mtp": {draft.model} has no head to draft with, its '
            "mtp_num_hidden_layers is 0; leave speculative_config out"
        )


def _rule_options(options: dict[str, Any], additional: object) -> dict[str, Any]:
    """The rule that `enable_block_verify` asks for, and drafts that are worth it."""
    enabled = None if block_verification.obstacle() else _enable_block_verify(additional)
    given = options.get("rejection_sample_method")
    if enabled is not None:
        meant = "block" if enabled else "standard"
        if given not in (None, meant):
            raise ConfigError(
                f'speculative_config.rejection_sample_method is "{given}" but '
                f"{_BLOCK_VERIFY}.enable_block_verify {str(enabled).lower()} means "
                f'"{meant}": give one of the two'
            )
        given = meant
    chosen = _given(rejection_sample_method=given)
    # With drafts that are not drawn, which are vLLM's default, the rule is the standard one.
    if given == "block" and "draft_sample_method" not in options:
        chosen["draft_sample_method"] = "probabilistic"
    return chosen


def _check_without_drafts(additional: object) -> None:
    """Refuses a rule for drafts that there are not.

    Platforms that are plugins themselves read this part of `additional_config` on their own.
    """
    if block_verification.obstacle() is None and _enable_block_verify(additional):
        raise ConfigError(
            f"{_BLOCK_VERIFY}.enable_block_verify true has no effect without speculative_config"
        )


def _enable_block_verify(additional: object) -> bool | None:
    """What the user says of the rule in `additional_config`, None if nothing.

    The other keys of `additional_config` are for vLLM and for other plugins.
    """
    given = additional.get("rejection_sampler_config") if isinstance(additional, dict) else None
    values = read_object(_BLOCK_VERIFY, given)
    if values is None:
        return None
    take_known(f"{_BLOCK_VERIFY}.", values, RejectionSamplerConfig.__dataclass_fields__, {})
    return RejectionSamplerConfig(**values).enable_block_verify


def check_runner(config: Any) -> None:
    """Refuses a rule that the model runner of a vLLM configuration would leave aside.

    Args:
        config: a VllmConfig.
    """
    from vllm.platforms import current_platform

    speculative = config.speculative_config
    if speculative is None or config.use_v2_model_runner or current_platform.is_out_of_tree():
        return
    rule = speculative.rejection_sample_method
    where = f'speculative_config.rejection_sample_method "{rule}"'
    if rule == "block" and not is_active("block-verification"):
        raise ConfigError(
            f"{where} has no effect in vLLM's V1 model runner without outrider's hook "
            'block-verification, which is off; write "standard", and leave out '
            f"{_BLOCK_VERIFY}"
        )
    if rule == "synthetic" and current_platform.is_cpu():
        raise ConfigError(f'{where} is not known to vLLM\'s kernels for the CPU; write "standard"')


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
