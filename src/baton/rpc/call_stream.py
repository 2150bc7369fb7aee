"""``GenerateMany`` without gRPC: its messages as frames; see ``baton.rpc.frames``.

What a router and a decode instance say to each other per request and per step is one small message. So instances offer
the same stream on a port beside the gRPC one (``GetInfoResponse.calls_port``): the client's frames are
``GenerateManyRequest``, the server's ``GenerateManyResponse``, with the meaning that they have on the gRPC stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.api.v1 import worker_pb2
from baton.rpc.frame_server import FrameServer, Outlet
from baton.rpc.multiplex import Outbox


class Handler(Protocol):
    """Serves the calls of one connection; ``baton.rpc.multiplex.Calls`` is one."""

    outbox: Outbox

    def take(self, message: worker_pb2.GenerateManyRequest) -> None:
        """Start and cancel calls."""

    def close(self) -> None:
        """Cancel what still runs: the connection is gone."""


class CallServer(FrameServer):
    """The port.

    Args:
        handler: Makes what serves a connection.
        epoch: Returns the instance's epoch; a client that looks for another one has come to the wrong place.
        token: Shared token that clients must show; ``None``: none.
    """

    def __init__(self, handler: Callable[[], Handler], epoch: Callable[[], bytes], token: str | None) -> None:
        super().__init__(lambda outlet: _Framed(handler(), outlet), epoch, token)


class _Framed:
    """What serves calls, with their messages as bytes."""

    def __init__(self, handler: Handler, outlet: Outlet) -> None:
        self._handler = handler
        self._take = handler.take
        self.close = handler.close
        handler.outbox.on_filled = outlet.filled
        handler.outbox.on_overfull.append(outlet.abort)

    def receive(self, payload: bytes) -> None:
        self._take(worker_pb2.GenerateManyRequest.FromString(payload))

    def gather(self) -> bytes:
        message = self._handler.outbox.take()
        return b"" if message is None else message.SerializeToString()
