"""Descriptions of endpoints. One that generates is a parser and a formatter; the rest is shared."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.errors import BatonError
from baton_router.frontend.http.errors import answer_to
from baton_router.frontend.openai.answer import Formatter
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.frontend.openai.schemas import Body
from baton_router.processor.text_request import PreparedRequest
from baton_router.types import Account

E = TypeVar("E", bound=BatonError)
Refusal: TypeAlias = Callable[[BatonError | HTTPException], Response]


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Maps field names of chat requests to those of another interface, for errors.

    Attributes:
        patterns: Regular expressions for the beginnings of names, and their replacements; the first match counts.
    """

    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def make(cls, *pairs: tuple[str, str]) -> FieldNames:
        """Return the mapping of pairs of a regular expression and its replacement."""
        return cls(tuple((re.compile(pattern), name) for pattern, name in pairs))

    def rename(self, error: E) -> E:
        """Return an error with this interface's field names, in its message, too."""
        old = error.field or ""
        for pattern, name in self.patterns:
            if match := pattern.match(old):
                new = match.expand(name) + old[match.end() :]
                made = type(error)(error.message.replace(old, new), field=new, retry_after_s=error.retry_after_s)
                return made.with_traceback(error.__traceback__)
        return error


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """An endpoint that generates.

    Attributes:
        parse: Parses a decoded JSON body for an account; raises ``InvalidRequestError``.
        id_prefix: Prefix of answers' identifiers.
        formatter: Chooses the formatter of a request.
        names: Field names of the interface.
        refusal: Makes the response for an error.
    """

    parse: Callable[[Any, Account | None], OpenAIRequest]
    id_prefix: str
    formatter: Callable[[OpenAIRequest, Sequence[PreparedRequest]], Formatter]
    names: FieldNames = field(default_factory=FieldNames)
    refusal: Refusal = answer_to


@dataclass(frozen=True, slots=True)
class PlainEndpoint:
    """An endpoint that takes a body and generates nothing.

    Attributes:
        schema: Schema of the body.
        answer: Answers a body for an account.
        names: Field names of the interface.
        refusal: Makes the response for an error.
    """

    schema: type[Body]
    answer: Callable[[Any, Account | None], Awaitable[Any]]
    names: FieldNames = field(default_factory=FieldNames)
    refusal: Refusal = answer_to
