"""Outrider as a plugin of vLLM: the entry point of the group `vllm.general_plugins`.

vLLM calls it in each of its processes, more than once in some.
"""

from __future__ import annotations


def register() -> None:
    """Puts the hooks in place that this installation of vLLM needs; again is nothing.

    A vLLM of another version than the hooks were written for is left as it is, with a line in the
    log that says so.
    """
    from outrider.vllm_plugin.hooks import install_hooks

    install_hooks()
