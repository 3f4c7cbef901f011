"""How drafts are made and judged, and how the step is compiled: the nested options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from outrider.config.checks import check_bool, check_choice, check_int
from outrider.errors import ConfigError, shown

RejectionSampleMethod = Literal["standard", "block", "coupled"]
DraftSampleMethod = Literal["probabilistic", "greedy"]
SpeculativeMethod = Literal["mtp", "ngram"]

REJECTION_SAMPLE_METHODS: tuple[str, ...] = get_args(RejectionSampleMethod)
SPECULATIVE_METHODS: tuple[str, ...] = get_args(SpeculativeMethod)
MAX_SPECULATIVE_TOKENS = 8
# Tokens of an output in which there is room for a draft: it has one before it and one after it.
LEAST_DRAFTED_TOKENS = 3
_DEFAULT_PROMPT_LOOKUP = 5
# The modes that vLLM knows; a step of this build runs eagerly.
_CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and judged: the object given as `speculative_config`.

    Attributes:
        method: "mtp", the checkpoint's own multi-token-prediction head, or "ngram", a look-up of
            the last tokens in what the request has already said and been asked.
        num_speculative_tokens: drafts asked for per step, 1 to 8.
        draft_sample_method: "probabilistic" samples drafts under the request's own parameters,
            "greedy" takes the likeliest token as a one-hot proposal. None is "probabilistic" for
            "mtp"; what "ngram" looks up is "greedy" and nothing else.
        rejection_sample_method: rule at temperature > 0; None leaves the choice to
            `EngineConfig.rejection_sample_method`.
        index_share_for_mtp_iteration: whether the draft steps of one iteration share one choice of
            key blocks; None leaves it to the checkpoint.
        prompt_lookup_max: longest run of tokens that "ngram" looks up; None is
            `prompt_lookup_min`, or 5 without that.
        prompt_lookup_min: shortest such run; None is `prompt_lookup_max`.
        max_model_len: nothing is drafted for positions from here on, where decoding goes on
            plainly; None, and what is more than the engine's, is the engine's.
    """

    method: SpeculativeMethod = "mtp"
    num_speculative_tokens: int = 3
    draft_sample_method: DraftSampleMethod | None = None
    rejection_sample_method: RejectionSampleMethod | None = None
    index_share_for_mtp_iteration: bool | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Check each field, and fill in what the method leaves open."""
        where = "speculative_config."
        _check_method(self.method)
        check_int(
            f"{where}num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_SPECULATIVE_TOKENS,
            "leave speculative_config out for plain decoding",
        )
        if self.draft_sample_method is not None:
            check_choice(
                f"{where}draft_sample_method", self.draft_sample_method, get_args(DraftSampleMethod)
            )
        if self.rejection_sample_method is not None:
            check_choice(
                f"{where}rejection_sample_method",
                self.rejection_sample_method,
                REJECTION_SAMPLE_METHODS,
            )
        if self.max_model_len is not None:
            check_int(f"{where}max_model_len", self.max_model_len, 1)
        if self.index_share_for_mtp_iteration is not None:
            check_bool(f"{where}index_share_for_mtp_iteration", self.index_share_for_mtp_iteration)
        self._check_fields_of_method(where)

    def _check_fields_of_method(self, where: str) -> None:
        lookup = {
            name: getattr(self, name)
            for name in ("prompt_lookup_max", "prompt_lookup_min")
            if getattr(self, name) is not None
        }
        if self.method != "ngram":
            for name in lookup:
                raise ConfigError(f'{where}{name} belongs to the method "ngram"')
            if self.draft_sample_method is None:
                object.__setattr__(self, "draft_sample_method", "probabilistic")
            return
        if self.index_share_for_mtp_iteration is not None:
            raise ConfigError(f'{where}index_share_for_mtp_iteration belongs to the method "mtp"')
        if self.draft_sample_method == "probabilistic":
            raise ConfigError(
                f'{where}draft_sample_method "probabilistic" belongs to the method "mtp": '
                "a look-up samples nothing"
            )
        object.__setattr__(self, "draft_sample_method", "greedy")
        for name, value in lookup.items():
            check_int(f"{where}{name}", value, 1)
        longest = lookup.get("prompt_lookup_max", lookup.get("prompt_lookup_min"))
        longest = _DEFAULT_PROMPT_LOOKUP if longest is None else longest
        shortest = lookup.get("prompt_lookup_min", longest)
        if shortest > longest:
            raise ConfigError(
                f"{where}prompt_lookup_min must not be more than prompt_lookup_max ({longest}), "
                f"got {shortest}"
            )
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)


@dataclass(frozen=True)
class RejectionSamplerConfig:
    """The object given as `additional_config.rejection_sampler_config`.

    Attributes:
        enable_block_verify: True asks for the rule "block", False for "standard".
    """

    enable_block_verify: bool | None = None

    def __post_init__(self) -> None:
        """Check each field."""
        if self.enable_block_verify is not None:
            check_bool("rejection_sampler_config.enable_block_verify", self.enable_block_verify)


@dataclass(frozen=True)
class CompilationConfig:
    """The object given as `compilation_config`.

    Attributes:
        cudagraph_mode: "NONE"; the other modes of vLLM are refused, for every step runs eagerly.
        cudagraph_capture_sizes: rows of a step that would be captured; None or an empty list, since
            nothing is.
    """

    cudagraph_mode: str | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check each field, and refuse what would have no effect."""
        where = "compilation_config."
        if self.cudagraph_mode is not None:
            check_choice(f"{where}cudagraph_mode", self.cudagraph_mode, _CUDAGRAPH_MODES)
        sizes = self.cudagraph_capture_sizes
        if not isinstance(sizes, list | tuple):
            raise ConfigError(
                f"{where}cudagraph_capture_sizes must be a list of integers, got {shown(sizes)}"
            )
        for index, size in enumerate(sizes):
            check_int(f"{where}cudagraph_capture_sizes[{index}]", size, 1)
        object.__setattr__(self, "cudagraph_capture_sizes", tuple(sizes))
        if self.cudagraph_mode not in (None, "NONE"):
            raise ConfigError(
                f"{where}cudagraph_mode {self.cudagraph_mode} cannot be honoured: this build runs "
                'every step eagerly; write "NONE" or leave compilation_config out'
            )
        if sizes:
            raise ConfigError(
                f"{where}cudagraph_capture_sizes cannot be honoured: this build captures no graph"
            )


def _check_method(method: object) -> None:
    if method in SPECULATIVE_METHODS:
        return
    if isinstance(method, str) and method.endswith("_mtp"):
        raise ConfigError(f'speculative_config.method: write "mtp", not "{method}"')
    raise ConfigError(f'speculative_config.method must be "mtp" or "ngram", got {shown(method)}')
