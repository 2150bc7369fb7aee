"""One run of ``baton bench serve``: warm-up, then one load, or loads at several rates until the knee is found."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import uvloop

from baton.config.flags import AccessConfig
from baton.errors import ConfigError
from baton.terminal import Step
from baton_bench.report import EXIT_FAILED, EXIT_OK, Report, build_from, machine_facts, run_with_result
from baton_bench.serve.options import ServeOptions
from baton_bench.serve.prompts import PlannedRequest, PromptSource
from baton_bench.serve.records import (
    FLIGHTS,
    KneeRecord,
    Load,
    RunRecord,
    Sample,
    ServeRecord,
    detail,
    keeps_up,
    summarize,
)
from baton_bench.serve.targets import Target, make_target


def arrival_times(
    options: ServeOptions, requests: Sequence[PlannedRequest], rate: float | None, draw: int
) -> list[float] | None:
    """Return the send time of each request in seconds after the first; ``None``: each as soon as there is room.

    Args:
        options: Options of the command line.
        requests: Requests to send; those of a trace have their times.
        rate: Requests per second.
        draw: Different draws have different random pauses.
    """
    kind = options.arrival_kind
    if kind == "trace":
        return [request.at_s for request in requests]
    if kind == "closed" or rate is None:
        return None
    count = len(requests)
    rng = np.random.default_rng([options.seed, 4, draw])
    if kind == "constant":
        pauses = np.full(count, 1.0 / rate)
    else:
        shape = options.burstiness if kind == "gamma" else 1.0
        pauses = rng.gamma(shape, 1.0 / (rate * shape), count)
    times = np.concatenate(([0.0], np.cumsum(pauses)[:-1]))
    if count > 1 and kind != "constant":
        # The same number of requests in the same time for every seed: few pauses would give another rate than asked.
        times *= (count - 1) / rate / times[-1]
    results: list[float] = times.tolist()
    return results


_START_RATE = 1.0
_LOWEST_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Knee:
    """The result of a search.

    Attributes:
        rate: Highest rate that kept the targets; ``None``: none did.
        broke_at: Lowest rate that did not; ``None``: all did, up to the highest allowed.
        tried: Loads that it took.
    """

    rate: float | None
    broke_at: float | None
    tried: int


async def find_knee(
    keeps: Callable[[float], Awaitable[bool]], *, start: float | None, most: float, precision: float
) -> Knee:
    """Search.

    Args:
        keeps: Puts on a load at a rate; returns whether the targets were kept.
        start: First rate tried, requests per second; ``None``: 1.
        most: Highest rate tried.
        precision: Width of the bracket at which the search ends, as a share of its lower end.
    """
    tried = 0
    low: float | None = None
    high: float | None = None
    rate = min(start or _START_RATE, most)
    while low is None or high is None:
        tried += 1
        if await keeps(rate):
            low = rate
            if low >= most:
                return Knee(low, None, tried)
            rate = min(2 * rate, most)
        else:
            high = rate
            if high <= _LOWEST_RATE:
                return Knee(None, high, tried)
            rate /= 2
    while high - low > precision * low:
        middle = (low + high) / 2
        tried += 1
        if await keeps(middle):
            low = middle
        else:
            high = middle
    return Knee(low, high, tried)


async def put_load(
    target: Target,
    requests: Sequence[PlannedRequest],
    times: Sequence[float] | None,
    concurrency: int | None,
    on_done: Callable[[], object],
) -> Load:
    """Send all requests and wait for all answers.

    Args:
        target: Where to.
        requests: Requests to send, in order.
        times: When each is due, in seconds after the first, unless its session has a request before it and its delay is
            known: then it is due that long after the answer before. ``None``: as soon as there is room.
        concurrency: Requests in flight at most.
        on_done: Called after each answer.
    """
    room = asyncio.Semaphore(concurrency or len(requests))
    samples = [Sample(number) for number in range(len(requests))]
    in_flight = peak = 0
    followers = _followers(requests) if times is not None else {}

    async def ask(number: int) -> None:
        nonlocal in_flight, peak
        sample, request = samples[number], requests[number]
        async with room:
            in_flight += 1
            peak = max(peak, in_flight)
            sample.sent_s = time.perf_counter()
            if times is None:
                sample.due_s = sample.sent_s
            try:
                await target.ask(request, sample)
            finally:
                in_flight -= 1
        on_done()
        follower = followers.get(number)
        if follower is not None:
            delay_s = requests[follower].delay_s or 0.0
            samples[follower].due_s = time.perf_counter() + delay_s
            await asyncio.sleep(delay_s)
            tasks.create_task(ask(follower))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        waiting = set(followers.values())
        for number, sample in enumerate(samples):
            if number in waiting:
                continue
            if times is not None:
                sample.due_s = started + times[number]
                await asyncio.sleep(max(0.0, sample.due_s - time.perf_counter()))
            tasks.create_task(ask(number))
    ended = time.perf_counter()
    sending = max((sample.sent_s for sample in samples), default=started) - started
    return Load(samples, ended - started, peak, sending)


def _followers(requests: Sequence[PlannedRequest]) -> dict[int, int]:
    """Return, by its number, each request whose answer another one of its session waits for, and that one's number."""
    latest: dict[str, int] = {}
    followers = {}
    for number, request in enumerate(requests):
        if request.session:
            if request.delay_s is not None and request.session in latest:
                followers[latest[request.session]] = number
            latest[request.session] = number
    return followers


T = TypeVar("T")


class Benchmark:
    """A run.

    Args:
        options: Options of the command line.
        access: Token and certificates.
        slos: Targets in milliseconds, by metric.

    Attributes:
        samples: Samples of the last load.

    Raises:
        ConfigError: Something cannot work together, or a file cannot be read.
    """

    def __init__(self, options: ServeOptions, access: AccessConfig, slos: Mapping[str, float]) -> None:
        if options.find_knee and not slos:
            raise ConfigError("--find-knee needs --slo", field="slo")
        self._options = options
        self._access = access
        self._slos = dict(slos)
        self._source = PromptSource(options)
        self.samples: list[Sample] = []
        self._failures: list[str] = []

    def run(self, report: Report, step: Step) -> int:
        """Measure; returns the exit status.

        Raises:
            BatonError: The service does not answer.
        """
        return run_with_result(lambda: self._in_loop(self._run(report, step)), report)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        # Calls of gRPC run in threads of its own, which uvloop does not make cheaper.
        factory = asyncio.new_event_loop if self._options.endpoint == "grpc" else uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)

    async def _run(self, report: Report, step: Step) -> tuple[int, list[str]]:
        options = self._options
        target = make_target(options, self._access)
        try:
            await target.prepare()
            report(
                build_from(
                    RunRecord,
                    options,
                    model=target.model,
                    dataset=options.trace or options.file or options.dataset,
                    arrival=options.arrival_kind,
                    requests=self._source.count,
                    slo=self._slos,
                    machine=machine_facts(),
                )
            )
            if options.warmup:
                step("warm-up", self._source.count)
                await put_load(target, self._source.warmup(0), None, options.max_concurrency, lambda: None)
            if options.find_knee:
                await self._find_knee(target, report, step)
            else:
                await self._load(target, options.request_rate, 0, report, step)
        finally:
            await target.close()
        return (EXIT_FAILED if self._failures else EXIT_OK), self._failures

    async def _load(
        self, target: Target, rate: float | None, draw: int, report: Report, step: Step, count: int | None = None
    ) -> ServeRecord:
        requests = self._source.requests(draw, count)
        times = arrival_times(self._options, requests, rate, draw)
        left = len(requests)

        def on_done() -> None:
            nonlocal left
            left -= 1
            step("requests" if rate is None else f"{rate:.4g} requests/s", left)

        load = await put_load(target, requests, times, self._options.max_concurrency, on_done)
        self.samples = load.samples
        if self._options.details:
            for sample in load.samples:
                report(detail(sample, load.samples[0].due_s))
        record = summarize(load, self._slos, rate)
        report(record)
        self._note_failures(load)
        return record

    def _note_failures(self, load: Load) -> None:
        kinds: dict[str, Sample] = {}
        for sample in load.samples:
            if sample.error:
                kinds.setdefault(sample.error, sample)
        for kind, sample in kinds.items():
            count = sum(each.error == kind for each in load.samples)
            self._failures.append(f"{count} times {kind}; the first: {sample.message}")

    async def _find_knee(self, target: Target, report: Report, step: Step) -> None:
        options = self._options
        results = list[ServeRecord]()
        flight_s = 0.0

        async def keeps(rate: float) -> bool:
            nonlocal flight_s
            count = max(self._source.count, math.ceil(FLIGHTS * rate * flight_s))
            while True:
                record = await self._load(target, rate, len(results), report, step, count)
                results.append(record)
                if (record.attainment or 0.0) < options.attainment or record.e2e_ms is None:
                    return False
                # A service that falls behind keeps targets for a while, and one that has room for all requests at
                # once keeps them at any rate: it must answer as fast as it is asked, for as many as show that.
                needed = math.ceil(FLIGHTS * rate * record.e2e_ms.mean / 1e3)
                if count >= needed or not keeps_up(record):
                    flight_s = record.e2e_ms.mean / 1e3
                    return keeps_up(record)
                count = needed

        knee = await find_knee(
            keeps, start=options.request_rate, most=options.knee_max_rate, precision=options.knee_precision
        )
        best = next((each for each in reversed(results) if each.request_rate == knee.rate), None)
        goodput = None if best is None else best.goodput
        share = None if best is None else best.served_share
        report(KneeRecord(knee.rate, share, goodput, knee.broke_at, options.attainment, knee.tried))
        # Overload is what a search is for: refused requests are counted there, and are no failure of the run.
        if best is None or not best.errors:
            self._failures.clear()
