"""Admission: a request starts at once while there is room, else it waits in the router's own queue.

Workers' queues are first come, first served and cannot be reordered. So they get little more than they can run
(``room``), and the rest waits here: by priority, then in turns of its tenants, then by deadline. A request that would
start too late is refused at once, with the time after which it has a chance. Tenants may have limits of their own.

Before an empty queue a request without latency targets costs a check of two counters. Nothing is placed here: that
follows in the same step of the event loop, and until then its room is reserved.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import msgspec
from prometheus_client import CollectorRegistry

from baton.config.router import RouterConfig
from baton.errors import BatonError, OverloadedError, QueueFullError, SloError, UnavailableError
from baton.types import BACKGROUND_PRIORITY
from baton_router.admission.estimates import DrainRate, Estimates, Outlook, Room
from baton_router.admission.queue import AdmissionMetrics, FairQueue, Waiting
from baton_router.metrics import Amount
from baton_router.types import Account, RoutedRequest

_TICK_S = 0.01
"""Seconds between checks for room that is not announced: reports of instances, instances that come back."""
_AGEING_SHARE = 0.5
"""Share of a request's longest wait after which it counts in the highest class."""
_MAX_RETRY_S = 300.0
_NEVER_RETRY_S = 60.0
"""Seconds after which slow speeds are forgotten, so that a request may succeed that no instance could serve in time."""


class Ticket(msgspec.Struct, eq=False):
    """A request's permission to run; returned with ``Admission.release``.

    Attributes:
        cost: Expected work of the request, in tokens.
        sequences: Number of its sequences.
        tokens: Prompt tokens still to be computed; 0 after the first token.
        started: Time of its admission, in seconds.
        waited_s: Seconds that it waited for admission.
        account: Account whose limits it counts against; ``None``: none.
        expected: Output tokens that its account was charged.
        has_room: Whether its room is still taken.
    """

    cost: float
    sequences: int
    tokens: int
    started: float
    waited_s: float = 0.0
    account: Account | None = None
    expected: float = 0.0
    has_room: bool = True


class Admission:
    """Admits requests; used in one event loop.

    Args:
        room: Room for requests that start now.
        estimates: Predictions for requests.
        config: Bounds of the queue.
        registry: Registry of the metrics.
        now: Monotonic clock, in seconds.

    Attributes:
        queue: Requests that wait.
        metrics: Metrics of the queue.
        on_wait: Called when a request that is no background request has to wait.
    """

    def __init__(
        self,
        room: Room,
        estimates: Estimates,
        config: RouterConfig,
        registry: CollectorRegistry,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._estimates = estimates
        self._config = config
        self._now = now
        ageing_s = config.queue_timeout_s * _AGEING_SHARE
        share = config.queue_tenant_share
        self.queue = FairQueue(config.queue_requests, config.queue_tokens, share, ageing_s=ageing_s)
        self._drain = DrainRate()
        self.metrics = AdmissionMetrics(registry, self.queue, self.rate)
        self._tenants = TenantLimits(now, self.metrics.refusals.labels("tenant_limit"))
        self._numbers = count()
        self._in_flight = 0.0
        self._num_in_flight = 0
        self._ticker: asyncio.TimerHandle | None = None
        self._closed = False
        self._none_since: float | None = None
        self.on_wait: Callable[[], None] = lambda: None

    def idle_sequences(self, background: int) -> int:
        """Return how many background sequences may start; see :meth:`Room.idle_sequences`."""
        return 0 if len(self.queue) else self._room.idle_sequences(background)

    def free_sequences(self) -> float:
        """Return how many sequences could start now."""
        return self._room.free_sequences()

    def foreground_waits(self) -> bool:
        """Whether a request that is no background request waits."""
        return len(self.queue) > 0 and self.queue.first_priority < BACKGROUND_PRIORITY

    def has_spare(self, account: Account) -> bool:
        """Whether at least half of each of a tenant's limits is unused."""
        return self._tenants.has_spare(account)

    def rate(self) -> float:
        """Return the tokens per second that leave the queue, or would if it were not empty; 0: unknown."""
        return self._drain.rate(self._in_flight, self._now())

    def count_refusal(self, error: BatonError, reason: str) -> BatonError:
        """Count a request that is refused, here or where it is placed; returns its error."""
        self.metrics.refusals.labels(reason).inc()
        return error

    async def enter(self, request: RoutedRequest) -> Ticket:
        """Wait until a request may be placed; cancel the wait to remove it from the queue.

        Raises:
            QueueFullError: The queue, or the tenant's part of it, is full, or the tenant has used what it may.
            OverloadedError: It would wait too long, or did.
            SloError: It cannot have what it wants; names ``ttft_ms`` or ``itl_ms``.
            UnavailableError: No decode instance is ready, or the router ends.
        """
        account = request.account
        if account is None or not account.limited:
            return await self._enter(request)
        most = request.sampling.max_tokens
        left = most if most is None else most - len(request.output_token_ids)
        expected = self._tenants.output_tokens(account, request.sampling.n, left, request.expected_tokens or 0)
        self._tenants.begin(account, request.num_given + expected)
        try:
            ticket = await self._enter(request)
        except BaseException:
            self._tenants.end(account)
            raise
        ticket.account = account
        ticket.expected = expected
        return ticket

    def check(self, account: Account | None) -> None:
        """Refuse a tenant that has reached its limits, before any work for it.

        Raises:
            QueueFullError: Says when it may try again.
        """
        if account is not None and account.limited:
            self._tenants.check(account)

    @contextmanager
    def charge(self, account: Account | None, tokens: float) -> Iterator[Charge]:
        """Count work against its tenant's limits, as one request, while it is done and after it.

        Args:
            account: Account of the tenant; ``None``: there are no limits.
            tokens: Approximate number of tokens; set :attr:`Charge.tokens` when the number is known.

        Raises:
            QueueFullError: It is more than the tenant may do; says when it may try again.
        """
        charge = Charge(tokens)
        if account is None or not account.limited:
            yield charge
            return
        self._tenants.begin(account, tokens)
        try:
            yield charge
        except UnavailableError:  # it was not done, and not for a fault of the tenant's
            charge.drop()
            charge.work = 0.0
            raise
        finally:
            self._tenants.end(account, unused=(1.0 - charge.requests, tokens - charge.tokens - charge.work))

    def enter_now(self, request: RoutedRequest) -> Ticket | None:
        """Admit a request without latency targets or limits that need not wait; ``None``: :meth:`enter` decides."""
        return None if request.account is not None and request.account.limited else self._enter_at_once(request)

    async def _enter(self, request: RoutedRequest) -> Ticket:
        return self._enter_at_once(request) or await self._enter_slowly(request)

    def _enter_at_once(self, request: RoutedRequest) -> Ticket | None:
        if not len(self.queue) and request.ttft_ms is None and request.itl_ms is None:
            tokens = request.num_given
            if self._room.acquire(request.sampling.n, tokens) or not self._room.num_decodes:
                self.metrics.at_once.inc()
                return self._admit(request, tokens + self._estimates.output_tokens(request))
        return None

    def first_token(self, ticket: Ticket) -> None:
        """Release the room of a request's prompt: it has its first token."""
        self._room.release(0, ticket.tokens)
        ticket.tokens = 0
        if len(self.queue):
            self._pump()

    def release(self, ticket: Ticket, generated: int) -> None:
        """End a request.

        Args:
            ticket: Ticket that its admission returned.
            generated: Tokens that it generated: its account is charged these, whatever was expected.
        """
        if ticket.account is not None:
            self._tenants.end(ticket.account, unused=(0.0, ticket.expected - generated))
            if generated:
                self._tenants.learn_output(ticket.account, generated / ticket.sequences)
        self.release_room(ticket)

    def release_room(self, ticket: Ticket) -> None:
        """Return a request's room, once; its tenant's place among those in flight stays taken until :meth:`release`."""
        if not ticket.has_room:
            return
        ticket.has_room = False
        self._num_in_flight -= 1
        # Estimates are fractions: rounding errors of their sums must not look like work.
        self._in_flight = self._in_flight - ticket.cost if self._num_in_flight else 0.0
        self._room.release(ticket.sequences, ticket.tokens)
        ticket.tokens = 0
        self._drain.add_served(ticket.cost, self._now() - ticket.started)
        if len(self.queue):
            self._pump()

    def retry_after_s(self, cost: float | None = None) -> float:
        """Return the seconds in which ``cost`` leaves; default: half of all work, so that retries are spread."""
        rate = self.rate()
        if rate <= 0:
            return 1.0
        amount = (self.queue.cost + self._in_flight) / 2 if cost is None else cost
        return min(_MAX_RETRY_S, max(0.1, amount / rate))

    def close(self) -> None:
        """Refuse all waiting and further requests: the router ends."""
        self._closed = True
        for item in list(self.queue):
            self._refuse(item, shutting_down(), "shutdown")

    # --- admitting ---

    def _admit(self, request: RoutedRequest, cost: float, waited_s: float = 0.0) -> Ticket:
        self._in_flight += cost
        self._num_in_flight += 1
        return Ticket(cost, request.sampling.n, request.num_given, self._now(), waited_s)

    async def _enter_slowly(self, request: RoutedRequest) -> Ticket:
        """Admit a request that has latency targets or has to wait."""
        if self._closed:
            raise self.count_refusal(shutting_down(), "shutdown")
        waits = len(self.queue) > 0 or not self._room.is_free()
        if waits:
            self._check_bounds(request)
        outlook = self._estimates.look(request)
        self._check_itl(request)
        item = self._waiting(request, outlook)
        self._check_start(item, outlook, waits=waits)
        if not waits:
            self._room.acquire(request.sampling.n, item.tokens)
            self.metrics.at_once.inc()
            return self._admit(request, item.cost)
        return await self._wait(item)

    def _waiting(self, request: RoutedRequest, outlook: Outlook) -> Waiting:
        now = self._now()
        arrived = now - max(0.0, time.perf_counter() - request.arrived) if request.arrived else now
        deadline = math.inf
        start_by = arrived + self._config.queue_timeout_s
        if request.ttft_ms is not None:
            deadline = arrived + request.ttft_ms / 1000
            start_by = min(start_by, deadline - (outlook.ttft_ms or 0.0) / 1000)
        return Waiting(
            request,
            next(self._numbers),
            arrived,
            deadline,
            start_by,
            outlook.missing + self._estimates.output_tokens(request),
            asyncio.get_running_loop().create_future(),
        )

    async def _wait(self, item: Waiting) -> Ticket:
        self.queue.add(item)
        self._drain.start(self._now())
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        sequences = item.request.sampling.n
        tokens = item.tokens
        try:
            self._pump()
            if item.queued and self.foreground_waits():
                self.on_wait()
            refusal = await item.future
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self.metrics.cancelled.inc()
            if item.granted:
                self._room.unreserve(sequences, tokens)
                self._room.release(sequences, tokens)
                self._pump()
            elif item.queued:
                self.queue.remove(item)
                self._check_empty()
            raise
        if refusal is not None:
            raise refusal
        self._room.unreserve(sequences, tokens)
        waited = self._now() - item.arrived
        self.metrics.started(item, waited)
        return self._admit(item.request, item.cost, waited)

    # --- refusing ---

    def _check_bounds(self, request: RoutedRequest) -> None:
        """Refuse a request for which the queue has no room, unless another has less right to it."""
        queue = self.queue
        tenant = request.tenant
        tokens = request.num_given
        if queue.over_share(tenant, tokens):
            held = queue.tenants()[tenant]
            rate = self.rate()
            share = rate / max(1, len(queue.tenants()))
            wait = min(_MAX_RETRY_S, max(0.1, queue.tenant_cost(tenant) / 2 / share)) if share > 0 else 1.0
            message = f"{held.requests} requests of this tenant wait already, its share of the queue"
            raise self.count_refusal(QueueFullError(message, retry_after_s=wait), "tenant_share")
        if not queue.full(tokens):
            return
        victim = queue.victim(tenant, request.priority)
        if victim is None or queue.full(tokens, without=victim):
            message = f"{len(queue)} requests wait already"
            raise self.count_refusal(QueueFullError(message, retry_after_s=self.retry_after_s()), "queue_full")
        message = "the queue is full, and others have more right to a place in it"
        self._refuse(victim, QueueFullError(message, retry_after_s=self.retry_after_s()), "pushed_out")

    def _check_itl(self, request: RoutedRequest) -> None:
        fastest = self._estimates.all_slow(request) if request.itl_ms is not None else None
        if fastest is not None:
            raise self.count_refusal(self._itl_error(request, fastest), "itl")

    def _itl_error(self, request: RoutedRequest, fastest: tuple[str, float]) -> SloError:
        name, ms = fastest
        return SloError(
            f"itl_ms of {request.itl_ms:g} cannot be had: the fastest decode instance, {name}, measures {ms:.1f} ms "
            "between tokens at its present load",
            field="itl_ms",
            retry_after_s=self.retry_after_s() if self._in_flight else _NEVER_RETRY_S,
        )

    def _check_start(self, item: Waiting, outlook: Outlook, *, waits: bool) -> None:
        """Refuse a request that would start too late."""
        now = self._now()
        rate = self.rate()
        ahead = 0.0
        if waits and rate > 0:
            ahead = self.queue.cost_ahead(item)
        late = now + (ahead / rate if ahead else 0.0) - item.start_by
        if late <= 0:
            return
        if item.request.ttft_ms is None:
            message = f"about {ahead / rate:.0f} s of work wait ahead: this cluster is overloaded"
            raise self.count_refusal(OverloadedError(message, retry_after_s=min(_MAX_RETRY_S, late)), "overloaded")
        never = outlook.ttft_ms is not None and outlook.alone_ms > item.request.ttft_ms
        message = f"ttft_ms of {item.request.ttft_ms:g} cannot be had: the first token would come after about "
        message += f"{item.request.ttft_ms + 1000 * late:.0f} ms"
        if never:
            message += " even if nothing else ran"
        else:
            message += f", with {ahead:.0f} tokens of work ahead in the queue" if ahead else " at the present load"
        after = _NEVER_RETRY_S if never else min(_MAX_RETRY_S, max(0.1, late))
        raise self.count_refusal(SloError(message, field="ttft_ms", retry_after_s=after), "ttft")

    def _refuse(self, item: Waiting, error: BatonError, reason: str) -> None:
        """End a wait with an error."""
        self.queue.remove(item)
        self._end(item, error, reason)
        self._check_empty()

    def _end(self, item: Waiting, error: BatonError, reason: str) -> None:
        if not item.future.done():  # else its client has just gone
            item.future.set_result(self.count_refusal(error, reason))

    # --- the next ones ---

    def _tick(self) -> None:
        self._ticker = None
        if len(self.queue):
            self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
            self._pump()

    def _pump(self) -> None:
        """Refuse requests that are late, and let the next ones in while there is room."""
        now = self._now()
        room = self._room
        for item in self.queue.pop_late(now):
            self._end(item, self._too_late(item, now), "expired")
        self.queue.age(now)
        while len(self.queue) and room.is_free():
            item = self.queue.pop()
            if item.future.done():  # its client has just gone, and it will not be placed
                continue
            if item.request.itl_ms is not None and (fastest := self._estimates.all_slow(item.request)) is not None:
                self._end(item, self._itl_error(item.request, fastest), "itl")
                continue
            room.reserve(item.request.sampling.n, item.tokens)
            self._drain.add_left(item.cost, now)
            item.granted = True
            item.future.set_result(None)
        if len(self.queue) and not room.num_decodes:
            self._no_instance(now)
        else:
            self._none_since = None
        self._check_empty()

    def _no_instance(self, now: float) -> None:
        """Handle that no decode instance is ready: requests go on waiting for a while."""
        if self._none_since is None:
            self._none_since = now
        elif now - self._none_since >= self._config.no_instance_wait_s:
            for item in list(self.queue):
                self._refuse(item, UnavailableError("no decode instance is ready", retry_after_s=1.0), "no_instance")

    def _too_late(self, item: Waiting, now: float) -> OverloadedError:
        waited = now - item.arrived
        after = self.retry_after_s()
        if item.request.ttft_ms is None:
            return OverloadedError(f"it waited {waited:.1f} s and there was no room", retry_after_s=after)
        message = f"ttft_ms of {item.request.ttft_ms:g} cannot be had any more: it waited {1000 * waited:.0f} ms"
        return SloError(message, field="ttft_ms", retry_after_s=after)

    def _check_empty(self) -> None:
        if not len(self.queue):
            self._drain.stop(self._now())
            if self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None


def shutting_down() -> UnavailableError:
    """Return the error for requests that the router does not serve because it ends."""
    return UnavailableError("this router is shutting down: send the request again", retry_after_s=1.0)


_MINUTE_S = 60.0
_LEAST_OUTPUT = 256.0
"""Output tokens of a sequence that are charged in advance at least, or its ``max_tokens``: a tenant that has had short
answers cannot start any number of long ones."""
_NEWEST = 0.1
"""Weight of a tenant's newest request in the mean of its outputs."""
_BUSY_S = 1.0
"""Seconds after which a tenant with too many requests at once may try again: it is unknown when one of them ends."""


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float

    def fill(self, most: float, now: float) -> None:
        self.level = min(most, self.level + (now - self.at) * most / _MINUTE_S)
        self.at = now

    def wait_s(self, cost: float, most: float) -> float:
        """Return the seconds until ``cost`` is available; 0: it is now."""
        return max(0.0, min(cost, most) - self.level) * _MINUTE_S / most


@dataclass(slots=True)
class _Use:
    requests: _Bucket
    tokens: _Bucket
    running: int = 0
    output: float = 0.0
    """Mean output tokens of the tenant's own sequences."""


class TenantLimits:
    """Limits of tenants, however idle the cluster is: requests at once, requests and tokens per minute.

    Rates are token buckets with the budget of a minute, which a tenant may spend in a burst. A request that costs more
    than that is admitted when the bucket is full, and leaves it negative. Nothing that other tenants do counts here.

    Args:
        now: Monotonic clock, in seconds.
        refused: Number of refused requests.
    """

    def __init__(self, now: Callable[[], float], refused: Amount) -> None:
        self._now = now
        self._refused = refused
        self._uses: dict[str, _Use] = {}

    def begin(self, account: Account, cost: float) -> None:
        """Count a request of a tenant, until :meth:`end`.

        Args:
            account: Account of the tenant.
            cost: Expected work of the request, in tokens.

        Raises:
            QueueFullError: The tenant would exceed its limits; says when it may try again.
        """
        use = self.check(account, cost)
        use.requests.level -= 1.0 if account.requests_per_minute else 0.0
        use.tokens.level -= cost if account.tokens_per_minute else 0.0
        use.running += 1

    def output_tokens(self, account: Account, num_sequences: int, max_tokens: int | None, announced: int = 0) -> float:
        """Return the output tokens that a request is charged until it ends.

        Args:
            account: Account of the tenant.
            num_sequences: Sequences of the request.
            max_tokens: Most output tokens of a sequence; ``None``: as many as fit.
            announced: Output tokens of a sequence that the client expects; they count as load until then, too.
        """
        use = self._uses.get(account.name)
        expected = max(_LEAST_OUTPUT, use.output if use is not None else 0.0, announced)
        return num_sequences * (expected if max_tokens is None else min(max_tokens, expected))

    def learn_output(self, account: Account, tokens: float) -> None:
        """Learn from the output tokens of a sequence that has ended."""
        use = self._uses[account.name]
        use.output += _NEWEST * (tokens - use.output)

    def end(self, account: Account, *, unused: tuple[float, float] = (0.0, 0.0)) -> None:
        """End a request of a tenant, or one that was not admitted after all.

        Args:
            account: Account of the tenant.
            unused: Requests and tokens that it was charged and did not use; below 0: it used more.
        """
        use = self._uses[account.name]
        use.running -= 1
        use.requests.level += unused[0] if account.requests_per_minute else 0.0
        use.tokens.level += unused[1] if account.tokens_per_minute else 0.0

    def check(self, account: Account, cost: float = 1.0) -> _Use:
        """Check whether a tenant may send a request now; counts nothing.

        Args:
            account: Account of the tenant.
            cost: Expected work of the request, in tokens.

        Raises:
            QueueFullError: It may not; says when it may try again.
        """
        now = self._now()
        use = self._uses.get(account.name)
        if use is None:
            full = _Bucket(account.requests_per_minute, now), _Bucket(account.tokens_per_minute, now)
            use = self._uses[account.name] = _Use(*full)
        if account.max_in_flight and use.running >= account.max_in_flight:
            message = f"{use.running} requests of this tenant run or wait, as many as it may have at once"
            self._refused.inc()
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
                    self._refused.inc()
                    raise QueueFullError(message, retry_after_s=max(0.1, wait_s))
        return use

    def has_spare(self, account: Account) -> bool:
        """Whether at least half of each limit is unused."""
        use = self._uses.get(account.name)
        if use is None:
            return True
        now = self._now()
        for bucket, most in ((use.requests, account.requests_per_minute), (use.tokens, account.tokens_per_minute)):
            if most:
                bucket.fill(most, now)
                if bucket.level < most / 2:
                    return False
        return not account.max_in_flight or use.running < max(1, account.max_in_flight // 2)


@dataclass(slots=True)
class Charge:
    """The cost of work before a placement, or without one, against its tenant's limits; may be changed.

    Attributes:
        tokens: Tokens of the text that is worked on.
        requests: Requests that it counts as.
        work: The router's own work, as tokens that are counted in any case.
    """

    tokens: float
    requests: float = 1.0
    work: float = 0.0

    def drop(self) -> None:
        """Count nothing: the request that the work was for is counted separately."""
        self.tokens = self.requests = 0.0
