"""Settings of a client, and the time and retries that a call has left."""

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
