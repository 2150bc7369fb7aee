"""The router's streams to decode instances: of gRPC, or of frames on a connection of their own.

One stream per instance carries the calls of all requests that run there (``baton_router.dispatch.calls``). When it
breaks, the next call opens another. What frames are, and why, says ``baton.rpc.frames``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, UnavailableError
from baton.rpc.errors import from_rpc_error
from baton.rpc.frame_client import FrameClient
from baton.rpc.frames import hello
from baton_router.dispatch.calls import Call, CallEnded, CallStream, Reader, closed
from baton_router.dispatch.turn_batching import Steps
from baton_router.registry.instance import Instance

log = logging.getLogger(__name__)

_METHOD = f"/{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}/GenerateMany"


class GrpcSession(CallStream):
    """The gRPC stream."""

    def __init__(self, instance: Instance, steps: Steps) -> None:
        super().__init__(instance.instance_id, steps)
        self._filled = asyncio.Event()
        open_stream: Any = instance.channel.stream_stream(
            _METHOD,
            request_serializer=None,  # bytes as they are
            response_deserializer=worker_pb2.GenerateManyResponse.FromString,
        )  # whose types know the streams of requests that are given as iterators alone
        self._stream = open_stream()
        self._reader = asyncio.create_task(self._run(), name=f"session {instance.address}")

    def close(self) -> None:
        """End the stream."""
        self._reader.cancel()

    def _wake(self) -> None:
        self._filled.set()

    async def _run(self) -> None:
        """Hand out what comes until the stream breaks, then fail what still runs."""
        writer = asyncio.create_task(self._write())
        failure = CallEnded(UnavailableError("the stream broke"), grpc.StatusCode.UNAVAILABLE)
        try:
            read = self._stream.read
            while (message := await read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._take((message,))
        except grpc.aio.AioRpcError as error:
            failure = self._failed(error)
        except asyncio.CancelledError:  # the channel was closed, or this task was cancelled
            failure = closed()
        finally:
            writer.cancel()
            self._stream.cancel()
            self._break(failure)

    def _failed(self, error: grpc.aio.AioRpcError) -> CallEnded:
        """Why the stream is gone. Errors of single calls come in their ends: this one is no request's fault."""
        if error.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}:
            # gRPC's core says so, now and then, where a connection breaks.
            return CallEnded(UnavailableError(f"the stream broke: {error.details()}"), grpc.StatusCode.UNAVAILABLE)
        return CallEnded(self._rebuilt(error), error.code())

    def _rebuilt(self, error: grpc.aio.AioRpcError) -> BatonError:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            # The caller can do nothing about the token between router and instance.
            return UnavailableError(f"{self.name} refuses this router's token")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return UnavailableError(f"{self.name} does not know GenerateMany: it is of another version")
        return from_rpc_error(error)

    async def _write(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while message := self._gather():
                try:
                    await self._stream.write(message)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the reader learns why


class FrameSession(CallStream, FrameClient):
    """The stream of frames (see ``baton.rpc.call_stream``).

    Attributes:
        on_lost: Called when the connection has ended.
    """

    def __init__(self, name: str, greeting: bytes, steps: Steps) -> None:
        CallStream.__init__(self, name, steps)
        FrameClient.__init__(self, name, greeting)
        self._why = CallEnded(UnavailableError("the stream broke"), grpc.StatusCode.UNAVAILABLE)
        self.on_lost: Callable[[], None] | None = None

    @classmethod
    async def open(cls, instance: Instance, token: str | None, steps: Steps) -> FrameSession:
        """Connect to an instance.

        Raises:
            OSError: It does not answer, not in time, or otherwise than with a welcome.
        """
        info = instance.info
        assert info is not None  # it has said where it listens
        session = cls(instance.instance_id, hello(info.epoch, token), steps)
        return await session.connect(instance.address.rpartition(":")[0], info.calls_port)

    def close(self) -> None:
        """End the stream."""
        self._why = closed()
        self.abort()

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Take what the instance says."""
        self._take(map(worker_pb2.GenerateManyResponse.FromString, payloads))

    def gather(self) -> bytes:
        """Return starts and cancellations."""
        return self._gather()

    def lost(self) -> None:
        """Fail what still runs."""
        if self.on_lost is not None:
            self.on_lost()
        self._break(self._why)

    def _wake(self) -> None:
        self.wake()


class Sessions:
    """The sessions of one router, opened when they are needed. Each ends with its instance's channel.

    Calls go over gRPC until a connection for frames stands, where the instance offers that: nobody waits for a port
    that cannot be reached.

    Args:
        token: Shared token that instances want to see.
        frames: Whether frames may be used where they are offered; they have no TLS.
        steps: Of this router's requests; ``None``: these sessions have their own.
    """

    def __init__(self, token: str | None = None, *, frames: bool = True, steps: Steps | None = None) -> None:
        self.steps = steps or Steps()
        self._sessions: WeakKeyDictionary[Instance, CallStream] = WeakKeyDictionary()
        self._dialling: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._token, self._use_frames = token, frames

    def start(self, instance: Instance, request: bytes, reader: Reader) -> Call:
        """Begin a call on an instance; see :meth:`CallStream.start`."""
        session = self._sessions.get(instance)
        if session is None or session.broken:
            session = self._sessions[instance] = GrpcSession(instance, self.steps)
            self.dial(instance)
        return session.start(request, reader)

    def over_frames(self, instance: Instance) -> bool:
        """Whether calls of an instance go over frames now."""
        session = self._sessions.get(instance)
        return isinstance(session, FrameSession) and not session.broken

    async def close(self) -> None:
        """Dial nobody any more."""
        tasks = list(self._dialling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def dial(self, instance: Instance) -> None:
        """Connect to an instance that offers frames, unless that is done or under way."""
        if self.over_frames(instance):
            return
        if not self._use_frames or instance.info is None or not instance.info.calls_port:
            return
        if instance.identity not in self._dialling:
            self._dialling[instance.identity] = asyncio.create_task(self._connect(instance))

    async def _connect(self, instance: Instance) -> None:
        key = instance.identity
        try:
            session = await FrameSession.open(instance, self._token, self.steps)
        except OSError as error:
            log.info("no frames with %s, gRPC goes on: %s", instance.instance_id, error or type(error).__name__)
            return
        finally:
            del self._dialling[key]
        if session.broken:
            return
        session.on_lost = instance.on_close(session.close)  # it may have left meanwhile
        before = self._sessions.get(instance)
        self._sessions[instance] = session
        if before is not None:
            before.retire()
