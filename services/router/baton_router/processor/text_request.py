"""Requests and answers above the router's seam: with text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from baton.api.v1 import common_pb2
from baton.dialects import DialectParser
from baton.dialects.builtin import Dialects
from baton.dialects.tool_use import ToolUse
from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton.token_ids import TokenIds
from baton.tokenizer import SequenceText, StopStrings, TextDelta, TextModel
from baton.types import Grammar, Order, SamplingParams, TokenLogprob
from baton_router.scheduler.decision import Decision
from baton_router.types import MAX_SALT_CHARS, Account, ModelInfo, RoutedRequest

__all__ = ["ROLES", "ChatPrompt", "PreparedRequest", "Prompt", "TextChunk", "TextDelta", "TextRequest", "check_role"]

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096
MAX_REQUEST_ID_CHARS = 256
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Whose a message may be, as in OpenAI's interface: templates leave others' out in silence, or take them for users'."""


def check_role(role: Any, field: str) -> None:
    """Check whose a message is.

    Raises:
        InvalidRequestError: There is no such role.
    """
    if role not in ROLES:
        raise InvalidRequestError(f"{field} must be one of {', '.join(ROLES)}, got {shown(role)}", field=field)


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation, to be rendered by the model's chat template.

    Attributes:
        messages: Plain JSON objects with ``role`` and ``content``.
        add_generation_prompt: End with what begins the assistant's answer.
        continue_final_message: Leave the last message open instead.
        variables: More names for the template.
        tools: What the model may call.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


Prompt: TypeAlias = str | list[int] | TokenIds | ChatPrompt


class TextRequest(msgspec.Struct):
    """A request as an interface of the router takes it; nothing in it is checked yet.

    Attributes:
        prompt: Text, token ids or a conversation.
        sampling: ``max_tokens`` and ``seed`` may be missing.
        request_id: What the caller calls it; the id that instances see begins with it and is unique.
        model: Empty: the one that is served.
        default_max_tokens: Where ``sampling`` has none; ``None``: what is left of the context.
        add_special_tokens: Let the tokenizer add what it adds to a text (the begin token); a rendered conversation
            has its special tokens already.
        allow_special_tokens: Names of special tokens in the prompt are such tokens; ``None``: as the router does it,
            by default in a text and not in messages.
        include_stop: Whether the stop string or token that ended a sequence belongs to its text.
        cache_salt: Separates the prefix caches of tenants.
        session: Whose conversation it belongs to; empty: it has none.
        priority: Lower runs first.
        ttft_ms: The first token is wanted within so many milliseconds; ``None``: whenever.
        itl_ms: Most milliseconds wanted between two tokens; ``None``: any.
        user: Whose request it is, as the caller says.
        account: Whose API key it showed; ``None``: there are no keys, or it came from a service. ``cache_salt`` is then
            the one that the account gave it.
        order: In which it is to be served; ``None``: in the router's own.
        traceparent: W3C trace context of the caller; empty: none.
        output_token_ids: Generated so far, elsewhere; the answer's text is that of what follows.
        output_chars: Characters of the answer that the caller has: its text goes on behind them; ``None``: it is that
            of the tokens that follow.
        per_token: Whether the text of each token is wanted by itself, also of tokens that come together; as long as the
            client keeps up.
        structured: What the answer must be; ``None``: what the grammar of ``sampling`` says, if it has one.
        grammar_checked: The grammar of ``sampling`` is what ``structured`` says, or was checked.
        tool_use: The tools that are offered, and what may be done with them.
        thinking_budget: Most tokens of reasoning; ``None``: any number.
        parsed: Whether calls and reasoning are to be found in the text, if the model's dialects are known.
        prompt_end: The end of the prompt's text; set when it is tokenized.
        answer_grammar: What the whole answer must be, with reasoning and calls; set when it is known.
        prompt_index: Which of its HTTP request's prompts it is.
        prompt_field: What errors call the prompt.
        max_tokens_field: What errors call ``max_tokens``.
        field_prefix: Put before the names of sampling fields in errors, e.g. ``"sampling."``.
    """

    prompt: Prompt
    sampling: SamplingParams
    request_id: str = ""
    model: str = ""
    default_max_tokens: int | None = None
    add_special_tokens: bool = True
    allow_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    include_stop: bool = False
    cache_salt: str = ""
    priority: int = 0
    session: str = ""
    ttft_ms: float | None = None
    itl_ms: float | None = None
    user: str = ""
    account: Account | None = None
    order: Order | None = None
    traceparent: str = ""
    output_token_ids: Sequence[int] = ()
    output_chars: int | None = None
    per_token: bool = False
    structured: StructuredOutputs | None = None
    grammar_checked: bool = False
    tool_use: ToolUse = msgspec.field(default_factory=ToolUse)
    thinking_budget: int | None = None
    parsed: bool = False
    prompt_end: str = ""
    answer_grammar: Grammar | None = None
    prompt_index: int = 0
    prompt_field: str = "prompt"
    max_tokens_field: str = "max_tokens"
    field_prefix: str = ""


def check_bounds(request: TextRequest) -> None:
    """Check the sizes of a request's fields that do not depend on the model.

    Raises:
        InvalidRequestError: One is out of its bounds; names it.
    """
    if request.sampling.stop:
        _check_stops(request.sampling.stop)
    if not -(2**31) <= request.priority < 2**31:
        raise InvalidRequestError(f"priority must fit into 32 bits, got {request.priority}", field="priority")
    if len(request.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(f"cache_salt must have at most {MAX_SALT_CHARS} characters", field="cache_salt")
    if len(request.session) > MAX_SALT_CHARS:
        raise InvalidRequestError(f"session_id must have at most {MAX_SALT_CHARS} characters", field="session_id")
    if len(request.user) > MAX_SALT_CHARS:
        raise InvalidRequestError(f"user must have at most {MAX_SALT_CHARS} characters", field="user")
    if request.ttft_ms is not None:
        _check_milliseconds("ttft_ms", request.ttft_ms)
    if request.itl_ms is not None:
        _check_milliseconds("itl_ms", request.itl_ms)
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters", field="request_id")
    if not request.request_id.isprintable():  # it stands in lines of logs and in operators' terminals
        raise InvalidRequestError("request_id must have printable characters alone", field="request_id")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stops)}", field="stop")
    if not all(stops):
        raise InvalidRequestError("stop must not contain an empty string", field="stop")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOP_CHARS} characters in all", field="stop")


def _check_milliseconds(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidRequestError(f"{name} must be a number above 0, got {value}", field=name)


class PreparedRequest(msgspec.Struct):
    """A request that is checked, tokenized and ready to be placed.

    Attributes:
        dialects: How the model writes calls and reasoning, if these are to be found in its text.
        shown: Special tokens that these are written with.
    """

    request: TextRequest
    routed: RoutedRequest
    info: ModelInfo
    text_model: TextModel
    stops: StopStrings | None
    dialects: Dialects | None = None
    shown: frozenset[int] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.routed.prompt_token_ids)

    def sequence(self) -> SequenceText:
        """Return what makes the text of one of its sequences."""
        request = self.request
        prompt = self.request.prompt
        # A completion's text continues its prompt; an answer begins anew, unless it goes on with a given message.
        continues = prompt.continue_final_message if isinstance(prompt, ChatPrompt) else True
        return SequenceText(
            self.text_model.tokenizer,
            self.routed.prompt_token_ids if continues else (),
            self.routed.sampling,
            self.stops,
            request.skip_special_tokens,
            request.include_stop,
            self.shown,
        )

    def parser(self) -> DialectParser | None:
        """Return what finds calls and reasoning in the text of one of its sequences; ``None``: there are none."""
        dialects = self.dialects
        use = self.request.tool_use
        if dialects is None:
            return None
        tools = dialects.tools if use.mode != "none" else None
        if tools is None and dialects.reasoning is None:
            return None
        return DialectParser(tools, dialects.reasoning, schemas=use.schemas, prompt=self.request.prompt_end)


class TextChunk(msgspec.Struct):
    """What one message brought to a request.

    Attributes:
        trace: With the first chunk and with the last one.
        decision: With the first chunk.
        prompt_logprobs: With the first chunk, if asked for; entry 0 is ``None``.
        cached_tokens: Prompt tokens that did not have to be computed; valid with ``trace``.
        prompt_index: Index of the request; see :class:`TextRequest`.
        plain: Whether the chunk is text of one sequence after the first chunk, and nothing else: ``deltas`` has one
            entry, without log probabilities and end.
    """

    deltas: list[TextDelta]
    trace: common_pb2.RequestTrace | None = None
    decision: Decision | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    prompt_index: int = 0
    plain: bool = False
