"""Flags made from the fields of the configuration classes, so that neither falls behind."""

from __future__ import annotations

import inspect
import re
import types
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from outrider.config import (
    MAX_SPECULATIVE_TOKENS,
    NESTED_OPTIONS,
    EngineConfig,
    HeadTuningConfig,
    ServerConfig,
    parse_json_object,
)
from outrider.errors import ConfigError, shown
from outrider.sampling_params import SamplingParams
from outrider.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Options = dict[str, Any]

DEFAULT_NUM_SPECULATIVE_TOKENS = 3
# More requests share a step than a server would let: nobody waits for a first token.
OFFLINE_MAX_NUM_SEQS = 32

DraftsPerStep = Annotated[
    int | None,
    typer.Option(
        "-k",
        metavar="K",
        help="Drafts per step at most, 0 to 8; 0 decodes plainly.",
        show_default=f"{DEFAULT_NUM_SPECULATIVE_TOKENS}, or 0 without an MTP head",
    ),
]
"""The flag -k of a command that decodes with one number of drafts."""

# Fields whose flag has other names than the field.
_FLAG_NAMES = {
    "bad_words": ("--bad-word",),
    "held_out_share": ("--held-out",),
    "n": ("-n", "--n"),
    "num_epochs": ("--epochs",),
    "num_samples": ("--samples",),
    "rejection_sample_method": ("--rule",),
    "stop_token_ids": ("--stop-token-id",),
}
# Given as text and parsed by the class, with what the help shows for the text.
_TEXT_FIELDS = {
    "kv_cache_memory": "SIZE",
    "prefix_cache_memory": "SIZE",
    "max_body_size": "SIZE",
    "logit_bias": "JSON",
    "default_chat_template_kwargs": "JSON",
    "structured_outputs": "JSON",
    "temperatures": "LIST",
    **dict.fromkeys(NESTED_OPTIONS, "JSON"),
}
# Given as text that nobody else parses.
_OBJECT_FIELDS = ("logit_bias", "default_chat_template_kwargs", "structured_outputs")
# Where a command fills in what a field leaves open.
_HELPS = {
    "seed": "Makes requests reproducible; without it, or at -1, they draw entropy.",
    "speculative_config": "How to draft, for what -k does not say.",
}
# The seed of a command is that of its requests, -k their number of drafts, and what it prints is
# text as it comes.
_FIELDS_ELSEWHERE = {
    EngineConfig: ("seed",),
    SamplingParams: ("num_speculative_tokens", "output_kind", "detokenize"),
}


def takes_engine_options(
    **defaults: object,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command a flag for each engine option; it gets those given as `engine_options`.

    Args:
        defaults: what the command uses where a flag is missing, shown in its help.
    """
    flags = _flags(EngineConfig, defaults, "Engine")
    return lambda command: _with_flags(command, "engine_options", flags)


def takes_server_options(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command a flag for each server option; it gets those given as `server_options`."""
    return _with_flags(command, "server_options", _flags(ServerConfig, {}, "Server"))


def takes_tuning_options(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command a flag for each tuning option; it gets those given as `tuning_options`."""
    return _with_flags(command, "tuning_options", _flags(HeadTuningConfig, {}, "Tuning"))


def takes_sampling_options(
    **defaults: object,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command a flag for each sampling parameter; it gets them as `sampling_options`.

    Args:
        defaults: what the command uses where a flag is missing, shown in its help.
    """
    flags = _flags(SamplingParams, defaults, "Sampling")
    return lambda command: _with_flags(command, "sampling_options", flags)


def parse_k_list(text: str) -> list[int]:
    """Numbers of drafts from a comma list with ranges: "1,3" or "1-8"."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})\s*(?:-\s*(\d{1,3})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"-k must be numbers from 1 to {MAX_SPECULATIVE_TOKENS} such as 3, 1,2,4 or 1-8, "
                f"got {shown(text)}"
            )
        numbers += range(first, last + 1)
    return sorted(set(numbers))


def speculative_options(k: int | None, text: str | None) -> Options | None:
    """What -k and --speculative-config ask for together; None is plain decoding.

    Args:
        k: drafts per step, None where -k is missing.
        text: the JSON given as --speculative-config, if any.
    """
    if k is not None and not 0 <= k <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(f"-k must be from 0 to {MAX_SPECULATIVE_TOKENS}, got {k}")
    if text is None:
        return {"method": "mtp", "num_speculative_tokens": k} if k else None
    config = parse_json_object("--speculative-config", text)
    if k is not None and config.setdefault("num_speculative_tokens", k) != k:
        raise ConfigError(
            f"-k asks for {k} drafts but --speculative-config for num_speculative_tokens "
            f"{shown(config['num_speculative_tokens'])}: give one of the two"
        )
    return config


def take_speculative_options(k: int | None, engine_options: Options) -> Options | None:
    """How a command drafts: as it was told, else with the head where the checkpoint has one.

    Args:
        k: drafts per step, None where -k is missing.
        engine_options: flags of the engine, out of which --speculative-config is taken.
    """
    given = speculative_options(k, engine_options.pop("speculative_config", None))
    if given is not None or k is not None:
        return given
    from outrider.bundled import BUNDLED_MODEL_DIR
    from outrider.models.qwen4_exp.weights import has_mtp

    if not has_mtp(Path(engine_options.get("model") or BUNDLED_MODEL_DIR)):
        return None
    return {"method": "mtp", "num_speculative_tokens": DEFAULT_NUM_SPECULATIVE_TOKENS}


def _with_flags(
    command: Callable[..., int], name: str, flags: list[inspect.Parameter]
) -> Callable[..., int]:
    """Replaces the argument `name` of a command by flags; those given arrive in it as a dict."""
    signature = inspect.signature(command, eval_str=True)
    assert name in signature.parameters, f"{command.__name__} takes no {name}"

    @wraps(command)
    def wrapper(**values: Any) -> int:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        values[name] = {
            key: _parse_object(key, value) if key in _OBJECT_FIELDS else value
            for key, value in given.items()
            if value not in (None, [])
        }
        return command(**values)

    kept = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    wrapper.__signature__ = signature.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
    # typer reads both.
    wrapper.__annotations__ = {p.name: p.annotation for p in (*kept, *flags)}
    return wrapper


def _parse_object(name: str, text: str) -> object:
    flag = _flag_names(name)[0]
    value = parse_json_object(flag, text)
    if name != "structured_outputs":
        return value
    known = [field.name for field in fields(StructuredOutputsParams)]
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise ConfigError(f"{flag}: unknown key {shown(unknown)}; there are {', '.join(known)}")
    return StructuredOutputsParams(**value)


def _flags(cls: type, defaults: Mapping[str, object], panel: str) -> list[inspect.Parameter]:
    """One keyword-only parameter, as typer reads it, for each field of a dataclass."""
    hints, helps = get_type_hints(cls), _field_helps(cls)
    flags = []
    for field in fields(cls):
        name = field.name
        if name in _FIELDS_ELSEWHERE.get(cls, ()):
            continue
        default = defaults.get(name, field.default)
        option_name = NESTED_OPTIONS.get(name, name)
        option = typer.Option(
            *_flag_names(option_name, is_switched_off=default is True),
            help=_help(_HELPS.get(option_name, helps[name]), name in defaults),
            show_default=str(default) if isinstance(default, int | float | str) else False,
            metavar=_TEXT_FIELDS.get(name, _metavar(hints[name])),
            rich_help_panel=panel,
        )
        kind = str if name in _TEXT_FIELDS else _flag_type(hints[name])
        # None says that the flag was not given, whatever its default is.
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        flags.append(
            inspect.Parameter(option_name, keyword_only, default=None, annotation=annotation)
        )
    return flags


def _flag_names(option_name: str, is_switched_off: bool = False) -> tuple[str, ...]:
    """What a field's flag is called; one that is on without its flag can be switched off."""
    flag = f"--{option_name.replace('_', '-')}"
    if is_switched_off:
        return (f"{flag}/--no-{flag.removeprefix('--')}",)
    return _FLAG_NAMES.get(option_name, (flag,))


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        # Where a list may be given by its only entry, the flag makes the list.
        hint = next(one for one in get_args(hint) if one is not type(None))
    return hint


def _flag_type(hint: Any) -> Any:
    hint = _without_none(hint)
    if get_origin(hint) is Literal:
        # The dataclass checks the choice and names those there are.
        return str
    return hint if get_origin(hint) is None else list[get_args(hint)[0]]  # type: ignore[misc]


def _metavar(hint: Any) -> str | None:
    hint = _without_none(hint)
    return "|".join(get_args(hint)) if get_origin(hint) is Literal else None


def _help(text: str, has_default: bool) -> str:
    """A field's description in the words of a command line, where None is a missing flag."""
    if has_default:
        text = re.sub(r"; None [^;]*$", ".", text)
    return text.replace("; None is ", "; without it, ")


def _field_helps(cls: type) -> dict[str, str]:
    """What the "Attributes" section of a docstring says about each field."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    helps = {}
    for entry in re.split(r"\n(?=    \w)", f"\n{section}"):
        name, _, text = entry.strip().partition(": ")
        sentence = " ".join(text.split())
        helps[name] = sentence[:1].upper() + sentence[1:]
    return helps
