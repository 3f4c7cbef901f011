"""Hooks without vLLM: what decides whether one is put in place, and what its module must have."""

import logging
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from outrider.config.vllm_hooks import hook_variable, is_hook_wanted
from outrider.errors import ConfigError
from outrider.vllm_plugin import hooks, register
from outrider.vllm_plugin.hooks import HOOKS, KNOWN_VERSIONS, Hook, PluginError, UpstreamVersions


class Gap:
    """A module of a hook that counts what is asked of it."""

    def __init__(self, obstacle: str | None = None, error: Exception | None = None) -> None:
        self.reason, self.error = obstacle, error
        self.num_installed = 0

    def obstacle(self) -> str | None:
        return self.reason

    def install(self) -> None:
        self.num_installed += 1
        if self.error is not None:
            raise self.error


class Upstream:
    """A vLLM that has a version and a log, and hooks of our choice for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.module = ModuleType("vllm")
        self.module.__spec__ = ModuleSpec("vllm", None, origin="vllm/__init__.py")
        logger = ModuleType("vllm.logger")
        logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", self.module)
        monkeypatch.setitem(sys.modules, "vllm.logger", logger)
        monkeypatch.setattr(hooks, "_states", {})
        self.set_version("0.32.0")

    def set_version(self, version: str) -> None:
        self.module.__version__ = version  # type: ignore[attr-defined]

    def set_hooks(self, *pairs: tuple[Hook, Gap]) -> None:
        self.monkeypatch.setattr(hooks, "HOOKS", tuple(hook for hook, _ in pairs))
        for hook, gap in pairs:
            module = f"outrider.vllm_plugin.{hook.module}"
            self.monkeypatch.setitem(sys.modules, module, gap)  # type: ignore[arg-type]


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Upstream:
    return Upstream(monkeypatch)


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("0.32.0", True),
        ("0.32.1.dev3+gabc", True),
        ("0.31.9", False),
        ("0.33.0rc1", False),
        ("1.32.0", False),
        ("dev", False),
        ("", False),
    ],
)
def test_a_range_of_versions(version: str, is_known: bool) -> None:
    assert (version in UpstreamVersions((0, 32), (0, 33))) is is_known


def test_the_variable_of_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hook_variable("block-verification") == "OUTRIDER_VLLM_BLOCK_VERIFICATION"
    variable = hook_variable("some-gap")
    assert is_hook_wanted("some-gap")
    for value, is_wanted in (("0", False), ("1", True)):
        monkeypatch.setenv(variable, value)
        assert is_hook_wanted("some-gap") is is_wanted
    monkeypatch.setenv(variable, "off")
    with pytest.raises(ConfigError, match=r"OUTRIDER_VLLM_SOME_GAP must be 0 \(off\) or 1 \(on\)"):
        is_hook_wanted("some-gap")


def test_register_installs_once_and_says_why(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gaps = [Gap(), Gap("this is no CPU"), Gap(), Gap()]
    later = UpstreamVersions((0, 33), (0, 34))
    upstream.set_hooks(
        (Hook("first", "counts right", "first"), gaps[0]),
        (Hook("second", "adds right", "second"), gaps[1]),
        (Hook("third", "divides right", "third"), gaps[2]),
        (Hook("fourth", "rounds right", "fourth", later), gaps[3]),
    )
    monkeypatch.setenv("OUTRIDER_VLLM_THIRD", "0")
    with caplog.at_level(logging.INFO):
        register()
        register()
    assert [gap.num_installed for gap in gaps] == [1, 0, 0, 0]
    assert caplog.messages == [
        "outrider: first on: counts right",
        "outrider: second off: this is no CPU",
        "outrider: third off: OUTRIDER_VLLM_THIRD=0",
        "outrider: fourth off: for vLLM >=0.33, <0.34",
    ]


def test_another_version_is_left_as_it_is(
    upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    gap = Gap()
    upstream.set_hooks((Hook("first", "counts right", "first"), gap))
    upstream.set_version("0.33.0")
    register()
    assert gap.num_installed == 0
    assert caplog.messages == [
        "outrider: vLLM 0.33.0 is installed: the plugin was written for vLLM >=0.32, <0.33; "
        "nothing is changed"
    ]


@pytest.mark.parametrize("error", [AttributeError("no f"), ImportError("no f"), TypeError("no f")])
def test_a_hook_that_does_not_fit_is_named(upstream: Upstream, error: Exception) -> None:
    upstream.set_hooks((Hook("first", "counts right", "first"), Gap(error=error)))
    with pytest.raises(PluginError) as caught:
        register()
    assert str(caught.value) == (
        "outrider's hook first does not fit vLLM 0.32.0 (no f); OUTRIDER_VLLM_FIRST=0 leaves it out"
    )


def test_the_table_of_hooks() -> None:
    names = [hook.name for hook in HOOKS]
    assert len(set(names)) == len(names)
    for hook in HOOKS:
        assert hook.name == hook.name.lower().replace("_", "-")
        assert hook.versions.first >= KNOWN_VERSIONS.first


def test_the_page_of_hooks_has_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm-hooks.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert rows == [hook.name for hook in HOOKS]


def test_replace_keeps_the_original_and_is_idempotent() -> None:
    from outrider.vllm_plugin.patching import replace

    def original() -> int:
        """One."""
        return 1

    def one_more(wrapped):  # type: ignore[no-untyped-def]
        return lambda: wrapped() + 1

    def doubled(wrapped):  # type: ignore[no-untyped-def]
        return lambda: wrapped() * 2

    owner = SimpleNamespace(f=original)
    replace(owner, "f", one_more)
    replace(owner, "f", one_more)
    assert (owner.f(), owner.f.__wrapped__, owner.f.__doc__) == (2, original, "One.")
    replace(owner, "f", doubled)
    replace(owner, "f", one_more)
    replace(owner, "f", doubled)
    assert owner.f() == 4
    with pytest.raises(AttributeError):
        replace(owner, "g", one_more)
