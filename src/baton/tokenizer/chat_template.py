"""A model's chat template: messages to prompt text.

Templates come with models and are foreign code, so they run in jinja's immutable sandbox, with bounded work and memory
(``template_limits.py``), and see plain JSON data alone. The environment is the one that templates are written for:
block trimming, loop controls, ``raise_exception``, ``tojson`` without HTML escapes, ``strftime_now`` and the
``generation`` tag.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from baton.errors import ConfigError, InvalidRequestError
from baton.tokenizer.model_files import read_file, read_json
from baton.tokenizer.template_limits import BoundedEnvironment, TemplateWorkError, bounded_work

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)
"""How a template fails that meets data it was not written for: as Python does."""


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: The template.
        variables: Names that the template reads from outside; others passed to it have no effect.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile.

        Args:
            source: The template.
            special_tokens: Variables such as ``bos_token`` that every rendering sees.

        Raises:
            ConfigError: The template is not valid.
        """
        self.source = source
        environment = _environment(lambda: datetime.now().astimezone())
        try:
            self._template = environment.bounded(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:  # Python's compiler has limits
            raise ConfigError(f"the model's chat template is not valid: {error}", field="chat_template") from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, directory: Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """Load from a model's directory; ``None`` if the model has no chat template.

        ``chat_template.jinja`` comes first, then ``tokenizer_config.json`` (a string, or a list of named ones of
        which ``default`` is used), then ``chat_template.json``.

        Raises:
            ConfigError: The template cannot be read or is not valid.
        """
        source = _source(directory)
        return None if source is None else cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt of a conversation. Special tokens are part of it: tokenize it without adding them.

        Args:
            messages: Plain JSON objects with ``role`` and ``content``.
            add_generation_prompt: End with what begins the assistant's answer.
            continue_final_message: Leave the last message open, so that the model goes on with it.
            variables: More names for the template.
            tools: What the model may call, as OpenAI's interface describes it.

        Raises:
            InvalidRequestError: The template refuses the messages (``messages``), or a variable has a name that
                the template needs for itself (``chat_template_kwargs``).
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", field="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
            )
        extra = dict(variables or {})
        reserved = RESERVED_VARIABLES.intersection(extra)
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {min(reserved)}", field=f"chat_template_kwargs.{min(reserved)}"
            )
        shown = [flatten_content(message, at) for at, message in enumerate(messages)]
        mark = secrets.token_hex(16) if continue_final_message else ""
        if mark:
            shown[-1]["content"] = f"{shown[-1]['content']}{mark}"
        text = self._render(shown, add_generation_prompt, extra, tools)
        if not mark:
            return text
        if mark not in text:
            raise InvalidRequestError(
                "the chat template does not show the last message, which can't be continued then",
                field="continue_final_message",
            )
        return text[: text.rindex(mark)]

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        extra: dict[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        values = {
            **self._special_tokens,
            **extra,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            pieces: list[str] = []
            with bounded_work(sum(len(x["content"]) for x in messages if isinstance(x.get("content"), str))) as charge:
                for piece in self._template.generate(values):
                    charge(1 + len(piece))
                    pieces.append(piece)
            return "".join(pieces)
        except TemplateWorkError as error:
            raise InvalidRequestError(f"the model's chat template is not usable: {error}", field="messages") from error
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refused the messages: {error}", field="messages"
            ) from error
        except _FAILURES as error:
            raise InvalidRequestError(
                f"the model's chat template cannot render the messages: {type(error).__name__}: {error}",
                field="messages",
            ) from error


def flatten_content(message: Mapping[str, Any], at: int = 0) -> dict[str, Any]:
    """Return a copy of a message whose list of text parts has become one string, a part a line.

    Args:
        message: The message.
        at: Place in the request, for errors.

    Raises:
        InvalidRequestError: A part that is not text.
    """
    flat = dict(message)
    content = flat.get("content")
    if isinstance(content, list):
        texts = []
        for index, part in enumerate(content):
            text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            if not isinstance(text, str):
                raise InvalidRequestError(
                    "only text parts are supported: {'type': 'text', 'text': '...'}",
                    field=f"messages[{at}].content[{index}]",
                )
            texts.append(text)
        flat["content"] = "\n".join(texts)
    return flat


def _source(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    content = read_file(file)
    if content is not None:
        try:
            return content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} cannot be read: {error}", field="chat_template") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(directory / name).get("chat_template")
        if isinstance(value, list):
            named = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
            value = named[-1].get("template") if named else None
        if isinstance(value, str):
            return value
    return None


def _environment(now: Callable[[], datetime]) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
