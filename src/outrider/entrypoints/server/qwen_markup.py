"""How Qwen's models write thoughts and calls of functions, as their chat templates teach it.

<think>
a thought
</think>

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from outrider.entrypoints.server.growing_text import GrowingText

THINK_START = "<think>"
THINK_END = "</think>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
FUNCTION_START = "<function="
FUNCTION_END = "</function>"
PARAMETER_START = "<parameter="
PARAMETER_END = "</parameter>"


def thoughts_after(prompt: str) -> Literal["open", "optional"] | None:
    """Whether a prompt has begun thoughts, or the model may, or they are closed (None)."""
    tail = prompt.rstrip()
    if tail.endswith(THINK_START):
        return "open"
    return None if tail.endswith(THINK_END) else "optional"


def called_function(text: GrowingText) -> tuple[str, int] | None:
    """The function that is called at the front of a text, if any.

    A `<tool_call>` that no function follows is what a text says about calls, and no call.

    Returns:
        Its name, and the length of all that names it.
    """
    if not text.starts_with(CALL_START):
        return None
    return function_at(text, text.after_space(len(CALL_START)))


def function_at(text: GrowingText, at: int) -> tuple[str, int] | None:
    """The function that a `<function=name>` names, if one stands there.

    Args:
        text: what a model writes.
        at: characters from the front.

    Returns:
        Its name, and the length of all up to the end of that tag.
    """
    if not text.starts_with(FUNCTION_START, at):
        return None
    at += len(FUNCTION_START)
    name = text.name(at)
    return None if name is None else (name, at + len(name) + 1)
