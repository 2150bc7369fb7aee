"""A worker without a model: the real protocol over real sockets, with tokens, events, load and faults on command.

What its tokens are says :mod:`tests.support.servers.fake_tokens`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from tests.support.servers.fake_tokens import EOS, VOCAB_SIZE, next_token

from baton.api.v1 import common_pb2, events_pb2, worker_pb2, worker_pb2_grpc
from baton.errors import BatonError, InvalidRequestError, QueueFullError, UnavailableError
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import LayerShape
from baton.rpc.convert import fingerprint_to_pb, finish_to_pb, role_to_pb
from baton.rpc.multiplex_server import generate_many
from baton.rpc.server import GrpcServer, free_port
from baton.rpc.service_token import Token
from baton.rpc.ticket import Bearer, TicketCheck
from baton.rpc.ticketed_calls import CallEvent, TicketedCalls, load_response
from baton.seeds import sequence_seed
from baton.token_ids import unpack_ids
from baton.types import BlockHash, Epoch, FinishReason, Role

SERVICE = "baton.api.v1.WorkerService"

FINGERPRINT = Fingerprint(
    model="fake",
    model_digest="0" * 64,
    kv_dtype="float32",
    block_size=4,
    layer_shapes=(LayerShape(1, 4, 4),),
    block_bytes=128,
)


@dataclass
class FakeWorkerState:
    """What a fake worker does and what was done to it; tests set and read it while the worker runs.

    Attributes:
        pause_after: Generate sends so many tokens per sequence, then waits until this is raised; ``None``: no pause.
        refuse: Raised by every new Generate.
        hold_prefills: Every PrefillFirst waits until this is false.
        hold_resets: Every ResetPrefixCache waits until this is false.
        resetting: Number of ResetPrefixCache calls that are running.
        refuse_prefills: Raised by every PrefillFirst.
        unclaimed: What PrefillFirst was asked for, by the key that it answered with, until it is aborted.
        aborted: Request ids that Abort named.
        abort_all: Raised by every running Generate at its next token.
        break_after: The next GenerateMany ends with INTERNAL, as when its connection dies, after so many messages.
        silent_end: Generate ends without its last message.
        mute_events: Events are numbered but not sent, as if they had been lost.
        max_running: More Generate calls are refused with 429.
        model_path, max_model_len: Reported by GetInfo.
        load: Reported by StreamLoad.
        requests: Every Generate that was admitted.
        peak: Most that ran at a time.
        running, finished, cancelled: Their ids by what became of them.
        event_subscriptions: ``from_sequence`` of every StreamKvEvents call.
        silent_prefills: Prefill instances that do not answer the router, as it said last.
        event_position: Sequence of the batch that was sent (or lost) last; whoever has a batch sees its number here.
    """

    pause_after: int | None = None
    refuse: BatonError | None = None
    hold_prefills: bool = False
    hold_resets: bool = False
    resetting: int = 0
    refuse_prefills: BatonError | None = None
    unclaimed: dict[str, worker_pb2.PrefillFirstRequest] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    abort_all: BatonError | None = None
    break_after: int | None = None
    silent_end: bool = False
    mute_events: bool = False
    max_running: int = 1000
    model_path: str = ""
    max_model_len: int = 4096
    load: common_pb2.LoadReport = field(default_factory=common_pb2.LoadReport)
    requests: list[worker_pb2.GenerateRequest] = field(default_factory=list)
    peak: int = 0
    running: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    event_subscriptions: list[int] = field(default_factory=list)
    event_position: int = 0
    silent_prefills: frozenset[str] = frozenset()


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """One fake prefill or decode instance.

    Args:
        role: Which one.
        instance_id: Its name.
        fingerprint: What its KV claims to be.
        token: Shared token that callers must show.
        ticket_key: Key of the tickets that calls of Generate must show.
        caches: Whether the prompts of its requests appear in its cache and its events.
    """

    def __init__(
        self,
        role: Role,
        instance_id: str,
        *,
        fingerprint: Fingerprint = FINGERPRINT,
        token: Token | None = None,
        ticket_key: bytes | None = None,
        caches: bool = True,
    ) -> None:
        self.role, self.instance_id, self.fingerprint = role, instance_id, fingerprint
        self.state = FakeWorkerState()
        self.epoch = Epoch(secrets.token_bytes(16))
        self.port = 0
        self._token, self._ticket_key = token, ticket_key
        self._tickets: TicketedCalls | None = None
        self._caches = caches
        self._changed = asyncio.Event()
        self._log: list[events_pb2.KvEventBatch] = []
        self._first_kept = 1
        self._sequence = 0
        self.cached: dict[BlockHash, None] = {}
        self._server: GrpcServer | None = None

    def _hear_silent(self, addresses: frozenset[str]) -> None:
        self.state.silent_prefills = addresses
        self.changed()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> str:
        """Listen and return the address. It is none that a connection could take while this worker is away."""
        if self._ticket_key is not None:
            check = TicketCheck(self._ticket_key, Bearer(self.instance_id, self.epoch))
            self._tickets = TicketedCalls(check, f"/{SERVICE}/Generate", admits_others=self._token is None)
        self._server = GrpcServer(
            host="127.0.0.1",
            port=port or free_port(),
            services=[SERVICE],
            token=self._token,
            admits=self._tickets,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.server)
        self.port = await self._server.start()
        await self._server.set_serving(True)
        return self.address

    async def stop(self) -> None:
        """Stop at once; running calls break off."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def restart(self) -> None:
        """Come back on the same port as another process would: another epoch, an empty cache."""
        await self.stop()
        self.epoch = Epoch(secrets.token_bytes(16))
        self._log.clear()
        self._sequence, self._first_kept = 0, 1
        self.cached.clear()
        await self.start(self.port)

    def changed(self) -> None:
        """Wake everything that waits for a change of ``state``."""
        old, self._changed = self._changed, asyncio.Event()
        old.set()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Wait until something that this worker sees has come true.

        Raises:
            TimeoutError: It did not.
        """
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    def set_load(self, **fields: Any) -> None:
        """Change fields of the load report and send it."""
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(self.state.load, name)[:] = value
            else:
                setattr(self.state.load, name, value)
        self.changed()

    # --- cache ---

    def hashes(self, token_ids: Sequence[int], cache_salt: str = "") -> list[BlockHash]:
        """Return the block hashes of a prompt."""
        root = root_hash(self.fingerprint.content_key(), cache_salt)
        return block_hashes(token_ids, self.fingerprint.block_size, root)

    def store(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Put the full blocks of a prompt into the cache and tell of it."""
        new = [h for h in self.hashes(token_ids, cache_salt) if h not in self.cached]
        if new:
            self.cached.update(dict.fromkeys(new))
            self._emit(events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=new, tier="device")))

    def evict(self, hashes: Sequence[BlockHash]) -> None:
        """Drop blocks from the cache and tell of it."""
        for item in hashes:
            self.cached.pop(item, None)
        self._emit(events_pb2.KvEvent(removed=events_pb2.KvBlocksRemoved(block_hashes=hashes, tier="device")))

    def clear(self) -> None:
        """Drop the whole cache and tell of it."""
        self.cached.clear()
        self._emit(events_pb2.KvEvent(cleared=events_pb2.KvCleared()))

    def forget_history(self) -> None:
        """Empty the ring buffer: who asks for older batches gets a snapshot."""
        self._log.clear()
        self._first_kept = self._sequence + 1

    def _emit(self, event: events_pb2.KvEvent) -> None:
        self._sequence += 1
        self._log.append(events_pb2.KvEventBatch(epoch=self.epoch, sequence=self._sequence, events=[event]))
        self.changed()

    # --- the protocol ---

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        """Say who this is."""
        return worker_pb2.GetInfoResponse(
            instance_id=self.instance_id,
            role=role_to_pb(self.role),
            epoch=self.epoch,
            fingerprint=fingerprint_to_pb(self.fingerprint),
            num_blocks=1024,
            max_model_len=self.state.max_model_len,
            max_num_seqs=64,
            served_model_name="fake",
            eos_token_ids=[EOS],
            vocab_size=VOCAB_SIZE,
            model_path=self.state.model_path,
        )

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        """Say that there was nothing."""
        self.state.resetting += 1
        self.changed()
        try:
            while self.state.hold_resets:
                await self._changed.wait()
        finally:
            self.state.resetting -= 1
        return worker_pb2.ResetPrefixCacheResponse()

    async def StreamLoad(
        self, request: worker_pb2.StreamLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamLoadResponse]:
        """Send the load when it changes."""
        last: common_pb2.LoadReport | None = None
        with self._tickets.follow() if self._tickets else nullcontext(asyncio.Queue[CallEvent]()) as queue:
            while True:
                changed = self._changed
                events = [queue.get_nowait() for _ in range(queue.qsize())]
                if events or self.state.load != last:
                    last = common_pb2.LoadReport()
                    last.CopyFrom(self.state.load)
                    yield load_response(last, events)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02 if self._tickets else None):
                        await changed.wait()

    async def StreamKvEvents(
        self, request: worker_pb2.StreamKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamKvEventsResponse]:
        """Send batches in order, after a snapshot where one is due."""
        self.state.event_subscriptions.append(request.from_sequence)
        position = request.from_sequence
        if request.epoch != self.epoch or not self._first_kept <= position <= self._sequence + 1:
            snapshot = self._snapshot()
            position = snapshot.sequence + 1
            self.state.event_position = snapshot.sequence
            yield worker_pb2.StreamKvEventsResponse(batch=snapshot)
        while True:
            changed = self._changed
            for batch in self._log[max(0, position - self._first_kept) :]:
                position = batch.sequence + 1
                self.state.event_position = batch.sequence
                if not self.state.mute_events:
                    yield worker_pb2.StreamKvEventsResponse(batch=batch)
            await changed.wait()

    def _snapshot(self) -> events_pb2.KvEventBatch:
        stored = events_pb2.KvBlocksStored(block_hashes=list(self.cached), tier="device")
        return events_pb2.KvEventBatch(
            epoch=self.epoch, sequence=self._sequence, snapshot=True, events=[events_pb2.KvEvent(stored=stored)]
        )

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        """Drop what waits under the id; of others it only says whether they are there."""
        self.state.aborted.append(request.request_id)
        found = self.state.unclaimed.pop(request.request_id, None) is not None
        self.changed()
        return worker_pb2.AbortResponse(found=found or request.request_id in self.state.running)

    async def PrefillFirst(
        self, request: worker_pb2.PrefillFirstRequest, context: Any
    ) -> worker_pb2.PrefillFirstResponse:
        """Say that a prompt is computed and waits."""
        kept = worker_pb2.PrefillFirstRequest()
        kept.CopyFrom(request)
        self.state.running.add(request.request_id)
        self.changed()
        try:
            while self.state.hold_prefills:
                await self._changed.wait()
            if self.state.refuse_prefills is not None:
                raise self.state.refuse_prefills
            self.store(unpack_ids(request.prompt_token_ids).tolist(), request.cache_salt)
        finally:
            self.state.running.discard(request.request_id)
            self.changed()
        self.state.unclaimed[request.request_id] = kept
        return worker_pb2.PrefillFirstResponse(key=request.request_id, lease_ms=1000)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        """Take no new requests and say so in the load report."""
        self.set_load(draining=True)
        return worker_pb2.DrainResponse(num_unfinished=len(self.state.running))

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Generate for a client that comes without a router."""
        async with aclosing(self._run(request, context)) as responses:
            async for response in responses:
                yield response

    async def _run(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        """Generate one token per sequence and message."""
        kept = worker_pb2.GenerateRequest()
        kept.CopyFrom(request)
        self._admit(request)
        self.state.requests.append(kept)
        self.state.running.add(request.request_id)
        self.state.peak = max(self.state.peak, len(self.state.running))
        self.changed()
        ended = self.state.cancelled
        try:
            async for response in self._generate(request):
                yield response
            ended = self.state.finished
        finally:
            ended.append(request.request_id)
            self.state.running.discard(request.request_id)
            self.changed()

    async def GenerateMany(
        self, requests: AsyncIterator[worker_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        """Generate for many requests on one stream."""
        async with aclosing(generate_many(self._run, requests, context, self._hear_silent)) as messages:
            async for message in messages:
                yield message
                if self.state.break_after is not None:
                    self.state.break_after -= 1
                    if self.state.break_after < 0:
                        self.state.break_after = None
                        await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")

    def _admit(self, request: worker_pb2.GenerateRequest) -> None:
        if self.role is not Role.DECODE:
            raise InvalidRequestError("this is a prefill instance", field="role")
        if self.state.refuse is not None:
            raise self.state.refuse
        if self.state.load.draining:
            raise UnavailableError(f"{self.instance_id} is draining")
        if len(self.state.running) >= self.state.max_running:
            raise QueueFullError("too many requests", retry_after_s=2.0)
        if request.request_id in self.state.running:
            raise InvalidRequestError(f"request {request.request_id} is running", field="request_id")
        if request.output_token_ids and request.sampling.n > 1:
            raise InvalidRequestError("resumed output needs n = 1", field="output_token_ids")

    async def _generate(self, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.GenerateResponse]:
        prompt, sampling = unpack_ids(request.prompt_token_ids), request.sampling
        outputs = [list(request.output_token_ids) for _ in range(sampling.n or 1)]
        trace = self._trace(request)
        if self._caches:
            self.store([*prompt, *request.output_token_ids], request.cache_salt)
        first = True
        for position in range(len(outputs[0]), sampling.max_tokens):
            while (
                self.state.pause_after is not None and position >= self.state.pause_after and not self.state.abort_all
            ):
                await self._changed.wait()
            if self.state.abort_all is not None:
                raise self.state.abort_all
            await asyncio.sleep(0)  # a step of the engine: what others do comes between two tokens
            last = position + 1 == sampling.max_tokens
            if last and self.state.silent_end:
                return
            yield self._response(request, outputs, trace if first or last else None, last)
            first = False

    def _response(
        self,
        request: worker_pb2.GenerateRequest,
        outputs: list[list[int]],
        trace: common_pb2.RequestTrace | None,
        last: bool,
    ) -> worker_pb2.GenerateResponse:
        response = worker_pb2.GenerateResponse(trace=trace)
        for index, output in enumerate(outputs):
            token = next_token(
                unpack_ids(request.prompt_token_ids), output, sequence_seed(request.sampling.seed, index)
            )
            output.append(token)
            delta = response.deltas.add(index=index, token_ids=[token])
            delta.finish_reason = finish_to_pb(FinishReason.LENGTH if last else None)
            if request.sampling.HasField("logprobs"):
                delta.logprobs.add(token_id=token, logprob=-float(len(output)), rank=1)
        return response

    def _trace(self, request: worker_pb2.GenerateRequest) -> common_pb2.RequestTrace:
        tokens = [*unpack_ids(request.prompt_token_ids), *request.output_token_ids]
        hashes = self.hashes(tokens, request.cache_salt)
        held = next((i for i, h in enumerate(hashes) if h not in self.cached), len(hashes))
        cached = held * self.fingerprint.block_size
        remote = bool(request.prefill_candidates) or request.HasField("prefilled")
        missing = len(tokens) - cached
        return common_pb2.RequestTrace(
            path=common_pb2.PREFILL_PATH_REMOTE if remote else common_pb2.PREFILL_PATH_LOCAL,
            decode_instance=self.instance_id,
            prompt_tokens=len(request.prompt_token_ids) // 4,
            cached_tokens=cached,
            transferred_tokens=missing if remote else 0,
            recomputed_tokens=0 if remote else missing,
            kv_bytes=missing * 32 if remote else 0,
            pipe="tcp" if remote else "",
        )
