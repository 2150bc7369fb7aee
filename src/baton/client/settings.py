"""Settings of a client, its routers, of which one is used until it is out of reach, and what a call has left."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from baton.api.v1 import router_pb2_grpc
from baton.errors import DeadlineError, InvalidRequestError
from baton.rpc.auth import HEADER
from baton.rpc.channel import Backoff, open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RETRIES = 2
CLOSED = "this client is closed"
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_MAX_TIMEOUT_S = 1e8
"""Three years: near the limit of Python's and gRPC's clocks."""
RNG = random.Random()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a client.

    Attributes:
        addresses: ``host:port`` of each router; at least one.
        token: API key; ``None``: no key is sent.
        timeout: Deadline of calls without one of their own, in seconds. Positive and finite.
        retries: Retries of a call that failed with UNAVAILABLE, at least 0.

    Raises:
        InvalidRequestError: A value is invalid; names the field.
    """

    addresses: tuple[str, ...]
    token: str | None
    timeout: float
    retries: int

    def __post_init__(self) -> None:
        if not self.addresses:
            raise InvalidRequestError("address must name a router", field="address")
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise InvalidRequestError(f"address must be host:port, got {address!r}", field="address")
        check_timeout(self.timeout)
        if self.retries < 0:
            raise InvalidRequestError(f"retries must be at least 0, got {self.retries}", field="retries")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """GRPC metadata of all calls."""
        return () if self.token is None else ((HEADER, f"Bearer {self.token}"),)

    def budget(self, timeout: float | None) -> Budget:
        """Return the budget of a call that starts now; ``timeout`` in seconds, ``None``: the client's."""
        if timeout is not None:
            check_timeout(timeout)
        return Budget(self.timeout if timeout is None else timeout, self.retries)


def check_timeout(timeout: float) -> None:
    """Raise ``InvalidRequestError`` unless a timeout (seconds) is positive and finite."""
    if not 0.0 < timeout < float("inf"):
        raise InvalidRequestError(f"timeout must be positive and finite, got {timeout}", field="timeout")


class Budget:
    """Time and retries that a call has left.

    Args:
        timeout: Deadline in seconds from now.
        retries: Number of retries.
    """

    def __init__(self, timeout: float, retries: int) -> None:
        self._timeout = timeout
        self._ends_at = time.monotonic() + min(timeout, _MAX_TIMEOUT_S)
        self._retries = retries
        self._backoff = Backoff(_LONGEST_DELAY_S, RNG, _FIRST_DELAY_S)

    def remaining(self) -> float:
        """Return the remaining time, in seconds.

        Raises:
            DeadlineError: No time is left.
        """
        remaining_s = self._ends_at - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineError(f"no answer within {self._timeout:g} s")
        return remaining_s

    def delay_after(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next try.

        Only UNAVAILABLE is retried. Delays double, with jitter, and are at least what the server asked for.

        Raises:
            BatonError: The call must not be retried.
        """
        failure = from_rpc_error(error)
        delay = max(failure.retry_after_s or 0.0, self._backoff.next_s())
        is_final = error.code() is not grpc.StatusCode.UNAVAILABLE or self._retries <= 0
        if is_final or delay >= self._ends_at - time.monotonic():
            raise failure from error
        self._retries -= 1
        return delay


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
        open_call: Opens the call on the router in use; gets the request, and the deadline in seconds.
        request: Request of the call.
    """

    def __init__(self, routers: Routers, open_call: Callable[[Any, float], Any], request: Any) -> None:
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
        return self._open_call(self.request if request is None else request, timeout)

    def report_failure(self) -> None:
        """Report that the router did not answer, or stopped answering."""
        self._routers.report_failure(self._address)
