"""What `outrider vllm doctor` says: which hooks are in place on this installation, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from outrider.vllm_plugin.hooks import install_hooks, installed_version

if TYPE_CHECKING:
    from outrider.vllm_plugin.hooks import HookState

_GROUP = "vllm.general_plugins"
_ENTRY_POINT = "outrider"


@dataclass(frozen=True)
class Diagnosis:
    """The plugin on this installation.

    Attributes:
        version: of vLLM.
        platform: what vLLM runs on here: cpu, cuda, rocm.
        obstacle: why vLLM does not load the plugin by itself, None if it does.
        states: of every hook.
    """

    version: str
    platform: str
    obstacle: str | None
    states: list[HookState]


def diagnose() -> Diagnosis:
    """Installs the hooks as vLLM would, and says what came of it.

    Raises:
        PluginError: without vLLM, with another version of it, or where a hook does not fit it.
    """
    version = installed_version()
    from vllm.platforms import current_platform

    return Diagnosis(
        version=version,
        platform=str(current_platform.device_type),
        obstacle=_loading_obstacle(),
        states=install_hooks(),
    )


def _loading_obstacle() -> str | None:
    if not any(point.name == _ENTRY_POINT for point in entry_points(group=_GROUP)):
        return f"no installed package has the entry point {_ENTRY_POINT} of {_GROUP}"
    from vllm import envs

    if envs.VLLM_PLUGINS is not None and _ENTRY_POINT not in envs.VLLM_PLUGINS:
        return f"VLLM_PLUGINS does not name {_ENTRY_POINT}"
    return None
