"""Requests and answers above dispatch, in text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from baton.api.v1 import common_pb2
from baton.dialects import DialectParser
from baton.dialects.token_anchors import TokenAnchors
from baton.dialects.tool_use import ToolUse
from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton.token_ids import TokenIds
from baton.tokenizer import SequenceText, StopStrings, TextDelta, TextModel
from baton.types import Grammar, Order, SamplingParams, TokenLogprob
from baton_router.scheduler.decision import Decision
from baton_router.types import MAX_SALT_CHARS, Account, ModelInfo, RoutedRequest

__all__ = ["ROLES", "ChatPrompt", "PreparedRequest", "Prompt", "TextChunk", "TextDelta", "TextRequest", "check_role"]

MAX_MESSAGES = 10_000
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096
MAX_REQUEST_ID_CHARS = 256
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of messages, as in OpenAI's API: templates silently drop others, or treat them as users."""


def check_role(role: Any, field: str) -> None:
    """Check the role of a message.

    Raises:
        InvalidRequestError: There is no such role.
    """
    if role not in ROLES:
        raise InvalidRequestError(f"{field} must be one of {', '.join(ROLES)}, got {shown(role)}", field=field)


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation, to be rendered by the model's chat template.

    Attributes:
        messages: JSON objects with ``role`` and ``content``.
        add_generation_prompt: End the prompt with the start of the assistant's answer.
        continue_final_message: Leave the last message open instead, so that the answer continues it.
        variables: Variables for the template.
        tools: Tools that the model may call.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


Prompt: TypeAlias = str | list[int] | TokenIds | ChatPrompt


class TextRequest(msgspec.Struct):
    """A request as the router's interfaces receive it, not checked yet.

    Attributes:
        prompt: Text, token ids or a conversation.
        sampling: Sampling parameters; ``max_tokens`` and ``seed`` may be missing.
        unset: Fields of ``sampling`` that get the defaults of the model's ``generation_config.json``, if it has some.
        request_id: Identifier from the caller; instances get a unique one that starts with it.
        model: Name of the model; empty: the served one.
        default_max_tokens: Value of ``max_tokens`` if ``sampling`` has none; ``None``: the rest of the context.
        add_special_tokens: Let the tokenizer add its special tokens to a text, such as the begin token; a rendered
            conversation has them already.
        allow_special_tokens: Whether names of special tokens in the prompt become such tokens; ``None``: the router's
            default, which is to do so in texts but not in messages.
        skip_special_tokens: Leave special tokens out of the answer's text.
        include_stop: Whether the stop string or token that ended a sequence is part of its text.
        cache_salt: Separates the prefix caches of tenants.
        priority: Requests with lower numbers run first.
        expected_tokens: Tokens of output per sequence that the caller expects; ``None``: it has not said.
        speculative_prefill: Whether to compute what the next turn begins with after the answer.
        clipped: Names of fields that asked for more than they got.
        session: Name of the conversation; empty if it has none.
        retention_s: Seconds for which eviction is asked to spare the conversation's KV; below 0: this is its last
            request.
        session_hint: What tells conversations apart, of fields that clients send for another purpose, such as
            ``prompt_cache_key``; the name of the conversation if that has none.
        ttft_ms: Deadline of the first token, in milliseconds; ``None`` without one.
        itl_ms: Longest time between two tokens, in milliseconds; ``None`` without bound.
        user: Name of the user, from the caller.
        account: Account of the API key; ``None`` without keys, or for a service's request. ``cache_salt`` is then the
            one that the account made of it.
        order: Order in which the request is served; ``None``: the router's default.
        traceparent: W3C trace context of the caller; empty if there is none.
        output_token_ids: Tokens that were generated elsewhere; the answer's text is that of the tokens that follow.
        output_chars: Characters of the answer that the caller has, with ``output_token_ids``: the text continues
            behind them. ``None``: it is that of the tokens that follow.
        per_token: Whether each token's text is wanted separately, even of tokens that arrive together; as long as the
            client keeps up.
        structured: Constraint on the answer; ``None``: the grammar of ``sampling``, if it has one.
        grammar_checked: Whether the grammar of ``sampling`` was checked, or made from ``structured``.
        tool_use: Tools that are offered, and how they may be used.
        thinking_budget: Most tokens of reasoning; ``None`` without bound.
        parsed: Whether to parse calls and reasoning in the text, if the model's dialects are known.
        prompt_end: End of the prompt's text; set by tokenization.
        answer_grammar: Grammar of the whole answer, with reasoning and calls; set by preparation.
        abandoned: Whether the caller has gone, so that work in threads ends early.
        prompt_index: Index of the prompt within its HTTP request.
        prompt_field: Name of the prompt's field in errors.
        max_tokens_field: Name of the field ``max_tokens`` in errors.
        field_prefix: Prefix of sampling fields in errors, such as ``"sampling."``.
    """

    prompt: Prompt
    sampling: SamplingParams
    unset: tuple[str, ...] = ()
    request_id: str = ""
    model: str = ""
    default_max_tokens: int | None = None
    add_special_tokens: bool = True
    allow_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    include_stop: bool = False
    cache_salt: str = ""
    priority: int = 0
    expected_tokens: int | None = None
    speculative_prefill: bool = False
    clipped: tuple[str, ...] = ()
    session: str = ""
    session_hint: str = ""
    retention_s: float = 0.0
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
    abandoned: bool = False
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
    texts = (("cache_salt", request.cache_salt), ("session_id", request.session), ("user", request.user))
    for name, text in texts:
        if len(text) > MAX_SALT_CHARS:
            raise InvalidRequestError(f"{name} must have at most {MAX_SALT_CHARS} characters", field=name)
    for name, target_ms in (("ttft_ms", request.ttft_ms), ("itl_ms", request.itl_ms)):
        if target_ms is not None and not 0 < target_ms < math.inf:
            raise InvalidRequestError(f"{name} must be a number above 0, got {target_ms}", field=name)
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters", field="request_id")
    if not request.request_id.isprintable():  # it is written to logs and operators' terminals
        raise InvalidRequestError("request_id must have printable characters alone", field="request_id")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stops)}", field="stop")
    if not all(stops):
        raise InvalidRequestError("stop must not contain an empty string", field="stop")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOP_CHARS} characters in all", field="stop")


class PreparedRequest(msgspec.Struct):
    """A request that is checked, tokenized and ready to be placed.

    Attributes:
        request: The request as received.
        routed: The tokenized request for dispatch.
        info: The served model.
        text_model: Tokenizer and chat template.
        stops: Stop strings, if there are any.
        anchors: Dialects of the model, if its text is parsed.
        shown: Special tokens that the dialects use.
        answer_id: Identifier of the answer, if the caller gave the request another; else empty.
    """

    request: TextRequest
    routed: RoutedRequest
    info: ModelInfo
    text_model: TextModel
    stops: StopStrings | None
    anchors: TokenAnchors | None = None
    shown: frozenset[int] = frozenset()
    answer_id: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.routed.prompt_token_ids)

    def sequence(self) -> SequenceText:
        """Return the detokenizer of one of its sequences."""
        request = self.request
        prompt = self.request.prompt
        # A completion continues its prompt; an answer has a text of its own, unless it continues a given message.
        continues = prompt.continue_final_message if isinstance(prompt, ChatPrompt) else True
        return SequenceText(
            self.text_model.tokenizer,
            self.routed.prompt_token_ids if continues else (),
            self.routed.sampling,
            self.stops,
            request.skip_special_tokens,
            request.include_stop,
            self.shown,
            self.anchor_ids,
        )

    @property
    def anchor_ids(self) -> frozenset[int]:
        """Tokens whose places in the text the parser must know."""
        return frozenset() if self.anchors is None else self.anchors.ids

    def parser(self) -> DialectParser | None:
        """Return the parser of calls and reasoning in a sequence's text; ``None`` if there are none."""
        anchors = self.anchors
        use = self.request.tool_use
        if anchors is None:
            return None
        tools = anchors.tools if use.mode != "none" else None
        if tools is None and anchors.reasoning is None:
            return None
        prompt = anchors.mark_prompt(self.request.prompt_end)
        return DialectParser(tools, anchors.reasoning, schemas=use.schemas, prompt=prompt)


class TextChunk(msgspec.Struct):
    """What one message brought to a request, in text.

    Attributes:
        deltas: New text and tokens of sequences.
        trace: Merged trace; with the first chunk and with the last one.
        decision: Placement of the request; with the first chunk.
        prompt_logprobs: Log probabilities of the prompt, if asked for; with the first chunk. Entry 0 is ``None``.
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
