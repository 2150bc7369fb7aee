"""What answers look like, for the OpenAPI document; ``answer.py`` and the endpoints write them, tests compare."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class ErrorObject(msgspec.Struct):
    """What went wrong; ``param`` is the path of the field at fault, e.g. ``messages[2].content``."""

    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """The body of every answer that is an error, and the event of a stream that ends with one."""

    error: ErrorObject


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens that did not have to be computed."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Draft tokens of speculative decoding that were right, and those that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and sequences of a request; ``completion_tokens_details`` if there was speculation."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A token that was likely; ``bytes`` join to the text even where a token is part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion's tokens; the lists are parallel."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct):
    """One of a prompt position's likely tokens."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptToken] | None]


class Sequence(msgspec.Struct, kw_only=True):
    """What every choice has."""

    index: int
    finish_reason: Literal["stop", "length", "abort", "error", "tool_calls"] | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class FunctionCall(msgspec.Struct):
    """A tool's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(msgspec.Struct):
    """The message that was generated; ``reasoning`` and ``reasoning_content`` are the same."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """What an event adds to a call's function."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What an event adds to a call; ``id``, ``type`` and the name come with its first one."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What an event adds to the message."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Sequence, kw_only=True):
    """One sequence of a chat answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Sequence, kw_only=True):
    """What an event adds to one sequence of a chat answer."""

    delta: Delta
    logprobs: ChatLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Sequence, kw_only=True):
    """One sequence of a completion, or what an event adds to it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """What every answer has."""

    id: str
    created: int
    model: str


class ChatCompletion(Answer, kw_only=True):
    """Answers ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    """An event of a chat answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class Completion(Answer, kw_only=True):
    """Answers ``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer, kw_only=True):
    """An event of a completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Response(msgspec.Struct, kw_only=True):
    """Answers ``POST /v1/responses``; fields of the request are repeated beside these."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class InputItems(msgspec.Struct, kw_only=True):
    """Answers ``GET /v1/responses/{response_id}/input_items``."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(msgspec.Struct):
    """Answers ``DELETE /v1/responses/{response_id}``."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a response: its kind says which other fields there are."""

    type: str
    sequence_number: int


class Model(msgspec.Struct):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"] | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    created_at: str | UnsetType = UNSET
    lifecycle: Literal["active"] | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """Answers ``GET /v1/models``; with the fields of Anthropic's interface for clients that send its version."""

    object: Literal["list"]
    data: list[Model]
    has_more: bool | UnsetType = UNSET
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    """Answers ``POST /v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Tokens(msgspec.Struct):
    """Answers ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Prompt(msgspec.Struct):
    """Answers ``POST /detokenize``."""

    prompt: str


class Health(msgspec.Struct):
    """Answers ``GET /health``."""

    status: Literal["ok"]


class Readiness(msgspec.Struct):
    """Answers ``GET /readyz``; ``refused`` counts instances that are, by role."""

    status: Literal["ready", "not ready"]
    refused: dict[str, int] | UnsetType = UNSET


class Version(msgspec.Struct):
    """Answers ``GET /version``."""

    version: str


class CacheReset(msgspec.Struct):
    """Answers ``POST /reset_prefix_cache``: how many blocks each instance dropped, by its id."""

    blocks: dict[str, int]


class TokenizerInfo(msgspec.Struct):
    """Answers ``GET /tokenizer_info``: beside these, what the model's ``tokenizer_config.json`` has."""

    tokenizer_class: str | None
    chat_template: str | None


class Decisions(msgspec.Struct):
    """Answers ``GET /debug/decisions``."""

    decisions: list[dict[str, Any]]
    seen: int
