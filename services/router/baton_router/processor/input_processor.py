"""Everything between the router's interfaces (HTTP, gRPC) and dispatch: checks, tokenizes and runs requests in text."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import orjson
from prometheus_client import CollectorRegistry

from baton.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    shown,
)
from baton.grammar import StructuredOutputs
from baton.token_ids import TokenIds, max_id, token_ids
from baton.tokenizer import PromptText, StopStrings, TextModel
from baton.tracing import Span, SpanExporter, begin_span
from baton.types import Grammar, RequestId, SamplingParams
from baton_router.accounts import Tenants
from baton_router.admission.gate import Admission, Charge
from baton_router.dispatch.interface import ChunkQueue, ChunkSink, Dispatcher, Running
from baton_router.processor.dialects import ModelDialects
from baton_router.processor.grammar_process import Asked, RefusedGrammarError
from baton_router.processor.grammars import GrammarCache, GrammarMetrics
from baton_router.processor.output_processor import GenerationClock, GenerationMetrics, OutputProcessor, TextSink
from baton_router.processor.text_request import (
    ChatPrompt,
    PreparedRequest,
    Prompt,
    TextChunk,
    TextRequest,
    check_bounds,
)
from baton_router.processor.turns import TenantTurns, TurnThreads
from baton_router.scheduler.decision import Decision, DecisionLog
from baton_router.types import Account, ModelInfo, RoutedRequest

T = TypeVar("T")

_INLINE_CHARS = 4096
"""Longest text, in characters, that is tokenized on the event loop (about a millisecond)."""
_CHARS_PER_PART = 32
"""Characters that a message or a tool counts as, besides its own: a template takes some 0.1 ms for each."""
_LARGE_CHARS = 256 * 1024
"""Characters beyond which texts are tokenized one at a time: each takes at least 0.1 s and some 10 MiB."""
TOKENS_PER_CPU_S = 10_000
"""Tokens that a second of processor time for a tenant's grammar counts as, against the tenant's limits."""
_THREADS = 2
"""Threads for each kind of work: a tokenizer's has word tables of its own, and the library uses more for long texts."""
_CHARS_PER_TOKEN = 4.0
_PROMPT_END = 4096
"""Characters at the end of a prompt that are searched for open reasoning."""
_ID_LISTS = (list, array)


class TokenizerProvider(Protocol):
    """Loads tokenizers; ``baton.tokenizer.TextModelCache`` is one."""

    async def get(self, path: str) -> TextModel:
        """Return the tokenizer and chat template of the model at a path.

        Raises:
            ConfigError: They cannot be loaded.
        """

    def loaded(self, path: str) -> TextModel | None:
        """Return the result of :meth:`get` if it is loaded, else ``None``."""


class InputProcessor:
    """Checks and tokenizes requests, runs them, and returns their text.

    Args:
        dispatcher: Places and runs tokenized requests.
        tokenizers: Loads tokenizers.
        metrics: Metrics of generations.
        decisions: Log of requests; ``None`` creates one.
        exporter: Exports spans; ``None``: spans are not recorded.
        allow_special_tokens: Whether names of special tokens in messages become such tokens.
        admission: Checks tenants' limits; ``None``: there are none.
        grammars: Cache of grammars; ``None`` creates one.

    Attributes:
        dialects: Dialects of the models; may be replaced before the first request.
        decisions: Log of requests.
        max_retention_s: Longest time in seconds for which requests may ask to spare KV; longer ones are clipped.
        turns: Turns of the tenants for work of milliseconds on the event loop.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizers: TokenizerProvider,
        metrics: GenerationMetrics,
        decisions: DecisionLog | None = None,
        exporter: SpanExporter | None = None,
        *,
        allow_special_tokens: bool = False,
        admission: Admission | None = None,
        grammars: GrammarCache | None = None,
    ) -> None:
        self.max_retention_s = 3600.0
        self._grammars = grammars or GrammarCache(GrammarMetrics(CollectorRegistry()))
        self.dialects = ModelDialects()
        self._allow_special_tokens = allow_special_tokens
        self._dispatcher = dispatcher
        self._admission = admission
        self._tokenizers = tokenizers
        self._metrics = metrics
        self.decisions = decisions or DecisionLog()
        self._exporter = exporter
        self._large = TenantTurns(1)
        self.turns = TenantTurns(1)
        self._threads = TurnThreads(_THREADS, "tokenizer", "long texts tokenized")
        self._grammar_threads = TurnThreads(_THREADS, "grammar", "costly grammars compiled", per_tenant=1)
        self._tenants = Tenants()

    def model_info(self, model: str = "") -> ModelInfo:
        """Return the model that is served.

        Args:
            model: Name of the model in the request; empty: any.

        Raises:
            NotFoundError: The model is not served; names the field ``model``.
            UnavailableError: No instance is ready.
        """
        info = self._dispatcher.model_info()
        if not model or model == info.name:
            return info
        if model not in info.names:
            names = ", ".join(map(repr, info.names or (info.name,)))
            verb = "are" if len(info.names) > 1 else "is"
            raise NotFoundError(f"the model {shown(model)} is not served here; {names} {verb}", field="model")
        return info.under(model)

    async def text_model(self, info: ModelInfo) -> TextModel:
        """Return the tokenizer and chat template of a model.

        Raises:
            ConfigError: They cannot be loaded.
        """
        return await self._tokenizers.get(info.path)

    async def tokenize(self, request: TextRequest, info: ModelInfo, *, limit: int | None = None) -> TokenIds:
        """Return the token ids of a request's prompt.

        Args:
            request: The request.
            info: The served model.
            limit: Texts with certainly this many tokens or more are refused without tokenizing.

        Raises:
            InvalidRequestError: The prompt is invalid; names its field.
            ContextLengthError: The prompt certainly has ``limit`` tokens or more.
            UnavailableError: Other tenants' long texts took too long.
        """
        self._decide_special_tokens(request)
        model = await self.text_model(info)
        num_chars = count_chars(request.prompt)
        if num_chars <= _INLINE_CHARS:
            return _tokenize(model, request, info, limit)
        work = functools.partial(_tokenize, model, request, info, limit)
        return await self.in_turn(request, work, large=num_chars > _LARGE_CHARS)

    async def in_turn(self, request: TextRequest, work: Callable[[], T], *, large: bool = False) -> T:
        """Run long work in a thread, in the turn of the request's tenant.

        Args:
            request: Request that the work belongs to.
            work: The work.
            large: Whether only one such work may run at a time, because of its time or memory.

        Raises:
            UnavailableError: Other tenants' work took too long.
        """
        try:
            return await self._threads.run(self._tenant(request), work, before=self._large if large else None)
        except asyncio.CancelledError:
            request.abandoned = True  # a thread cannot be stopped, but looks at this between its steps
            raise

    def check_limits(self, account: Account | None) -> None:
        """Refuse a tenant that has reached its limits, before anything is read for it; counts nothing.

        Raises:
            QueueFullError: Says when it may try again.
        """
        if self._admission is not None:
            self._admission.check(account)

    @contextmanager
    def charge(self, account: Account | None, tokens: float) -> Iterator[Charge]:
        """Count work on a text against its tenant's limits; see :meth:`Admission.charge`.

        Raises:
            QueueFullError: The tenant has used what it may.
        """
        if self._admission is None:
            yield Charge(tokens)
            return
        with self._admission.charge(account, tokens) as charge:
            yield charge

    async def prepare(self, request: TextRequest, *, fallback_id: str = "") -> PreparedRequest:
        """Check and tokenize a request.

        Args:
            request: The request.
            fallback_id: Prefix of its id if the caller gave it none.

        Raises:
            InvalidRequestError: A field is invalid; names it.
            ContextLengthError: Prompt and output do not fit into the model's context.
            NotFoundError: The model is not served.
            UnavailableError: No instance is ready.
        """
        now = self.prepare_now(request, fallback_id=fallback_id)
        if now is not None:
            return now
        arrived = time.perf_counter()
        info = self.model_info(request.model)
        text_model = await self.text_model(info)
        if isinstance(request.prompt, str):
            _check_fewest(text_model, request.prompt, request, info.max_model_len)
        with self.charge(request.account, about_tokens(request.prompt)) as charge:
            if (asked := _unchecked_grammar(request)) is not None:
                _set_grammar(request, await self._grammar(request, asked, charge))
            ids = await self.tokenize(request, info, limit=info.max_model_len)
            if (answer := self.dialects.answer_grammar(request, info, text_model)) is not None:
                request.answer_grammar = await self._grammar(request, answer, charge)
            prepared = self._prepared(request, info, text_model, ids, fallback_id, arrived)
            charge.drop()  # admission counts all of it, but not the grammar's work
        return prepared

    async def _grammar(self, request: TextRequest, asked: Asked, charge: Charge) -> Grammar:
        tenant = self._tenant(request)
        if (known := self._grammars.find(asked, tenant)) is not None:
            return known
        work = functools.partial(self._grammars.make, asked, tenant)
        try:
            grammar, seconds = await self._grammar_threads.run(tenant, work)
        except RefusedGrammarError as error:
            charge.work += TOKENS_PER_CPU_S * error.seconds
            raise
        charge.work += TOKENS_PER_CPU_S * seconds
        return grammar

    def prepare_now(self, request: TextRequest, *, fallback_id: str = "") -> PreparedRequest | None:
        """Do what :meth:`prepare` does, without waiting.

        ``None`` if the tokenizer is not loaded, the text is long, or the request has a grammar that is not cached.

        Raises:
            BatonError: See :meth:`prepare`.
        """
        arrived = time.perf_counter()
        self.check_limits(request.account)
        info = self.model_info(request.model)
        check_bounds(request)
        self._decide_special_tokens(request)
        if (asked := _unchecked_grammar(request)) is not None:
            if not info.grammars:
                field = "sampling.grammar" if request.structured is None else request.structured.field
                raise InvalidRequestError("no instance of this model knows grammars", field=field)
            grammar = self._grammars.find(asked, self._tenant(request))
            if grammar is None:
                return None
            _set_grammar(request, grammar)
        text_model = self._tokenizers.loaded(info.path)
        if text_model is None or count_chars(request.prompt) > _INLINE_CHARS:
            return None
        ids = _tokenize(text_model, request, info, info.max_model_len)
        if (answer := self.dialects.answer_grammar(request, info, text_model)) is not None:
            request.answer_grammar = self._grammars.find(answer, self._tenant(request))
            if request.answer_grammar is None:
                return None
        return self._prepared(request, info, text_model, ids, fallback_id, arrived)

    def _tenant(self, request: TextRequest) -> str:
        return self._tenants.name(request.account, request.cache_salt, request.user)

    def _decide_special_tokens(self, request: TextRequest) -> None:
        if request.allow_special_tokens is None:
            # Texts may contain a template's markers on purpose; messages contain what users say.
            request.allow_special_tokens = self._allow_special_tokens or not isinstance(request.prompt, ChatPrompt)

    def _retention(self, request: TextRequest) -> float:
        """Return for how long a request's KV is to be spared, clipped at the operator's bound."""
        if request.retention_s <= self.max_retention_s:
            return request.retention_s
        request.clipped += ("prompt_cache_retention",)
        return self.max_retention_s

    def _prepared(
        self,
        request: TextRequest,
        info: ModelInfo,
        text_model: TextModel,
        ids: TokenIds,
        fallback_id: str,
        arrived: float,
    ) -> PreparedRequest:
        sampling = complete_sampling(request, info, len(ids), text_model.sampling_defaults)
        if request.answer_grammar is not None:
            sampling.grammar = request.answer_grammar
        routed = RoutedRequest(
            # Clients reuse ids, as in a retry while the first try still runs; instances need unique ones.
            request_id=RequestId(f"{request.request_id or fallback_id or 'gen'}-{secrets.token_hex(16)}"),
            prompt_token_ids=ids,
            sampling=sampling,
            cache_salt=request.cache_salt,
            priority=_priority(request),
            session=_session(request),
            retention_s=self._retention(request),
            output_token_ids=request.output_token_ids,
            ttft_ms=request.ttft_ms,
            itl_ms=request.itl_ms,
            expected_tokens=_expected_tokens(request, sampling.max_tokens),
            tenant=self._tenant(request),
            arrived=arrived,
            account=request.account,
            order=request.order,
            span=self._span(request, info, arrived),
        )
        stops = StopStrings(sampling.stop) if sampling.stop else None
        answer_id = fallback_id if request.request_id else ""
        prepared = PreparedRequest(request, routed, info, text_model, stops, answer_id=answer_id)
        if request.parsed:
            prepared.anchors = self.dialects.anchors(text_model)
            if prepared.parser() is not None:
                prepared.shown = self.dialects.shown_tokens(text_model)
        return prepared

    def _span(self, request: TextRequest, info: ModelInfo, arrived: float) -> Span:
        span = begin_span("request", request.traceparent, self._exporter, start_ns=int(1e9 * arrived))
        if span.recording:
            kind = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
            span.attributes.update({"gen_ai.operation.name": kind, "gen_ai.request.model": info.name})
        return span

    def start_prefill(self, prepared: PreparedRequest, sink: ChunkSink) -> Running:
        """Start a request for the sake of its prompt; the answer counts in no metric of generations."""
        return self._dispatcher.start(prepared.routed, sink)

    def start(self, prepared: PreparedRequest, sink: TextSink) -> Running:
        """Start a request.

        Chunks, the end and all errors go to the sink, possibly before this returns. Errors are those of
        :meth:`Dispatcher.start`.
        """
        run = OutputProcessor(prepared, sink, self.clock(prepared), self.decisions)
        run.start(self._dispatcher)
        return run

    def clock(self, prepared: PreparedRequest) -> GenerationClock:
        """Return the clock of a request."""
        return GenerationClock(self._metrics, prepared.routed.arrived)

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[TextChunk, None]:
        """Run a request; closing the generator cancels it on all instances.

        Raises:
            BatonError: See :meth:`start`.
        """
        queue = ChunkQueue[TextChunk]()
        async with queue.read_chunks(self.start(prepared, queue)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def route(self, prepared: PreparedRequest) -> Decision:
        """Return where a request would be placed now; nothing is reserved."""
        return await self._dispatcher.route(prepared.routed)


def count_chars(prompt: Prompt) -> int:
    """Return the approximate length of a prompt's text, in characters; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, _ID_LISTS):
        return 0
    # All fields of messages, not only the content: templates write them out, too. And each is work, however short.
    parts = (*prompt.messages, prompt.variables, *prompt.tools)
    return _CHARS_PER_PART * len(parts) + sum(_chars(value) for part in parts for value in part.values())


def about_tokens(prompt: Prompt) -> float:
    """Return the approximate number of tokens of a prompt that is not tokenized."""
    return float(len(prompt)) if isinstance(prompt, _ID_LISTS) else max(1.0, count_chars(prompt) / _CHARS_PER_TOKEN)


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    try:
        return len(orjson.dumps(value))  # a tenth of the time of str(), which is long for a million lists
    except TypeError:  # nested as deep as JSON may be: long enough
        return _LARGE_CHARS


def _tokenize(model: TextModel, request: TextRequest, info: ModelInfo, limit: int | None) -> TokenIds:
    prompt = request.prompt
    if isinstance(prompt, _ID_LISTS):
        if limit is not None and len(prompt) >= limit:
            raise _no_room(request, limit, len(prompt))
        bounds = f"token ids must be between 0 and {info.vocab_size - 1}"
        try:
            ids = token_ids(prompt)
        except OverflowError as error:  # negative, or more than 32 bits
            raise InvalidRequestError(bounds, field=request.prompt_field) from error
        if max_id(ids) >= info.vocab_size:
            raise InvalidRequestError(bounds, field=request.prompt_field)
        return ids
    text = _prompt_text(model, request, prompt)
    if request.abandoned:
        raise DeadlineError("the caller has gone")
    if request.parsed:
        request.prompt_end = text.text[-_PROMPT_END:]
    _check_fewest(model, text.text, request, limit)
    return model.encode(text, request.add_special_tokens)


def _check_fewest(model: TextModel, text: str, request: TextRequest, limit: int | None) -> None:
    fewest = model.tokenizer.fewest_tokens(text)
    if limit is not None and fewest >= limit:
        raise ContextLengthError(
            f"this model's context is {limit} tokens and {request.prompt_field} has {fewest} or more",
            field=request.prompt_field,
        )


def _prompt_text(model: TextModel, request: TextRequest, prompt: str | ChatPrompt) -> PromptText:
    allow = bool(request.allow_special_tokens)
    if isinstance(prompt, str):
        return model.prompt_text(prompt, allow_special_tokens=allow)
    if model.chat_template is None:
        message = "the model has no chat template: send a prompt instead"
        raise InvalidRequestError(message, field=request.prompt_field)
    return model.chat_text(
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        variables=prompt.variables,
        tools=prompt.tools,
        allow_special_tokens=allow,
    )


def _unchecked_grammar(request: TextRequest) -> StructuredOutputs | Grammar | None:
    return None if request.grammar_checked else request.structured or request.sampling.grammar


def _set_grammar(request: TextRequest, grammar: Grammar) -> None:
    request.sampling = request.sampling.replace(grammar=grammar)  # other prompts share the old ones
    request.grammar_checked = True


def _session(request: TextRequest) -> str:
    """Return the name of a request's conversation, unique across tenants."""
    if not request.session or request.account is None:
        return request.session
    return f"{request.account.name}/{request.session}"


def _priority(request: TextRequest) -> int:
    """Return a request's priority, clipped at its account's floor."""
    account = request.account
    if account is None or request.priority >= account.priority_floor:
        return request.priority
    request.clipped += ("priority",)
    return account.priority_floor


def _expected_tokens(request: TextRequest, max_tokens: int | None) -> int | None:
    """Return the expected output tokens of a sequence, clipped at the most that it may have."""
    expected = request.expected_tokens
    if expected is None or max_tokens is None or expected <= max_tokens:
        return expected
    request.clipped += ("osl",)
    return max_tokens


def _no_room(request: TextRequest, limit: int, prompt_tokens: int) -> ContextLengthError:
    return ContextLengthError(
        f"this model's context is {limit} tokens and {request.prompt_field} has {prompt_tokens}: "
        "there is no room for an answer",
        field=request.prompt_field,
    )


def complete_sampling(
    request: TextRequest, info: ModelInfo, prompt_tokens: int, defaults: Mapping[str, Any]
) -> SamplingParams:
    """Return the sampling parameters with all defaults filled in, checked against the model.

    Args:
        request: The request.
        info: The served model.
        prompt_tokens: Tokens of the prompt.
        defaults: Sampling parameters of requests that do not set them.
    """
    sampling = request.sampling
    limit = info.max_model_len
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
        usual = request.default_max_tokens
        if usual is None and "max_tokens" in request.unset:
            usual = defaults.get("max_tokens")
        max_tokens = room if usual is None else min(room, usual)
    complete = sampling.copy()
    if defaults:
        for name in request.unset:
            if name in defaults:
                setattr(complete, name, defaults[name])
    complete.max_tokens = max_tokens
    if sampling.seed is None:
        complete.seed = secrets.randbits(63)  # unguessable: with the seed the answer can be generated again
    if sampling.top_k > info.vocab_size:
        complete.top_k = info.vocab_size  # the same as no limit, and it fits the wire
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
