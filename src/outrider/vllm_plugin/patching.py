"""Puts a function or a class of ours in the place of one of vLLM's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def own_part_of_platform(part: str) -> str | None:
    """Why a hook in one of vLLM's parts would do nothing on this platform; None where it does.

    Platforms that are plugins themselves, such as Ascend, bring their own.

    Args:
        part: what the hook is in, in words.
    """
    from vllm.platforms import current_platform

    if current_platform.is_out_of_tree():
        return f"{current_platform.device_name} brings its own {part}"
    return None


def replace(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces an attribute by what is made of it; what was there stays at hand.

    The replacement has the original as `__wrapped__`. Where `make` has had its turn already, also
    under another replacement, nothing happens.

    Args:
        owner: module or class.
        name: of the attribute, which must be there.
        make: from the original to the replacement; a named function.
    """
    original = getattr(owner, name)
    maker = f"{make.__module__}.{make.__qualname__}"
    link = original
    while link is not None:
        if getattr(link, "__outrider_maker__", None) == maker:
            return
        link = getattr(link, "__wrapped__", None)
    replacement = make(original)
    if isinstance(original, type):
        replacement.__wrapped__ = original
    else:
        functools.update_wrapper(replacement, original)
    replacement.__outrider_maker__ = maker
    setattr(owner, name, replacement)
