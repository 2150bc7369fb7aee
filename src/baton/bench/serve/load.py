"""Sends requests when they are due, and gathers what was seen of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.bench.serve.prompts import PlannedRequest
from baton.bench.serve.sample import Sample
from baton.bench.serve.targets import Target


@dataclass(frozen=True)
class Load:
    """What was seen of a load.

    Attributes:
        samples: One per request, in the order in which they were due.
        seconds: From the first request to the last answer.
        peak: Most requests in flight at a time.
        sending_s: From the first request to the last one sent.
    """

    samples: list[Sample]
    seconds: float
    peak: int
    sending_s: float


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
        requests: What.
        times: When each is due, in seconds after the first; ``None``: as soon as there is room.
        concurrency: Requests in flight at most.
        on_done: Called after each answer.
    """
    room = asyncio.Semaphore(concurrency or len(requests))
    samples = [Sample(number) for number in range(len(requests))]
    in_flight = peak = 0

    async def ask(sample: Sample, request: PlannedRequest) -> None:
        nonlocal in_flight, peak
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

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, (sample, request) in enumerate(zip(samples, requests, strict=True)):
            if times is not None:
                sample.due_s = started + times[number]
                await asyncio.sleep(max(0.0, sample.due_s - time.perf_counter()))
            tasks.create_task(ask(sample, request))
    ended = time.perf_counter()
    sending = max((sample.sent_s for sample in samples), default=started) - started
    return Load(samples, ended - started, peak, sending)
