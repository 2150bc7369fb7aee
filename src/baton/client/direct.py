"""Direct mode: the router places a request and signs a ticket; the tokens come from the decode instance.

Messages of the instance are converted to those that a router would have sent. If the instance's stream breaks, the rest
is requested from the router, with the prompt and the tokens so far. A sequence depends only on its seed and its own
tokens, so the next token is the one that would have come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.api.v1 import common_pb2, router_pb2, worker_pb2, worker_pb2_grpc
from baton.errors import ConfigError, InternalError, QueueFullError
from baton.rpc.auth import HEADER
from baton.rpc.convert import add_to, finish_from_pb, logprob_from_pb, sampling_from_pb, text_delta_to_pb
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.ticket import ticket_header
from baton.seeds import sequence_seed
from baton.token_ids import unpack_ids
from baton.tokenizer import SequenceText, StopStrings, TextModel, TokenDelta
from baton.types import FinishReason, Order

_MAX_CHANNELS = 64
_NOTE_TIMEOUT_S = 5.0
_CLOSE_S = 1.0
_NOTE_EVERY_S = 5.0
_MAX_GAPS = 4096
"""Most times between tokens in a notice: more than occur in its interval."""
_CONTEXT_PROMPTS = frozenset({"text", "token_ids"})
"""Kinds of prompts whose text the answer continues; the answer to a conversation has a text of its own."""

_RETRIABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)
"""Codes of a broken stream after which another instance may succeed."""


def load_text_model(tokenizer: str, model_path: str) -> TextModel:
    """Load the tokenizer that detokenizes the instance's tokens.

    Args:
        tokenizer: Directory or GGUF file from the client's arguments; empty: use ``model_path``.
        model_path: Path of the model on the instance's host.

    Raises:
        ConfigError: The path does not exist here; names ``tokenizer``.
    """
    path = tokenizer or model_path
    if not path or not Path(path).exists():
        message = f"direct mode makes the text here and needs the model's tokenizer: {path!r} is not here"
        raise ConfigError(message, field="tokenizer")
    return TextModel.load(path)


def _micros(seconds: float) -> int:
    """Return whole microseconds that fit into the notice's 32 bits (71 minutes)."""
    return min(2**32 - 1, max(0, round(1e6 * seconds)))


@dataclass(slots=True)
class _Sequence:
    text: SequenceText
    token_ids: list[int] = field(default_factory=list)
    """All tokens, including those after a stop string."""
    finished: bool = False
    """Whether the instance ended the sequence; a stop string only ends its text."""


class DirectAnswer:
    """One request that runs with a ticket.

    Args:
        request: Request of the caller.
        route: Placement and ticket from the router.
        model: Detokenizes the answer.
        now: Monotonic clock, in seconds.

    Attributes:
        address: ``host:port`` of the decode instance.
        message: Message for the decode instance, with the ticket.

    Raises:
        InternalError: The router has placed another number of sequences.
    """

    def __init__(
        self,
        request: router_pb2.RouterGenerateRequest,
        route: router_pb2.RouteResponse,
        model: TextModel,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = route.direct.address
        self.message = route.direct.request
        self._request = request
        self._now = now
        self._decision: router_pb2.RouteDecision | None = route.decision
        self._trace: common_pb2.RequestTrace | None = None
        self._prompt_logprobs = False
        self._noted_at = 0.0
        self._routed_at = now()
        self._last_at: dict[int, float] = {}  # arrival of the latest tokens, by sequence
        self._first_token_us: int | None = None
        self._gaps_us: list[int] = []
        sampling = sampling_from_pb(self.message.sampling, stop=tuple(request.stop))
        if sampling.n != (request.sampling.n or 1):
            raise InternalError(f"the router placed {sampling.n} sequences for {request.sampling.n or 1}")
        prompt = unpack_ids(self.message.prompt_token_ids) if request.WhichOneof("prompt") in _CONTEXT_PROMPTS else ()
        stops = StopStrings(sampling.stop) if sampling.stop else None
        self._sequences = [
            _Sequence(
                SequenceText(
                    model.tokenizer,
                    list(prompt[-64:]),
                    sampling,
                    stops=stops,
                    include_stop=request.include_stop_in_output,
                )
            )
            for _ in range(sampling.n)
        ]

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has ended."""
        return all(x.finished or x.text.ended for x in self._sequences)

    @property
    def can_abort(self) -> bool:
        """Whether stop strings ended all sequences that the instance still runs."""
        return self.is_complete and not all(x.finished for x in self._sequences)

    def convert(self, response: worker_pb2.GenerateResponse) -> router_pb2.RouterGenerateResponse:
        """Convert a message of the instance to the one that a router would have sent.

        Raises:
            InternalError: The message has a sequence that was not asked for.
        """
        deltas = [
            TokenDelta(
                item.index,
                list(item.token_ids),
                [logprob_from_pb(x) for x in item.logprobs],
                finish_from_pb(item.finish_reason),
                item.stop_token_id if item.HasField("stop_token_id") else None,
            )
            for item in response.deltas
        ]
        self._record_times(deltas)
        if response.HasField("trace"):
            self._trace = response.trace
            self._trace.decode_instance = self._trace.decode_instance or self.address
            self._trace.order = Order.DECODE_FIRST  # a ticket names a decode instance, so decode comes first
        self._prompt_logprobs = self._prompt_logprobs or bool(response.prompt_logprobs)
        out = self._response(deltas, response.trace if response.HasField("trace") else None)
        out.prompt_logprobs.extend(response.prompt_logprobs)
        return out

    # --- the reservation ---

    def note(self) -> router_pb2.NoteDirectRequest | None:
        """Return a notice for the router if one is due: after the first message, and every few seconds."""
        now = self._now()
        if now - self._noted_at < _NOTE_EVERY_S:
            return None
        self._noted_at = now
        return self._notice()

    def last_note(self, *, failed: bool) -> router_pb2.NoteDirectRequest:
        """Return the notice that releases the reservation.

        Args:
            failed: Whether the instance failed the request.
        """
        notice = self._notice()
        notice.ended = True
        notice.failed = failed
        notice.cancelled = not (failed or self.is_complete)
        return notice

    # --- continuing on the router ---

    def exhausted(self) -> router_pb2.RouterGenerateResponse | None:
        """End sequences that have all their tokens, but whose stream broke before their end was reported."""
        limit = self.message.sampling.max_tokens
        done = [i for i, x in enumerate(self._sequences) if self.is_open(i) and len(x.token_ids) >= limit]
        if not done:
            return None
        return self._response([TokenDelta(i, [], finish_reason=FinishReason.LENGTH) for i in done], None)

    def rest(self) -> list[tuple[int, router_pb2.RouterGenerateRequest]]:
        """Return the requests that continue on a router, one per open sequence, with the sequences' indices."""
        return [(i, self._rest_of(i)) for i in range(len(self._sequences)) if self.is_open(i)]

    def convert_rest(
        self, index: int, response: router_pb2.RouterGenerateResponse
    ) -> router_pb2.RouterGenerateResponse:
        """Convert a router's message for a sequence that continues there."""
        deltas = []
        for item in response.deltas:
            finish = finish_from_pb(item.finish_reason)
            ids = list(item.token_ids)
            # The request has no stop strings, so a token stopped the sequence.
            stop = ids[-1] if finish is FinishReason.STOP and ids else None
            deltas.append(TokenDelta(index, ids, [logprob_from_pb(x) for x in item.logprobs], finish, stop))
        trace = None
        if response.HasField("trace"):
            trace = self._trace = response.trace
            add_to(trace, "num_migrations", 1)
        out = self._response(deltas, trace)
        if not self._prompt_logprobs:
            out.prompt_logprobs.extend(response.prompt_logprobs)
        return out

    # --- inside ---

    def _record_times(self, deltas: list[TokenDelta]) -> None:
        """Record when tokens arrived, for the notices to the router."""
        counts: dict[int, int] = {}
        for delta in deltas:
            if delta.token_ids:
                counts[delta.index] = counts.get(delta.index, 0) + len(delta.token_ids)
        now = self._now()
        if counts and self._first_token_us is None:
            self._first_token_us = _micros(now - self._routed_at)
        for index, count in counts.items():
            if (before := self._last_at.get(index)) is not None:
                room = _MAX_GAPS - len(self._gaps_us)
                self._gaps_us += [_micros((now - before) / count)] * min(count, room)
            self._last_at[index] = now

    def _notice(self) -> router_pb2.NoteDirectRequest:
        gaps = self._gaps_us
        self._gaps_us = []
        return router_pb2.NoteDirectRequest(
            request_id=self.message.request_id,
            ticket_mac=self.message.ticket.mac,
            num_tokens=self._num_tokens,
            trace=self._trace,
            first_token_us=self._first_token_us,
            itl_us=gaps,
        )

    @property
    def _num_tokens(self) -> int:
        return sum(len(x.token_ids) for x in self._sequences)

    def is_open(self, index: int) -> bool:
        """Whether a sequence has not ended."""
        sequence = self._sequences[index]
        return not (sequence.finished or sequence.text.ended)

    def _rest_of(self, index: int) -> router_pb2.RouterGenerateRequest:
        request = self._request
        message = self.message
        rest = router_pb2.RouterGenerateRequest(
            request_id=request.request_id,
            model=request.model,
            token_ids=router_pb2.TokenIds(ids=unpack_ids(message.prompt_token_ids)),
            sampling=message.sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            session_id=request.session_id,
            itl_ms=request.itl_ms,
            user=request.user,
            output_token_ids=self._sequences[index].token_ids,
        )
        rest.sampling.n = 1
        rest.sampling.seed = (
            sequence_seed(message.sampling.seed, index) if len(self._sequences) > 1 else (message.sampling.seed)
        )
        if self._prompt_logprobs:
            rest.sampling.ClearField("prompt_logprobs")
        return rest

    def _response(
        self, deltas: list[TokenDelta], trace: common_pb2.RequestTrace | None
    ) -> router_pb2.RouterGenerateResponse:
        out = router_pb2.RouterGenerateResponse(
            request_id=self._request.request_id or self.message.request_id, trace=trace, decision=self._decision
        )
        self._decision = None
        for delta in deltas:
            if delta.index >= len(self._sequences):
                raise InternalError(f"{self.address} sent tokens of sequence {delta.index}, which was not asked for")
            sequence = self._sequences[delta.index]
            if sequence.finished or sequence.text.ended:
                continue
            sequence.token_ids += delta.token_ids
            sequence.finished = delta.finish_reason is not None
            out.deltas.append(text_delta_to_pb(sequence.text.push(delta)))
        return out


class DirectLinks:
    """What the direct calls of one client share: channels to decode instances, the tokenizer, and pending notices.

    Args:
        router: Stub of the router.
        open_channel: Opens a channel to an address.
        metadata: gRPC metadata of all calls.
        tokenizer: Directory of the tokenizer; empty: the path that the instance names.

    Attributes:
        router: Stub of the router; replaced when the client switches routers.
        metadata: gRPC metadata of all calls.
    """

    def __init__(
        self,
        router: Any,
        open_channel: Callable[[str], grpc.aio.Channel],
        metadata: tuple[tuple[str, str], ...],
        tokenizer: str,
    ) -> None:
        self.router = router
        self.metadata = metadata
        self._open_channel = open_channel
        self._tokenizer = tokenizer
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._models: dict[str, TextModel] = {}
        self._notes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def decode(self, address: str) -> Any:
        """Return the stub of a decode instance."""
        channel = self._channels.pop(address, None)
        if channel is None:
            if len(self._channels) >= _MAX_CHANNELS:
                # Running calls keep the channel open until they end.
                self._channels.pop(next(iter(self._channels)))
            channel = self._open_channel(address)
        self._channels[address] = channel
        return worker_pb2_grpc.WorkerServiceStub(channel)

    async def model(self, path: str) -> TextModel:
        """Return the text model of a path, loaded once."""
        if path not in self._models:
            self._models[path] = await asyncio.to_thread(load_text_model, self._tokenizer, path)
        return self._models[path]

    def note(self, request: router_pb2.NoteDirectRequest) -> None:
        """Send a notice in the background; if it is lost, the router's lease ends the reservation."""
        if not self._loop.is_running():
            return
        task = self._loop.create_task(self._note(request))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _note(self, request: router_pb2.NoteDirectRequest) -> None:
        try:
            await self.router.NoteDirect(request, timeout=_NOTE_TIMEOUT_S, metadata=self.metadata)
        except (grpc.RpcError, grpc.aio.UsageError):
            return  # the lease ends it

    async def close(self) -> None:
        """Wait for pending notices, and close the channels."""
        if self._notes:
            await asyncio.wait(self._notes, timeout=_CLOSE_S)
        for task in self._notes:
            task.cancel()
        for channel in self._channels.values():
            await channel.close(None)


class DirectCall:
    """Has the interface of a call of the router's ``Generate``, but reads tokens from the decode instance.

    Args:
        links: Shared part of the client's direct calls.
        request: Request of the caller.
        timeout: Deadline of the whole request, in seconds.
        metadata: gRPC metadata beside that of all calls.
    """

    def __init__(
        self,
        links: DirectLinks,
        request: router_pb2.RouterGenerateRequest,
        timeout: float,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._links = links
        self._request = request
        self._metadata = links.metadata + metadata
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + timeout
        self._inner: Any = None
        self._answer: DirectAnswer | None = None
        self._stopped = False
        self._messages = self._run()

    async def read(self) -> Any:
        """Return the next message, or grpc's ``EOF``."""
        return await anext(self._messages, grpc.aio.EOF)  # type: ignore[attr-defined]

    def cancel(self) -> None:
        self._stopped = True
        if self._inner is not None:
            self._inner.cancel()
        self._end()

    async def _run(self) -> AsyncGenerator[router_pb2.RouterGenerateResponse, None]:
        links = self._links
        try:
            route = readable(await self._open(links.router.Route, router_pb2.RouteRequest(direct=self._request)))
        except grpc.RpcError as error:
            refusal = from_rpc_error(error)
            if not (isinstance(refusal, QueueFullError) and refusal.field == "direct"):
                raise
            async for response in self._open(links.router.Generate, self._request):  # it may have no more tickets now
                yield readable(response)
            return
        answer = self._answer = DirectAnswer(self._request, route, await links.model(route.direct.model_path))
        try:
            async with aclosing(self._direct(answer)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._end()
        if answer.is_complete:
            return
        if (exhausted := answer.exhausted()) is not None:
            yield exhausted
        for index, rest in answer.rest():
            async for response in self._open(links.router.Generate, rest):
                yield answer.convert_rest(index, readable(response))
                if not answer.is_open(index):
                    self._inner.cancel()
                    break

    async def _direct(self, answer: DirectAnswer) -> AsyncGenerator[router_pb2.RouterGenerateResponse, None]:
        links = self._links
        try:
            generate = links.decode(answer.address).Generate
            async for response in self._open(generate, answer.message, ticket_header(answer.message.ticket)):
                yield answer.convert(readable(response))
                if answer.can_abort:
                    self._inner.cancel()
                    return
                if (note := answer.note()) is not None:
                    links.note(note)
        except grpc.RpcError as error:
            slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._loop.time() < self._ends_at
            if self._stopped or not (answer.is_complete or slow or error.code() in _RETRIABLE):
                raise
        self._end(failed=not answer.is_complete)

    def _end(self, *, failed: bool = False) -> None:
        answer = self._answer
        self._answer = None
        if answer is not None:
            self._links.note(answer.last_note(failed=failed))

    def _open(self, method: Any, request: Any, ticket: str = "") -> Any:
        remaining_s = max(0.001, self._ends_at - self._loop.time())
        metadata = self._metadata
        if ticket:  # instead of the API key, which is for routers
            metadata = (*((name, value) for name, value in metadata if name != HEADER), (HEADER, ticket))
        self._inner = method(request, timeout=remaining_s, metadata=metadata)
        if self._stopped:
            self._inner.cancel()
        return self._inner
