"""What an endpoint is: one that generates is a parser and a formatter, the rest is common to all."""

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
    """What an interface calls fields that the pipeline of chats has under other names.

    Attributes:
        patterns: Of the beginnings of those names, and what stands for them; the first one that matches counts.
    """

    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def make(cls, *pairs: tuple[str, str]) -> FieldNames:
        """Return names by regular expressions and what stands for them."""
        return cls(tuple((re.compile(pattern), name) for pattern, name in pairs))

    def of(self, error: E) -> E:
        """Return an error with the names that its field has here, in its message, too."""
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
        parse: Makes a request of a decoded body and who sent it; raises ``InvalidRequestError``.
        id_prefix: What answers' ids begin with.
        formatter: Chooses what writes the answer to a request.
        names: What it calls fields.
        refusal: Makes the answer that is an error.
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
        schema: The body's.
        answer: What answers it and its API key's holder.
        names: What it calls fields.
        refusal: Makes the answer that is an error.
    """

    schema: type[Body]
    answer: Callable[[Any, Account | None], Awaitable[Any]]
    names: FieldNames = field(default_factory=FieldNames)
    refusal: Refusal = answer_to
