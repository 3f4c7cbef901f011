"""A checkpoint's chat template: from messages to the text of a prompt, as transformers does it.

A template is a program that comes with a checkpoint. It runs in jinja2's sandbox, over nothing but
plain data, and its output is bounded. Time is not: loops within loops may still run for long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import CheckpointError, OutriderError, RequestError, shown
from outrider.json_file import read_json_object
from outrider.tokenizer import NAMED_TOKENS, TOKENIZER_CONFIG_NAME

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser

CHAT_TEMPLATE_NAME = "chat_template.jinja"
CHAT_TEMPLATES_FOLDER = "additional_chat_templates"
# Over ten times the longest prompt of any model that runs here.
MAX_RENDERED_CHARACTERS = 1 << 24

_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
# Put behind the message that is to be continued, to find where it ends. A template that trims the
# message takes the space away, and so shows that it does.
_MARK = "<<the message ends here>> "


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is told.

    Attributes:
        tools: JSON schemas of functions that may be called.
        chat_template: a template, or the name of one of the checkpoint's; None is the checkpoint's,
            of several "tool_use" where there are tools and "default" else.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: end within the last message, for the model to go on with it.
        template_kwargs: further variables of the template.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """The templates of a checkpoint, most often one.

    Args:
        templates: by name; one that stands alone is "default". None at all is no error as long
            as every call brings its own.
        special_tokens: variables of every template, such as `eos_token`.
        origin: where they come from, for errors.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], origin: str
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._origin = origin

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> ChatTemplate:
        """Read the templates of a checkpoint directory.

        They lie in chat_template.jinja and additional_chat_templates/NAME.jinja, or else in
        tokenizer_config.json as `chat_template`: a text, or a list of objects with name and
        template.
        """
        folder = Path(model_dir)
        path = folder / TOKENIZER_CONFIG_NAME
        config = read_json_object(path) if path.exists() else {}
        special_tokens = {name: _content(config.get(name)) for name in NAMED_TOKENS}
        templates = _templates_of_files(folder)
        if not templates:
            templates = _templates_of_config(path, config.get("chat_template"))
        return cls(
            templates,
            {name: token for name, token in special_tokens.items() if token is not None},
            str(folder),
        )

    def variables(self, options: ChatOptions) -> frozenset[str]:
        """Names that `template_kwargs` may set: all that the template reads and is not told.

        Raises:
            RequestError: no template fits.
            CheckpointError: the checkpoint's template is no valid one.
        """
        source, where, is_own = self._choose(options)
        try:
            return _variables(source) - {*_ARGUMENTS, *self._special_tokens}
        except TemplateSyntaxError as error:
            raise _syntax_error(where, is_own, error) from None

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The text of one conversation.

        Args:
            messages: objects with a role, at least one; what else they hold is the template's.
            options: how it is told.

        Raises:
            RequestError: the template cannot be used with this, or refuses it.
            CheckpointError: the checkpoint's template is no valid one.
        """
        if options.continue_final_message and options.add_generation_prompt:
            raise RequestError(
                "continue_final_message excludes add_generation_prompt: set that to False"
            )
        template_kwargs = _plain("chat_template_kwargs", options.template_kwargs)
        if not isinstance(template_kwargs, dict):
            raise RequestError(
                f"chat_template_kwargs must be an object, got {shown(options.template_kwargs)}"
            )
        for name in _ARGUMENTS:
            if name in template_kwargs:
                raise RequestError(f"chat_template_kwargs must not hold {name}: give it as such")
        source, where, is_own = self._choose(options)
        conversation, final = _plain("messages", messages), None
        if options.continue_final_message:
            final = _mark_end(conversation, source)
        variables = {
            "documents": None,
            **self._special_tokens,
            **template_kwargs,
            "messages": conversation,
            "tools": None if options.tools is None else _plain("tools", options.tools),
            "add_generation_prompt": options.add_generation_prompt,
        }
        text = self._run(source, where, variables, is_own)
        return text if final is None else _cut_at_mark(text, final)

    def _choose(self, options: ChatOptions) -> tuple[str, str, bool]:
        """A template, how errors name it, and whether it is the checkpoint's own."""
        name = options.chat_template
        if name is not None:
            if not isinstance(name, str):
                raise RequestError(f"chat_template must be a text, got {shown(name)}")
            if name not in self._templates:
                return name, "chat_template", False
            return self._templates[name], f"the chat template {name} of {self._origin}", True
        for name in ("tool_use", "default") if options.tools is not None else ("default",):
            if name in self._templates:
                return self._templates[name], f"the chat template of {self._origin}", True
        if not self._templates:
            raise RequestError(f"{self._origin} has no chat template: give one as chat_template")
        raise RequestError(
            f"{self._origin} has several chat templates and none is the default: name one as "
            f"chat_template, of {', '.join(sorted(self._templates))}"
        )

    def _run(self, source: str, where: str, variables: dict[str, Any], is_own: bool) -> str:
        try:
            return _rendered(_compiled(source), variables)
        except TemplateSyntaxError as error:
            raise _syntax_error(where, is_own, error) from None
        except SecurityError as error:
            kind, message = RequestError, f"{where} does what its sandbox forbids: {_line(error)}"
        except _RefusalError as error:
            kind, message = RequestError, f"{where} refuses this: {_line(error)}"
        except _TooLongError as error:
            kind, message = RequestError, f"{where} {error}"
        except Exception as error:
            # A template may fail as any program does.
            kind, message = RequestError, f"{where} fails: {type(error).__name__}: {_line(error)}"
        raise kind(message) from None


def _syntax_error(where: str, is_own: bool, error: TemplateSyntaxError) -> OutriderError:
    kind = CheckpointError if is_own else RequestError
    return kind(f"{where}, line {error.lineno}: {_line(error)}")


class _RefusalError(TemplateError):
    """A template called `raise_exception`."""


class _TooLongError(Exception):
    """A template wrote more than any prompt may hold."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model has said; it shows in nothing that is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """What stands between the tags, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=32)
def _variables(source: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def _rendered(template: Template, variables: dict[str, Any]) -> str:
    pieces, room = [], MAX_RENDERED_CHARACTERS
    for piece in template.generate(variables):
        room -= len(piece)
        if room < 0:
            raise _TooLongError(f"writes more than {MAX_RENDERED_CHARACTERS:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model reads it: not escaped for HTML, as jinja2's own filter would."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _RefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _templates_of_files(folder: Path) -> dict[str, str]:
    paths = {"default": folder / CHAT_TEMPLATE_NAME}
    paths |= {path.stem: path for path in sorted((folder / CHAT_TEMPLATES_FOLDER).glob("*.jinja"))}
    templates = {}
    for name, path in paths.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = "not UTF-8 text" if isinstance(error, UnicodeError) else error.strerror
                raise CheckpointError(f"{path}: cannot be read: {reason}") from None
    return templates


def _templates_of_config(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    templates = {}
    for entry in entries:
        name, template = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(
                f"{path}: chat_template must be a text or a list of objects with name and "
                f"template, got {shown(entry)}"
            )
        templates[name] = template
    return templates


def _content(token: object) -> str | None:
    """Text of a special token, given as such or as an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _plain(name: str, value: object) -> Any:
    """A copy that is JSON: a template calls methods of what it is given, and these have none."""
    try:
        return _as_json(name, value)
    except RecursionError:
        raise RequestError(f"{name} is nested too deep") from None


def _as_json(name: str, value: object) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"a key in {name} must be a text, got {shown(key)}")
        return {str(key): _as_json(f"{name}.{key}", one) for key, one in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_as_json(f"{name}[{index}]", one) for index, one in enumerate(value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise RequestError(f"{name} must be what JSON holds, got {shown(value)}")


def _mark_end(messages: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the last message, and returns what it says."""
    final = messages[-1].get("content")
    if not isinstance(final, str):
        raise RequestError("continue_final_message: the last message has no content to continue")
    if "content" not in source:
        raise RequestError("continue_final_message: the chat template knows no content")
    messages[-1]["content"] = final + _MARK
    return final


def _cut_at_mark(text: str, final: str) -> str:
    place = text.rfind(_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message: the last message does not stand in what the chat template "
            "makes of it"
        )
    is_trimmed = not text.startswith(_MARK, place)
    return text[:place].rstrip() if is_trimmed else text[:place]


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else f"{line[:197]}..."
