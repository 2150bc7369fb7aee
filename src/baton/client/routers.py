"""The routers of a client: one is asked until it is out of reach, then the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from baton.api.v1 import router_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls


class Routers:
    """Channels to routers, opened when they are needed, in the event loop of the first call.

    Args:
        addresses: ``host:port`` of each, in order of preference.
        token: The services' token, if it is shown.
        tls: Certificates, if the services use some.
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
        """The router that is asked."""
        return self._addresses[self._at]

    @property
    def several(self) -> bool:
        """Whether there is another one to go on with."""
        return len(self._addresses) > 1

    def stub(self) -> Any:
        """Return the current router's stub."""
        if self.current not in self._channels:
            channel = open_channel(self.current, token=self._token, tls=self._tls)
            self._channels[self.current] = channel
            self._stubs[self.current] = router_pb2_grpc.RouterServiceStub(channel)
        return self._stubs[self.current]

    def failed(self, address: str) -> None:
        """Ask the next one from now on, unless another call has moved on already."""
        if address == self.current:
            self._at = (self._at + 1) % len(self._addresses)

    async def close(self) -> None:
        """End all connections."""
        channels = self._channels
        self._channels = {}
        self._stubs.clear()
        for channel in channels.values():
            await channel.close(None)


class Opening:
    """Makes a call, and makes it again on another router.

    Args:
        routers: The client's.
        open_call: Gets what returns the current router's stub, what to ask and the seconds it may take; returns the
            call.
        request: What is asked.
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
        """Whether there is another router on which an answer that has begun can go on."""
        return self._routers.several

    def open(self, timeout: float, request: Any = None) -> Any:
        """Make the call on the current router.

        Args:
            timeout: Seconds.
            request: What to ask instead.
        """
        self._address = self._routers.current
        return self._open_call(self._routers.stub, self.request if request is None else request, timeout)

    def failed(self) -> None:
        """Note that the router did not answer, or ceased to."""
        self._routers.failed(self._address)
