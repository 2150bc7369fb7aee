"""Text in, text out: everything between an interface of the router (HTTP, gRPC) and the placement of token ids."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from baton.errors import (
    BatonError,
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    shown,
)
from baton.text import StopStrings, TextModel
from baton.types import FinishReason, RequestId, SamplingParams
from baton_router.admission.tenant import Tenants
from baton_router.core import Dispatcher, ModelInfo, RoutedChunk, RoutedDelta, RoutedRequest
from baton_router.decision import Decision
from baton_router.decisions import DecisionLog
from baton_router.generation_metrics import GenerationClock, GenerationMetrics, cached_tokens
from baton_router.text_request import ChatPrompt, PreparedRequest, Prompt, TextChunk, TextDelta, TextRequest

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096
MAX_SALT_CHARS = 512
MAX_REQUEST_ID_CHARS = 256
_INLINE_CHARS = 4096
"""Texts up to this length (about a millisecond of work) are tokenized on the event loop, longer ones in a thread."""
_LARGE_CHARS = 256 * 1024
"""Texts longer than this are tokenized one at a time: a tenth of a second and some ten MiB at least, for each."""
_LARGE_WAIT_S = 30.0


class TokenizerProvider(Protocol):
    """Where tokenizers come from; ``baton.text.TextModelCache`` is one."""

    async def get(self, path: str) -> TextModel:
        """Return the tokenizer and chat template of the model at a path.

        Raises:
            ConfigError: They cannot be loaded.
        """


class TextPipeline:
    """Tokenizes a request once, has it placed, and turns the tokens that come back into text."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizers: TokenizerProvider,
        metrics: GenerationMetrics | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._decisions = decisions or DecisionLog()
        self._large = asyncio.Semaphore(1)
        self._tenants = Tenants()

    def model_info(self, model: str = "") -> ModelInfo:
        """Return the model that is served.

        Args:
            model: The name a request gave; empty: whichever.

        Raises:
            NotFoundError: The model is not served; names the field ``model``.
            UnavailableError: No instance is ready.
        """
        info = self._dispatcher.model_info()
        if model and model != info.name:
            raise NotFoundError(f"the model {shown(model)} is not served here; {info.name!r} is", field="model")
        return info

    async def text_model(self, info: ModelInfo) -> TextModel:
        """Return the tokenizer and chat template of a model.

        Raises:
            ConfigError: They cannot be loaded.
        """
        return await self._tokenizers.get(info.path)

    async def tokenize(self, request: TextRequest, info: ModelInfo, *, limit: int | None = None) -> list[int]:
        """Return the token ids of a request's prompt.

        Args:
            request: The request.
            info: The model.
            limit: A text that cannot have fewer tokens than this is not worth tokenizing.

        Raises:
            InvalidRequestError: The prompt is wrong; names its field.
            ContextLengthError: It is known to have ``limit`` tokens or more; one that is not known may pass.
            UnavailableError: Others have long texts tokenized.
        """
        prompt = request.prompt
        if isinstance(prompt, list):
            if limit is not None and len(prompt) >= limit:
                raise _no_room(request, limit, len(prompt))
            if prompt and not 0 <= min(prompt) <= max(prompt) < info.vocab_size:
                raise InvalidRequestError(
                    f"token ids must be between 0 and {info.vocab_size - 1}", field=request.prompt_field
                )
            return prompt
        model = await self.text_model(info)
        num_chars = count_chars(prompt)
        if num_chars <= _INLINE_CHARS:
            return _encode(model, request, limit)
        if num_chars <= _LARGE_CHARS:
            return await asyncio.to_thread(_encode, model, request, limit)
        async with self._turn():
            return await asyncio.to_thread(_encode, model, request, limit)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_LARGE_WAIT_S):
                await self._large.acquire()
        except TimeoutError as error:
            raise UnavailableError("others have long texts tokenized", retry_after_s=5.0) from error
        try:
            yield
        finally:
            self._large.release()

    async def prepare(self, request: TextRequest, *, fallback_id: str = "gen") -> PreparedRequest:
        """Check and tokenize a request.

        Args:
            request: The request.
            fallback_id: What its id begins with if the caller gave it none.

        Raises:
            InvalidRequestError: A field is wrong; names it.
            ContextLengthError: Prompt and output don't fit into the model's context.
            NotFoundError: The model is not served.
            UnavailableError: No instance is ready.
        """
        arrived = time.perf_counter()
        info = self.model_info(request.model)
        stops = _stops(request)
        _check_bounds(request)
        text_model = await self.text_model(info)
        ids = await self.tokenize(request, info, limit=info.max_model_len)
        sampling = _complete(request, info, len(ids))
        routed = RoutedRequest(
            # Clients reuse ids (a retry while the first try still runs); instances need one of their own per request.
            request_id=RequestId(f"{request.request_id or fallback_id}-{secrets.token_hex(16)}"),
            prompt_token_ids=ids,
            sampling=sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            session=request.session,
            output_token_ids=request.output_token_ids,
            ttft_ms=request.ttft_ms,
            itl_ms=request.itl_ms,
            tenant=self._tenants.name(request.client, request.cache_salt, request.user),
            arrived=arrived,
        )
        return PreparedRequest(request, routed, info, text_model, stops, arrived)

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[TextChunk, None]:
        """Run a request. Closing the generator cancels it everywhere at once.

        Raises:
            QueueFullError: Everybody is full.
            OverloadedError: It would wait too long, or longer than it allows.
            UnavailableError: No instance is left to do it.
            InvalidRequestError: An instance refused the request.
        """
        clock = GenerationClock(self._metrics, prepared.arrived)
        outcome = "cancelled"
        record = self._decisions.begin(prepared.routed.request_id, prepared.prompt_tokens, clock)
        answer = _Answer(prepared)
        source = self._dispatcher.stream(prepared.routed)
        try:
            async for routed in source:
                chunk = answer.follow(routed)
                if routed.decision is not None:
                    clock.prompt(prepared.prompt_tokens, cached_tokens(routed.trace))
                if routed.trace is not None:
                    self._decisions.answered(record, routed.trace)
                clock.tokens(chunk.deltas)
                if answer.ended_by_strings:
                    outcome = "done"
                    await _close(source)  # before the consumer gets to see it: the instances are free at once
                    yield chunk
                    return
                yield chunk
            answer.check_ended()
            outcome = "done"
        except BatonError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = InternalError.code
            raise
        finally:
            await _close(source)
            clock.end(outcome)
            self._decisions.end(record, outcome)

    async def route(self, prepared: PreparedRequest) -> Decision:
        """Say where a request would go, and reserve nothing."""
        return await self._dispatcher.route(prepared.routed)


class _Answer:
    """The sequences of one request."""

    __slots__ = ("_open", "_running", "_sequences")

    def __init__(self, prepared: PreparedRequest) -> None:
        self._sequences = [prepared.sequence() for _ in range(prepared.routed.sampling.n)]
        self._open = len(self._sequences)
        self._running = len(self._sequences)

    @property
    def ended_by_strings(self) -> bool:
        """Whether all sequences have ended, but the instance still runs some, which stop strings ended."""
        return self._open == 0 and self._running > 0

    def follow(self, chunk: RoutedChunk) -> TextChunk:
        """Return what a message brings in text; tokens after a sequence's stop string are left out.

        Raises:
            UnavailableError: An instance gave the request up.
            InternalError: An instance failed it.
        """
        deltas = []
        for delta in chunk.deltas:
            text = self._follow(delta)
            if text is not None:
                deltas.append(text)
        return TextChunk(deltas, chunk.trace, chunk.decision, chunk.prompt_logprobs)

    def _follow(self, delta: RoutedDelta) -> TextDelta | None:
        if not 0 <= delta.index < len(self._sequences):
            raise InternalError(f"an instance answered with sequence {delta.index} of {len(self._sequences)}")
        sequence = self._sequences[delta.index]
        self._running -= delta.finish_reason is not None
        if sequence.ended:
            return None
        if delta.finish_reason is FinishReason.ABORT:
            raise UnavailableError("the request was aborted by the instance that ran it", retry_after_s=1.0)
        if delta.finish_reason is FinishReason.ERROR:
            raise InternalError("the instance that ran the request failed it")
        text = sequence.push(delta)
        if text.finish_reason is not None:
            self._open -= 1
        return text

    def check_ended(self) -> None:
        """Check that every sequence has ended.

        Raises:
            InternalError: The stream ended before them.
        """
        if self._open:
            raise InternalError(f"the stream ended before {self._open} of {len(self._sequences)} sequences had")


async def _close(source: AsyncIterator[RoutedChunk]) -> None:
    """Close a dispatcher's stream; one that has ended, or that is no generator, has nothing to close."""
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


def count_chars(prompt: Prompt) -> int:
    """Return the length of a prompt's text, roughly; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return 0
    return sum(len(str(message.get("content"))) for message in prompt.messages)


def _encode(model: TextModel, request: TextRequest, limit: int | None) -> list[int]:
    prompt = request.prompt
    if isinstance(prompt, list):
        return prompt
    text = prompt if isinstance(prompt, str) else _render(model, prompt, request.prompt_field)
    fewest = model.tokenizer.fewest_tokens(text)
    if limit is not None and fewest >= limit:
        raise ContextLengthError(
            f"this model's context is {limit} tokens and {request.prompt_field} has {fewest} or more",
            field=request.prompt_field,
        )
    return model.tokenizer.encode(text, request.add_special_tokens, salt=request.cache_salt)


def _render(model: TextModel, prompt: ChatPrompt, field: str) -> str:
    if model.chat_template is None:
        raise InvalidRequestError("the model has no chat template: send a prompt instead", field=field)
    return model.chat_template.render(
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        variables=prompt.variables,
    )


def _stops(request: TextRequest) -> StopStrings | None:
    stops = request.sampling.stop
    if not stops:
        return None
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stops)}", field="stop")
    if not all(stops):
        raise InvalidRequestError("stop must not contain an empty string", field="stop")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOP_CHARS} characters in all", field="stop")
    return StopStrings(stops)


def _check_bounds(request: TextRequest) -> None:
    if not -(2**31) <= request.priority < 2**31:
        raise InvalidRequestError(f"priority must fit into 32 bits, got {request.priority}", field="priority")
    if len(request.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(f"cache_salt must have at most {MAX_SALT_CHARS} characters", field="cache_salt")
    if len(request.session) > MAX_SALT_CHARS:
        raise InvalidRequestError(f"session_id must have at most {MAX_SALT_CHARS} characters", field="session_id")
    if len(request.user) > MAX_SALT_CHARS:
        raise InvalidRequestError(f"user must have at most {MAX_SALT_CHARS} characters", field="user")
    for name, value in (("ttft_ms", request.ttft_ms), ("itl_ms", request.itl_ms)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequestError(f"{name} must be a number above 0, got {value}", field=name)
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters", field="request_id")


def _no_room(request: TextRequest, limit: int, prompt_tokens: int) -> ContextLengthError:
    return ContextLengthError(
        f"this model's context is {limit} tokens and {request.prompt_field} has {prompt_tokens}: "
        "there is no room for an answer",
        field=request.prompt_field,
    )


def _complete(request: TextRequest, info: ModelInfo, prompt_tokens: int) -> SamplingParams:
    """Return the sampling parameters with everything filled in, and checked against the model."""
    sampling, limit = request.sampling, info.max_model_len
    if prompt_tokens == 0:
        raise InvalidRequestError(f"{request.prompt_field} must not be empty", field=request.prompt_field)
    if prompt_tokens >= limit:
        raise _no_room(request, limit, prompt_tokens)
    room = limit - prompt_tokens
    max_tokens = sampling.max_tokens
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthError(
            f"this model's context is {limit} tokens; {prompt_tokens} in {request.prompt_field} and {max_tokens} in "
            f"{request.max_tokens_field} are more",
            field=f"{request.field_prefix}{request.max_tokens_field}",
        )
    if max_tokens is None:
        max_tokens = room if request.default_max_tokens is None else min(room, request.default_max_tokens)
    complete = sampling.replace(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        top_k=min(sampling.top_k, info.vocab_size),  # as good as off, and it fits the wire
    )
    try:
        complete.validate(vocab_size=info.vocab_size, prefix=request.field_prefix)
    except InvalidRequestError as error:
        if error.field != f"{request.field_prefix}max_tokens":
            raise
        name = request.max_tokens_field
        raise InvalidRequestError(
            error.message.replace("max_tokens", name), field=f"{request.field_prefix}{name}"
        ) from error
    return complete
