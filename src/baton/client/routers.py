"""The routers of a client: one is used until it is out of reach, then the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from baton.api.v1 import router_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls


class Routers:
    """Channels to routers, opened on first use, in the event loop of the first call.

    Args:
        addresses: ``host:port`` of each router, in order of preference; at least one.
        token: The services' shared token, if the client has it.
        tls: Certificates, if the services use TLS.
    """

    def __init__(self, addresses: tuple[str, ...], token: Token | None, tls: Tls | None) -> None:
        self._addresses = addresses
        self._token = token
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Any] = {}
        self._at = 0

    @property
    def current(self) -> str:
        """Address of the router in use."""
        return self._addresses[self._at]

    @property
    def several(self) -> bool:
        """Whether there is another router to continue with."""
        return len(self._addresses) > 1

    def stub(self) -> Any:
        """Return the stub of the router in use."""
        if self.current not in self._channels:
            channel = open_channel(self.current, token=self._token, tls=self._tls)
            self._channels[self.current] = channel
            self._stubs[self.current] = router_pb2_grpc.RouterServiceStub(channel)
        return self._stubs[self.current]

    def report_failure(self, address: str) -> None:
        """Use the next router from now on, unless another call has switched already."""
        if address == self.current:
            self._at = (self._at + 1) % len(self._addresses)

    async def close(self) -> None:
        channels = self._channels
        self._channels = {}
        self._stubs.clear()
        for channel in channels.values():
            await channel.close(None)


class Opening:
    """Opens a call, and opens it again on another router.

    Args:
        routers: Routers of the client.
        open_call: Opens the call; gets a function that returns the current router's stub, the request, and the
            deadline in seconds.
        request: Request of the call.
    """

    def __init__(
        self, routers: Routers, open_call: Callable[[Callable[[], Any], Any, float], Any], request: Any
    ) -> None:
        self.request = request
        self._routers = routers
        self._open_call = open_call
        self._address = ""

    @property
    def resumes(self) -> bool:
        """Whether an answer that has begun can continue on another router."""
        return self._routers.several

    def open(self, timeout: float, request: Any = None) -> Any:
        """Open the call on the router in use.

        Args:
            timeout: Deadline in seconds.
            request: Request in place of the original one.
        """
        self._address = self._routers.current
        return self._open_call(self._routers.stub, self.request if request is None else request, timeout)

    def report_failure(self) -> None:
        """Report that the router did not answer, or stopped answering."""
        self._routers.report_failure(self._address)
