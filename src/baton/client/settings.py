"""What a client was connected with, and how long a call may take."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import grpc

from baton.errors import DeadlineError, InvalidRequestError
from baton.rpc.auth import HEADER
from baton.rpc.channel import Backoff
from baton.rpc.errors import from_rpc_error

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RETRIES = 2
CLOSED = "this client is closed"
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_LONGEST_TIMEOUT_S = 1e8
"""Three years: clocks of Python and gRPC cannot count much farther."""
RNG = random.Random()


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was connected with.

    Raises:
        InvalidRequestError: Names the field.
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
        """Goes with every call."""
        return () if self.token is None else ((HEADER, f"Bearer {self.token}"),)

    def budget(self, timeout: float | None) -> Budget:
        """Start the clock of a call that may take ``timeout`` seconds (``None``: the client's)."""
        if timeout is not None:
            check_timeout(timeout)
        return Budget(self.timeout if timeout is None else timeout, self.retries)


def check_timeout(timeout: float) -> None:
    """Raise ``InvalidRequestError`` unless a timeout (seconds) is positive and finite."""
    if not 0.0 < timeout < float("inf"):
        raise InvalidRequestError(f"timeout must be positive and finite, got {timeout}", field="timeout")


class Budget:
    """Time and tries that a call has left."""

    def __init__(self, timeout: float, retries: int) -> None:
        self._timeout = timeout
        self._ends_at = time.monotonic() + min(timeout, _LONGEST_TIMEOUT_S)
        self._retries = retries
        self._backoff = Backoff(_LONGEST_DELAY_S, RNG, _FIRST_DELAY_S)

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            DeadlineError: None.
        """
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no answer within {self._timeout:g} s")
        return left

    def after(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next try, or raise what the failure means.

        Only UNAVAILABLE is tried again; waits double, with jitter, and respect what the server asked for.

        Raises:
            BatonError: There will be no other try.
        """
        known = from_rpc_error(error)
        delay = max(known.retry_after_s or 0.0, self._backoff.next_s())
        last = error.code() is not grpc.StatusCode.UNAVAILABLE or self._retries <= 0
        if last or delay >= self._ends_at - time.monotonic():
            raise known from error
        self._retries -= 1
        return delay
