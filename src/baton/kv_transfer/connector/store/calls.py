"""Calls of one store: as frames where it offers them (``GetStoreInfoResponse.calls_port``), else over gRPC.

The first calls go over gRPC until a connection of frames stands: nobody waits for a port that cannot be reached. When
that connection breaks, its calls fail, and the next ones go over gRPC again until there is another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc
import grpc.aio

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.errors import BatonError, TransferError
from baton.kv_transfer.protocol.source_pb import EPOCH_BYTES
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.frames import hello
from baton.rpc.tls import Tls
from baton.rpc.unary import UnaryClient

log = logging.getLogger(__name__)

_ASK_S = 5.0
"""How long a store may take to say where it offers frames."""
_AGAIN_S = 10.0
"""Between two attempts to connect."""


class StoreCalls:
    """Speaks to one store; used in one event loop. The connection is made with the first call.

    Args:
        address: ``host:port`` of the store.
        token: Shared token, if the services use one.
        tls: Certificates, if they use some; then everything goes over gRPC.
    """

    def __init__(self, address: str, *, token: str | None, tls: Tls | None) -> None:
        self._address, self._token, self._tls = address, token, tls
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._frames: UnaryClient | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._next_dial = 0.0
        self._posts: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def over_frames(self) -> bool:
        """Whether calls go over frames now."""
        return self._frames is not None and not self._frames.broken

    def begin(self, method: str, request: Any, timeout_s: float, *, posts_first: bool = False) -> asyncio.Future[Any]:
        """Begin a call; whoever cancels the future cancels the call.

        Args:
            method: Its name.
            request: Its message.
            timeout_s: Seconds until both sides give up.
            posts_first: It needs what was posted before it.

        Returns:
            The response, or a BatonError: what the store raised, or that it was not reached in time.
        """
        frames = self._frames
        if frames is None or frames.broken:
            self._dial()
            return asyncio.get_running_loop().create_task(self._over_grpc(method, request, timeout_s))
        parse = _RESPONSES[method].FromString
        return frames.call(method, request.SerializeToString(), timeout_s, parse, posts_first=posts_first)

    def post(self, method: str, request: Any, timeout_s: float) -> None:
        """Make a call that nobody waits for. Over frames it goes out with the next one, or a few milliseconds later."""
        if self._closed:
            return
        frames = self._frames
        if frames is not None and not frames.broken:
            frames.post(method, request.SerializeToString())
            return
        call = self.begin(method, request, timeout_s)
        self._posts.add(call)
        call.add_done_callback(self._posted)

    async def close(self) -> None:
        """Hang up; what runs fails, and what comes later, too."""
        self._closed = True
        tasks = [*self._posts, *([self._dialling] if self._dialling is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._frames is not None:
            self._frames.close()
            self._frames = None
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    async def _over_grpc(self, method: str, request: Any, timeout_s: float) -> Any:
        if self._closed:
            raise TransferError(f"the connection to the store {self._address} was closed")
        if self._channel is None:
            self._channel = open_channel(self._address, token=self._token, tls=self._tls)
            self._stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except grpc.aio.UsageError as error:  # the channel was closed under us
            raise TransferError(f"the connection to the store was closed: {error}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self._closed:
                raise
            # Closing the channel cancels its calls; whoever waits for this one goes on elsewhere.
            raise TransferError(f"the connection to the store {self._address} was closed") from None

    def _posted(self, call: asyncio.Future[Any]) -> None:
        self._posts.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.info("the store %s was not told: %s", self._address, error)

    def _dial(self) -> None:
        """Look for frames, unless that is under way or was in vain a moment ago."""
        now = time.monotonic()
        if self._tls is None and self._dialling is None and now >= self._next_dial and not self._closed:
            self._next_dial = now + _AGAIN_S
            self._dialling = asyncio.create_task(self._connect(), name=f"frames with the store {self._address}")

    async def _connect(self) -> None:
        try:
            info = await self._over_grpc("GetStoreInfo", kvstore_pb2.GetStoreInfoRequest(), _ASK_S)
            if not 0 < info.calls_port < 2**16 or len(info.epoch) != EPOCH_BYTES:
                log.info("the store %s offers no frames: its calls go over gRPC", self._address)
                return
            frames = UnaryClient(f"the store {self._address}", hello(info.epoch, self._token))
            self._frames = await frames.connect(self._address.rpartition(":")[0], info.calls_port)
            self._next_dial = 0.0
            log.info("calls of the store %s go over frames, port %d", self._address, info.calls_port)
        except (BatonError, OSError) as error:
            log.info("no frames with the store %s, gRPC goes on: %s", self._address, error or type(error).__name__)
        finally:
            self._dialling = None


_RESPONSES = {
    method.name: getattr(kvstore_pb2, method.output_type.name)
    for method in kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"].methods
}
