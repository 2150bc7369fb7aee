"""What a tenant may do, however idle the cluster is: requests at once, requests and tokens a minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import QueueFullError
from baton_router.types import Account

_MINUTE_S = 60.0
_BUSY_S = 1.0
"""After which a tenant with too many requests at once may try again: when one of them ends is not known."""


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float

    def fill(self, most: float, now: float) -> None:
        self.level = min(most, self.level + (now - self.at) * most / _MINUTE_S)
        self.at = now

    def wait_s(self, cost: float, most: float) -> float:
        """Seconds until so much can be taken; 0: now."""
        return max(0.0, min(cost, most) - self.level) * _MINUTE_S / most


@dataclass(slots=True)
class _Use:
    requests: _Bucket
    tokens: _Bucket
    running: int = 0


class TenantLimits:
    """What a tenant may do, however idle the cluster is: requests at once, requests and tokens a minute.

    Rates are token buckets that hold a minute's worth, so a tenant may spend it in a burst. A request that costs more
    than a whole minute is let in when the bucket is full, and leaves it in debt.

    Args:
        now: Monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._uses: dict[str, _Use] = {}

    def begin(self, account: Account, cost: float) -> None:
        """Take a request in; give it back with :meth:`end`.

        Args:
            account: Whose it is.
            cost: Tokens that it is expected to take.

        Raises:
            QueueFullError: That would be more than the tenant may do; says when it may try again.
        """
        use = self._check(account, cost)
        use.requests.level -= 1.0 if account.requests_per_minute else 0.0
        use.tokens.level -= cost if account.tokens_per_minute else 0.0
        use.running += 1

    def end(self, account: Account, *, unused: tuple[float, float] = (0.0, 0.0)) -> None:
        """A request of a tenant is over, or was not let in after all.

        Args:
            account: Whose it was.
            unused: Requests and tokens that it was charged and did not use; below 0: it used more.
        """
        use = self._uses[account.name]
        use.running -= 1
        use.requests.level += unused[0] if account.requests_per_minute else 0.0
        use.tokens.level += unused[1] if account.tokens_per_minute else 0.0

    def check(self, account: Account) -> None:
        """Look whether a tenant may do anything now, and count nothing.

        Raises:
            QueueFullError: It may not; says when it may try again.
        """
        self._check(account, 1.0)

    def _check(self, account: Account, cost: float) -> _Use:
        now = self._now()
        use = self._uses.get(account.name)
        if use is None:
            full = _Bucket(account.requests_per_minute, now), _Bucket(account.tokens_per_minute, now)
            use = self._uses[account.name] = _Use(*full)
        if account.max_in_flight and use.running >= account.max_in_flight:
            message = f"{use.running} requests of this tenant run or wait, as many as it may have at once"
            raise QueueFullError(message, retry_after_s=_BUSY_S)
        asked = (
            (use.requests, account.requests_per_minute, 1.0, "requests"),
            (use.tokens, account.tokens_per_minute, cost, "tokens"),
        )
        for bucket, most, amount, what in asked:
            if most:
                bucket.fill(most, now)
                wait_s = bucket.wait_s(amount, most)
                if wait_s > 0:
                    message = f"this tenant has used its {most} {what} a minute"
                    raise QueueFullError(message, retry_after_s=max(0.1, wait_s))
        return use


@dataclass(slots=True)
class Charge:
    """What work that is done before a placement, or without one, counts against its tenant's limits; may be changed."""

    tokens: float
    requests: float = 1.0

    def drop(self) -> None:
        """Count nothing: what the work was for is counted by itself."""
        self.tokens = self.requests = 0.0
