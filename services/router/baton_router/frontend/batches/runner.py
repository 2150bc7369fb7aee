"""Runs batches: one router leases a batch, answers its lines in idle capacity, and ends it.

A line goes the way of an HTTP request, from :meth:`PostEndpoints.serve` on, by an exchange without a connection. Its
result is stored before anything else happens, and a line with a result is never sent again. So a router that dies loses
only answers that are not stored yet: the next one that leases the batch goes on with the lines that have no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry

from baton.background import create_task, keep_running
from baton.errors import InvalidRequestError, UnavailableError, shown
from baton.logs import Absence
from baton.types import BACKGROUND_PRIORITY
from baton_router.accounts import Accounts
from baton_router.admission.background import BackgroundSlots
from baton_router.frontend.batches.lines import (
    BatchLine,
    NumberedLine,
    answered_line,
    custom_id_of,
    parse_line,
    read_lines,
    sum_usage,
    unsent_line,
)
from baton_router.frontend.batches.schemas import BatchError
from baton_router.frontend.batches.store import LINE_PARTS, BatchRecord, BatchStore, FileRecord, LineResult
from baton_router.frontend.http.protocol import Exchange
from baton_router.frontend.openai.generation import PostEndpoints
from baton_router.metrics import Counter, GaugeFunction
from baton_router.types import Account

log = logging.getLogger(__name__)

LEASE_S = 3.0
"""Seconds after which another router takes over the batches of one that died."""
_LOOK_S = 1.0
_SWEEP_S = 60.0
_STORE_PAUSE_S = 1.0
_MOST_ERRORS = 100
"""Errors of validation that a failed batch lists."""
_AT_ONCE = 1000
"""Results per write, where many lines end without an answer."""
_PRIORITY = (b"x-baton-priority", str(BACKGROUND_PRIORITY).encode())
_RETRY_AFTER = re.compile(rb"^retry-after: (\d+)", re.MULTILINE | re.IGNORECASE)
_RESPONSES = "/v1/responses"
_UNSTORED = b'{"store":false,'
"""Begins bodies of responses: a batch must not push the tenant's others out of memory. A field of the line goes before
it, as the later one of two counts; an empty body is refused in any case."""
_FAULTS = frozenset({502, 504})
_AGAIN = _FAULTS | {429, 503}
"""Statuses of answers after which a line is sent again: nothing is wrong with it."""
_MOST_FAILURES = 3
"""Answers with one of the faults after which it may be the line's own."""
_NEVER_AGAIN = b'"code":"slo_unattainable"'
_GIVEN_UP = {
    "expired": ("batch_expired", "the batch expired before this line was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
}
"""Code and message of lines without an answer, by the state that the batch ends in."""
_NO_ROOM = ("output_limit", "the tenant's files have as many bytes as they may have: delete some, and send this again")
_LOOKS = 64
"""Results are measured whenever this share of a tenant's bytes was added to them."""


_BEFORE_THE_END = frozenset({"validating", "in_progress"})


class _Answer(NamedTuple):
    status: int
    headers: bytes
    body: bytes


class LineExchange(Exchange):
    """A line of a batch as a request without a connection.

    Args:
        path: Path of the endpoint.
        account: Account of the batch; ``None`` without API keys.
        request_id: Identifier of the request.

    Attributes:
        answer: Result is the answer; ``None``: it was interrupted.
    """

    __slots__ = ("answer",)

    def __init__(self, path: str, account: Account | None, request_id: str) -> None:
        self.path = path
        self.account = account
        self.request_id = request_id
        self.headers = [_PRIORITY]
        self.chunked = False
        self.status = 0
        self.on_gone = self.on_flow = None
        self.answer: asyncio.Future[_Answer | None] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.status = status
        self.on_gone = self.on_flow = None
        if not self.answer.done():
            self.answer.set_result(_Answer(status, headers, body))

    def interrupt(self) -> None:
        """Stop the request on all instances."""
        callback = self.on_gone
        self.on_gone = None
        if callback is not None:
            callback()
        if not self.answer.done():
            self.answer.set_result(None)


class BatchMetrics:
    """Metrics of batches.

    Args:
        registry: Registry for the metrics.
        running: Returns the number of lines that run.
        batches: Returns the number of batches that this router runs.
    """

    def __init__(self, registry: CollectorRegistry, running: Callable[[], float], batches: Callable[[], float]) -> None:
        name = "baton_router_batch"
        self.lines = Counter(
            f"{name}_lines", "Lines of batches, by outcome; interrupted ones run again", ["outcome"], registry
        )
        GaugeFunction(f"{name}_lines_running", "Lines of batches that run", registry, running)
        GaugeFunction(f"{name}es_running", "Batches that this router runs", registry, batches)


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all batches of a router share.

    Attributes:
        store: Store of files and batches.
        posts: Endpoints that answer the lines.
        accounts: Accounts of the API keys; ``None`` without API keys.
        slots: Idle capacity.
        lines: Number of lines by outcome.
        owner: Name of this router in leases.
        max_lines: Most lines of a batch.
        tenant_bytes: Most bytes of all files of a tenant, results of its batches among them.
        now: Clock, in Unix seconds.
    """

    store: BatchStore
    posts: PostEndpoints
    accounts: Accounts | None
    slots: BackgroundSlots
    lines: Counter
    owner: str
    max_lines: int
    tenant_bytes: int
    now: Callable[[], float]


class BatchRunner:
    """Runs the batches that this router can lease, until it is closed.

    Args:
        store: Store of files and batches.
        posts: Endpoints that answer the lines.
        accounts: Accounts of the API keys; ``None`` without API keys.
        slots: Idle capacity.
        registry: Registry for the metrics.
        max_lines: Most lines of a batch.
        tenant_bytes: Most bytes of all files of a tenant, results of its batches among them.
        now: Clock, in Unix seconds.
    """

    def __init__(
        self,
        store: BatchStore,
        posts: PostEndpoints,
        accounts: Accounts | None,
        slots: BackgroundSlots,
        registry: CollectorRegistry,
        max_lines: int,
        tenant_bytes: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        metrics = BatchMetrics(registry, lambda: slots.num_running, lambda: len(self._runs))
        owner = secrets.token_hex(8)
        self._context = RunContext(store, posts, accounts, slots, metrics.lines, owner, max_lines, tenant_bytes, now)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._swept_at = 0.0
        self._absence = Absence(log, "the store of batches answers again")

    def start(self) -> None:
        """Begin, in the running loop."""
        self._task = keep_running(self._run, "batches")

    async def close(self) -> None:
        """Interrupt all lines and end the leases; another router, or the next start, goes on."""
        tasks = [*self._tasks, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self, batch_id: str) -> None:
        """Look at a batch at once: it is new, or is to be cancelled."""
        self._wake.set()
        if (run := self._runs.get(batch_id)) is not None:
            run.wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
                self._absence.record_return()
            except UnavailableError as error:
                self._absence.record_failure("batches wait: %s", error.__cause__ or error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)

    async def _look(self) -> None:
        """Lease batches that no router runs, and remove what is kept no longer."""
        context = self._context
        open_batches = await context.store.open_batches()
        for record in open_batches:
            if record.id not in self._runs and await context.store.claim(record.id, context.owner, LEASE_S):
                run = self._runs[record.id] = BatchRun(context, record)
                task = create_task(self._run_batch(run), "batch", detail=record.id)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        now = context.now()
        if now >= self._swept_at + _SWEEP_S:
            self._swept_at = now
            in_use = {record.input_file_id for record in open_batches}
            for each in await context.store.due_records(now):
                if each.id not in in_use:
                    await context.store.delete(each)

    async def _run_batch(self, run: BatchRun) -> None:
        ident = run.record.id
        try:
            await run.run()
        except UnavailableError as error:
            log.warning("batch %s waits: %s", ident, error.__cause__ or error)
        except Exception:  # it stays open and is leased again, here or elsewhere
            log.exception("batch %s stopped", ident)
        finally:
            del self._runs[ident]
            with contextlib.suppress(UnavailableError):  # the lease ends by itself
                await self._context.store.release(ident, self._context.owner)


class BatchRun:
    """One batch while this router has its lease.

    Args:
        context: Parts that all batches share.
        record: The batch.

    Attributes:
        record: The batch, as far as this router knows.
        wake: Set when the stored record has changed.
    """

    def __init__(self, context: RunContext, record: BatchRecord) -> None:
        self._context = context
        self._store = context.store
        self.record = record
        self.wake = asyncio.Event()
        self._unsaved: list[LineResult] = []
        self._unmeasured = math.inf
        """Bytes of results since the tenant's files were measured."""
        self._is_full = False
        self._saving = asyncio.Lock()
        self._resume_at = 0.0
        """Time by the loop's clock before which no further line is sent: the router, or what is behind it, refuses."""

    async def run(self) -> None:
        """Run the batch until it ends or its lease is lost."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._work())
        work.add_done_callback(lambda _: self.wake.set())
        try:
            while not work.done():
                self.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEASE_S / 3):
                        await self.wake.wait()
                if not (work.done() or await self._renew()):
                    break
            if work.done():
                work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if (outcome := self._given_up()) is not None:
            await self._give_up(outcome)

    async def _renew(self) -> bool:
        """Renew the lease and look for a change; ``False``: the work has to stop."""
        if not await self._store.claim(self.record.id, self._context.owner, LEASE_S):
            log.warning("another router runs batch %s now", self.record.id)
            return False
        stored = await self._store.get(self.record.id)
        if not isinstance(stored, BatchRecord):
            return False
        if stored.status == "cancelling":
            self.record = stored
        return self._given_up() is None

    def _given_up(self) -> str | None:
        """Return the state that the batch ends in before all its lines have run; ``None``: it goes on."""
        if self.record.status == "cancelling":
            return "cancelled"
        is_late = self._context.now() >= self.record.expires_at
        return "expired" if is_late and self.record.status in _BEFORE_THE_END else None

    async def _change(self, status: str, **changes: Any) -> bool:
        """Store another state; ``False``: it was changed by another, mostly by a client that cancels it."""
        before = self.record.status
        times = {**self.record.times, f"{status}_at": int(self._context.now())}
        record = msgspec.structs.replace(self.record, status=status, times=times, **changes)
        if not await self._store.write_record(record, expected=before):
            self.wake.set()
            return False
        self.record = record
        return True

    # --- the states ---

    async def _work(self) -> None:
        if self._given_up() is not None:
            return
        if self.record.status == "validating" and not await self._validate():
            return
        if self.record.status == "in_progress":
            await self._answer_lines()
            if not await self._change("finalizing"):
                return
        await self._end("completed")

    async def _validate(self) -> bool:
        """Check that every line has a name of its own; what else is wrong with a line becomes its result."""
        errors: list[BatchError] = []
        seen: set[bytes] = set()
        total = 0
        async for line in self._lines():
            total += 1
            try:
                ident = custom_id_of(line)
            except InvalidRequestError as error:
                errors.append(_line_error("missing_custom_id", line.number, error.message))
                ident = None
            if ident is not None and (digest := _digest(ident)) in seen:
                message = f"line {line.number}: custom_id {shown(ident)} is the name of an earlier line"
                errors.append(_line_error("duplicate_custom_id", line.number, message))
            elif ident is not None:
                seen.add(digest)
            if total > self._context.max_lines:
                message = f"a batch may have {self._context.max_lines} lines"
                errors = [BatchError(code="too_many_lines", message=message, param="input_file_id", line=None)]
            if len(errors) >= _MOST_ERRORS or total > self._context.max_lines:
                break
        if not total:
            errors = [BatchError(code="empty_file", message="the input file has no lines", param=None, line=None)]
        if errors:
            await self._change("failed", errors=errors)
            return False
        return await self._change("in_progress", total=total)

    async def _answer_lines(self) -> None:
        done = await self._done()
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            async for line in self._lines():
                if line.number in done:
                    continue
                if self._is_full or await self._look_for_room():
                    await self._save(unsent_line(line, *_NO_ROOM))
                    continue
                try:
                    parsed = parse_line(line, self.record.endpoint, self._context.posts.max_body_bytes())
                except InvalidRequestError as error:
                    await self._save(unsent_line(line, error.code, error.message, error.field))
                    continue
                # Refusals and the slot are waited for here, so that no more lines are read than can run.
                await asyncio.sleep(self._resume_at - loop.time())
                group.create_task(self._answer(line.number, parsed, await self._acquire(line.number)))

    async def _look_for_room(self) -> bool:
        """Return whether the tenant's files and results have all the bytes that they may have."""
        most = self._context.tenant_bytes
        if self._unmeasured * _LOOKS >= most:
            self._unmeasured = 0
            self._is_full = (await self._store.usage(self.record.tenant)).size >= most
        return self._is_full

    async def _done(self) -> set[int]:
        """Return the numbers of the lines that have a result."""
        files = (self.record.output_id, self.record.error_id)
        return {number // LINE_PARTS for ident in files for number in await self._store.part_numbers(ident)}

    async def _acquire(self, number: int) -> LineExchange:
        """Wait for idle capacity and the tenant's limits; return the request of a line."""
        return await self._context.slots.acquire(self.record.tenant, functools.partial(self._exchange, number))

    def _exchange(self, number: int) -> LineExchange | None:
        accounts = self._context.accounts
        account = accounts.named(self.record.tenant) if accounts is not None else None
        if (accounts is not None and account is None) or not self._context.slots.may_run(account):
            return None  # the tenant has no key now, or needs what its limits leave itself
        return LineExchange(self.record.endpoint, account, f"{self.record.id}-{number}")

    async def _answer(self, number: int, line: BatchLine, exchange: LineExchange) -> None:
        """Send a line until it has an answer that counts, and store that."""
        context = self._context
        body = bytes(line.body)
        if line.url == _RESPONSES:
            body = _UNSTORED + body[1:]
        failures = 0
        while True:
            try:
                context.posts.serve(exchange, body)
                answer = await exchange.answer
            finally:
                exchange.interrupt()
                context.slots.release(exchange)
            if answer is not None and (answer.status not in _AGAIN or _NEVER_AGAIN in answer.body):
                break
            context.lines.labels("interrupted" if answer is None else "deferred").inc()
            if answer is not None:
                failures += answer.status in _FAULTS
                if failures >= _MOST_FAILURES:
                    break
                after = _RETRY_AFTER.search(answer.headers)
                pause_s = float(after[1]) if after is not None else 1.0
                self._resume_at = max(self._resume_at, asyncio.get_running_loop().time() + pause_s)
                await asyncio.sleep(pause_s)
            exchange = await self._acquire(number)
        await self._save(answered_line(number, line.custom_id, answer.status, exchange.request_id, answer.body))

    async def _give_up(self, outcome: str) -> None:
        """End the batch early: lines without an answer get an error."""
        done = await self._done()
        code, message = _GIVEN_UP[outcome]
        results: list[LineResult] = []
        total = 0
        async for line in self._lines():
            total += 1
            if line.number not in done:
                results.append(unsent_line(line, code, message))
            if len(results) >= _AT_ONCE:
                await self._store.add_results(self.record, results)
                results.clear()
        if results:
            await self._store.add_results(self.record, results)
        self.record = msgspec.structs.replace(self.record, total=total)
        await self._end(outcome)

    async def _end(self, status: str) -> None:
        """Make the records of the output and error file, and store the last state."""
        record = self.record
        now = int(self._context.now())
        counts = []
        for ident, kind in ((record.output_id, "output"), (record.error_id, "error")):
            lines, size = await self._store.measure(ident)
            counts.append(lines)
            if lines:
                file = FileRecord(
                    id=ident,
                    tenant=record.tenant,
                    filename=f"{record.id}_{kind}.jsonl",
                    purpose="batch_output",
                    status="processed",
                    size=size,
                    created_at=now,
                    removed_at=now + record.output_s,
                )
                await self._store.write_record(file)
        usage = await sum_usage(self._store, record.output_id)
        await self._change(status, completed=counts[0], failed=counts[1], usage=usage)

    # --- lines and results ---

    def _lines(self) -> AsyncIterator[NumberedLine]:
        return read_lines(self._store, self.record.input_file_id, self._context.posts.max_body_bytes())

    async def _save(self, result: LineResult) -> None:
        """Store a result, together with others that have come meanwhile."""
        self._unsaved.append(result)
        self._unmeasured += len(result.data)
        self._context.lines.labels("failed" if result.failed else "completed").inc()
        async with self._saving:
            results, self._unsaved = self._unsaved, []
            if results:
                await _until_stored(lambda: self._store.add_results(self.record, results))


async def _until_stored(write: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Write to the store, again and again while it cannot be reached."""
    while True:
        try:
            return await write()
        except UnavailableError as error:
            log.warning("results of a batch wait: %s", error.__cause__ or error)
            await asyncio.sleep(_STORE_PAUSE_S)


def _line_error(code: str, number: int, message: str) -> BatchError:
    return BatchError(code=code, message=message, param="custom_id", line=number)


def _digest(ident: str) -> bytes:
    return hashlib.blake2b(ident.encode("utf-8", "surrogatepass"), digest_size=16).digest()
