"""What the plugin changes in vLLM: one hook for each gap, each with its reason to be on or off.

A hook is a module of this package with two functions: `obstacle()` says in a few words why the
hook is of no use on this installation, None if it is; `install()` puts it in place. Both are
called once in a process. They may import vLLM, this module does so when it is asked to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from outrider.config.vllm_hooks import hook_variable, is_hook_wanted
from outrider.errors import OutriderError


class PluginError(OutriderError):
    """A vLLM that is missing, of another version, or not as a hook expects it."""


@dataclass(frozen=True)
class UpstreamVersions:
    """A range of vLLM's versions, by major and minor number.

    Attributes:
        first: the first version in the range.
        before: the first version past it.
    """

    first: tuple[int, int]
    before: tuple[int, int]

    def __contains__(self, version: object) -> bool:
        match = re.match(r"(\d+)\.(\d+)", str(version))
        return match is not None and self.first <= (int(match[1]), int(match[2])) < self.before

    def __str__(self) -> str:
        return f">={self.first[0]}.{self.first[1]}, <{self.before[0]}.{self.before[1]}"


KNOWN_VERSIONS: Final = UpstreamVersions((0, 32), (0, 33))
"""The versions that hooks were written for and tested with."""


@dataclass(frozen=True)
class Hook:
    """One change to vLLM.

    Attributes:
        name: in lower case, words joined by "-".
        purpose: what holds where it is on, as one clause.
        module: below this package, with `obstacle` and `install`.
        versions: of vLLM that have the gap.
    """

    name: str
    purpose: str
    module: str
    versions: UpstreamVersions = KNOWN_VERSIONS

    @property
    def variable(self) -> str:
        """The environment variable that switches it off with the value 0."""
        return hook_variable(self.name)

    def obstacle(self, version: str) -> str | None:
        """Why it stays off on this installation, in a few words; None if nothing is in its way."""
        if not is_hook_wanted(self.name):
            return f"{self.variable}=0"
        if version not in self.versions:
            return f"for vLLM {self.versions}"
        reason: str | None = import_module(f"{__package__}.{self.module}").obstacle()
        return reason

    def install(self, version: str) -> None:
        """Puts it in place; a vLLM that is not as expected is an error that names the hook."""
        try:
            import_module(f"{__package__}.{self.module}").install()
        except (AttributeError, ImportError, TypeError) as error:
            raise PluginError(
                f"outrider's hook {self.name} does not fit vLLM {version} ({error}); "
                f"{self.variable}=0 leaves it out"
            ) from error


@dataclass(frozen=True)
class HookState:
    """A hook in this process.

    Attributes:
        hook: the hook.
        obstacle: why it is off, None if it is on.
    """

    hook: Hook
    obstacle: str | None

    @property
    def is_active(self) -> bool:
        """Whether it is in place."""
        return self.obstacle is None

    def __str__(self) -> str:
        if self.obstacle is None:
            return f"{self.hook.name} on: {self.hook.purpose}"
        return f"{self.hook.name} off: {self.obstacle}"


HOOKS: Final[tuple[Hook, ...]] = (
    Hook(
        "qwen4-exp-model",
        "runs Qwen4-Exp and drafts with its head on the CPU",
        "model_registration",
    ),
    Hook(
        "speculative-config",
        "options of drafting that would have no effect are errors at start",
        "speculative_config",
    ),
    Hook(
        "block-verification",
        "the V1 runner judges drafts by block where rejection_sample_method says so",
        "block_verification",
    ),
    Hook(
        "metrics",
        "drafts without a valid token and tokens past an end-of-text id or a limit are not counted",
        "metrics",
    ),
    Hook(
        "withdrawn-drafts",
        "a sampled draft that a grammar forbids is a rejection, so that the text keeps its law",
        "fixes.withdrawn_drafts",
    ),
    Hook(
        "seeded-pieces",
        "a seed is not used up by the pieces that a prompt is read in",
        "fixes.seeded_pieces",
    ),
    Hook(
        "tokens-after-pieces",
        "the head reads the right token at the end of each piece of a prompt",
        "fixes.tokens_after_pieces",
    ),
    Hook(
        "steps-without-drafts",
        "a request with top_k runs beside drafts on the V1 runner",
        "fixes.steps_without_drafts",
    ),
    Hook(
        "expanded-parameters",
        "on the CPU each draft is judged at its request's temperature, top_k and top_p",
        "fixes.expanded_parameters",
    ),
    Hook(
        "short-windows",
        "on the CPU vLLM's delta nets keep their convolution's columns where drafts are few",
        "fixes.short_windows",
    ),
    Hook(
        "aligned-states",
        "on the CPU recurrent states are shared at block boundaries beside drafts",
        "fixes.aligned_states",
    ),
    Hook(
        "expert-maps",
        "on the CPU experts are divided among ranks",
        "fixes.expert_maps",
    ),
    Hook(
        "uneven-exchanges",
        "on the CPU ranks of data parallelism exchange the tokens of experts",
        "fixes.uneven_exchanges",
    ),
)

_states: dict[str, HookState] = {}
"""The hooks that this process has decided on, by name: vLLM loads its plugins more than once."""


def installed_version() -> str:
    """The version of vLLM here; an error if it is missing or not known."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PluginError(f"vLLM is not installed here; the plugin is for vLLM {KNOWN_VERSIONS}")
    import vllm

    version = str(vllm.__version__)
    if version not in KNOWN_VERSIONS:
        raise PluginError(
            f"vLLM {version} is installed: the plugin was written for vLLM {KNOWN_VERSIONS}"
        )
    return version


def is_active(name: str) -> bool:
    """Whether a hook is in place in this process."""
    return name in _states and _states[name].is_active


def install_hooks() -> list[HookState]:
    """Puts the hooks in place that are of use, once, with a line of the log for each.

    Returns:
        The state of every hook; none where the version of vLLM is not known.
    """
    from vllm.logger import init_logger

    logger = init_logger("vllm.outrider")
    try:
        version = installed_version()
    except PluginError as error:
        logger.error("outrider: %s; nothing is changed", error)
        return []
    for hook in HOOKS:
        if hook.name in _states:
            continue
        obstacle = hook.obstacle(version)
        if obstacle is None:
            hook.install(version)
        _states[hook.name] = HookState(hook, obstacle)
        logger.info("outrider: %s", _states[hook.name])
    return list(_states.values())
