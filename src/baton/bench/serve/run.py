"""One run of ``baton bench serve``: warm-up, then a load, or loads at rates until the knee is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import uvloop

from baton.bench.core.report import EXIT_FAILED, EXIT_OK, Report, machine_facts, run_with_result
from baton.bench.serve.arrivals import arrival_times
from baton.bench.serve.knee import find_knee
from baton.bench.serve.load import Load, put_load
from baton.bench.serve.options import ServeOptions
from baton.bench.serve.prompts import PromptSource
from baton.bench.serve.records import KneeRecord, RunRecord, ServeRecord, detail, summarize
from baton.bench.serve.sample import Sample
from baton.bench.serve.targets import Target, make_target
from baton.config.flags import AccessConfig
from baton.errors import ConfigError

T = TypeVar("T")
Step = Callable[[str, int], None]
"""Is told of progress: what is done, and how much is left."""


class Benchmark:
    """A run.

    Args:
        options: What is asked for.
        access: Token and certificates.
        slos: Targets in milliseconds, by metric.

    Attributes:
        samples: Of the last load.

    Raises:
        ConfigError: Something cannot work together, or a file cannot be read.
    """

    def __init__(self, options: ServeOptions, access: AccessConfig, slos: Mapping[str, float]) -> None:
        if options.find_knee and not slos:
            raise ConfigError("--find-knee needs --slo", field="slo")
        self._options, self._access, self._slos = options, access, dict(slos)
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
                RunRecord(
                    url=options.url,
                    endpoint=options.endpoint,
                    model=target.model,
                    dataset=options.file or options.dataset,
                    arrival=options.arrival_kind,
                    request_rate=options.request_rate,
                    max_concurrency=options.max_concurrency,
                    requests=self._source.count,
                    warmup=options.warmup,
                    isl=options.isl,
                    osl=options.osl,
                    seed=options.seed,
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

    async def _load(self, target: Target, rate: float | None, draw: int, report: Report, step: Step) -> ServeRecord:
        requests = self._source.requests(draw)
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
        options, found = self._options, list[ServeRecord]()

        async def keeps(rate: float) -> bool:
            record = await self._load(target, rate, len(found), report, step)
            found.append(record)
            # A service that falls behind keeps targets for a while: what it finished tells.
            return (record.attainment or 0.0) >= options.attainment

        knee = await find_knee(
            keeps, start=options.request_rate, most=options.knee_max_rate, precision=options.knee_precision
        )
        best = next((each for each in found if each.request_rate == knee.rate), None)
        goodput = None if best is None else best.goodput
        report(KneeRecord(knee.rate, goodput, knee.broke_at, options.attainment, knee.tried))
        # Overload is what a search is for: refused requests are counted there, and are no failure of the run.
        if best is None or not best.errors:
            self._failures.clear()
