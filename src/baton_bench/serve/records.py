"""Samples, records, report and picture of ``baton bench serve``, and the comparison of two results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console

from baton.cli.printable import MAX_ERROR_CHARS, one_line
from baton.errors import ConfigError
from baton_bench.report import Record, build_from, make_table, of_kind, print_failures, warn_if_busy
from baton_bench.traces import read_lines

ITL_SHARE = 95
"""Percentile of a request's gaps that an ITL target is compared with."""


@dataclass(slots=True)
class Sample:
    """One request; times in seconds on a monotonic clock.

    Attributes:
        number: Number of the request, from 0.
        due_s: Time at which it was due.
        sent_s: Time at which it was sent: it may have waited for ``--max-concurrency`` or for this process.
        arrivals: Arrival time of each event with output.
        output_tokens: As the service counts them; else events.
        prompt_tokens, cached_tokens: As the service counts them; ``None``: it does not say.
        error: Kind of the error, such as ``http 429``, ``timeout`` or ``connection``; empty: none.
        message: Error message of the service; empty: none.
    """

    number: int
    due_s: float = 0.0
    sent_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    message: str = ""

    def finish(self, output_tokens: int | None) -> None:
        """Take the service's count of output tokens, and find fault with an answer without any."""
        self.output_tokens = len(self.arrivals) if output_tokens is None else output_tokens
        if not self.error and not self.arrivals:
            self.error = "empty answer"
            self.message = "no event had output"

    def fail(self, kind: str, message: str) -> None:
        """Note why it failed; the first reason counts."""
        if not self.error:
            self.error = kind
            self.message = one_line(" ".join(message.split()), MAX_ERROR_CHARS)

    @property
    def late_ms(self) -> float:
        """Milliseconds that it waited here before it was sent."""
        return 1e3 * max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from sending to the first output."""
        return 1e3 * (self.arrivals[0] - self.sent_s)

    @property
    def e2e_ms(self) -> float:
        """Milliseconds from sending to the last output."""
        return 1e3 * (self.arrivals[-1] - self.sent_s)

    @property
    def itl_ms(self) -> list[float]:
        """Milliseconds between output tokens.

        Tokens that arrive together share the time since the arrival before. Events do not say how many tokens they
        hold: the answer's tokens are spread over them evenly, at least one each.
        """
        events = len(self.arrivals)
        tokens = max(events, self.output_tokens)
        gaps: list[float] = []
        previous_s = self.arrivals[0] if events else 0.0
        num_seen = 0
        for number, at in enumerate(self.arrivals, start=1):
            if number < events and self.arrivals[number] == at:
                continue
            count = tokens * number // events - num_seen
            num_seen += count
            if at > previous_s:
                gaps += [1e3 * (at - previous_s) / count] * count
                previous_s = at
        return gaps

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; ``None``: there was one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

    def keeps(self, metric: str, limit_ms: float) -> bool:
        """Whether it kept a target; an answer too short to have gaps keeps those of gaps."""
        if self.error:
            return False
        if metric == "itl":
            gaps = self.itl_ms
            return not gaps or float(np.percentile(gaps, ITL_SHARE)) <= limit_ms
        value = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}[metric]
        return value is None or value <= limit_ms


@dataclass(frozen=True)
class Load:
    """The result of a load.

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


METRICS = {
    "ttft_ms": "Time to First Token",
    "tpot_ms": "Time per Output Token (excl. 1st token)",
    "itl_ms": "Inter-token Latency",
    "e2e_ms": "End-to-end Latency",
    "late_ms": "Waited here before being sent",
}
"""Times of a load, by field, and how the report calls them."""
_WIDTH = 60
_FIGURE = 14


@dataclass(frozen=True, slots=True)
class Times:
    """Mean and percentiles of times, in milliseconds."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Times | None:
        """Compute them, interpolated between the values next to them; ``None``: there are no values."""
        known = list(values)
        if not known:
            return None
        result = np.percentile(known, (50, 90, 95, 99)).tolist()
        return cls(*(round(float(x), 4) for x in (np.mean(known), *result)))


@dataclass(frozen=True)
class RunRecord(Record):
    """First line: what is measured, where and how."""

    record: ClassVar[str] = "run"
    url: str
    endpoint: str
    model: str
    dataset: str
    arrival: str
    request_rate: float | None
    max_concurrency: int | None
    requests: int
    warmup: int
    isl: int
    osl: int
    seed: int
    slo: dict[str, float]
    machine: dict[str, Any]


@dataclass(frozen=True)
class RequestRecord(Record):
    """One request, with ``--details``; ``itl_ms`` are its gaps, times are ``None`` where it failed."""

    record: ClassVar[str] = "request"
    number: int
    due_s: float
    late_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    itl_ms: list[float]
    error: str
    message: str


@dataclass(frozen=True)
class ServeRecord(Record):
    """Figures of a load. Rates are per second of ``seconds``; tokens are those of successful requests."""

    record: ClassVar[str] = "serve"
    request_rate: float | None
    completed: int
    failed: int
    errors: dict[str, int]
    served_share: float | None
    seconds: float
    sending_s: float
    peak_concurrency: int
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    goodput: float | None
    attainment: float | None
    kept: dict[str, float]
    ttft_ms: Times | None
    tpot_ms: Times | None
    itl_ms: Times | None
    e2e_ms: Times | None
    late_ms: Times | None


@dataclass(frozen=True)
class KneeRecord(Record):
    """The highest rate that kept the targets, and the lowest tried that did not (``None``: all tried did).

    A rate is kept if the targets are, and if the service answers as fast as it is asked; see ``keeps_up``.
    """

    record: ClassVar[str] = "knee"
    rate: float | None
    served_share: float | None
    goodput: float | None
    broke_at: float | None
    attainment: float
    tried: int


def _total(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None)


def summarize(load: Load, slos: Mapping[str, float], rate: float | None) -> ServeRecord:
    """Count and average a load.

    Args:
        load: Result of the load.
        slos: Targets in milliseconds, by metric.
        rate: Target rate in requests per second; ``None``: no target.
    """
    good = [sample for sample in load.samples if not sample.error]
    total = len(load.samples)
    seconds = load.seconds
    kept_all = sum(all(s.keeps(metric, limit) for metric, limit in slos.items()) for s in good)
    inputs = _total(s.prompt_tokens for s in good)
    outputs = sum(s.output_tokens for s in good)
    return ServeRecord(
        request_rate=rate,
        completed=len(good),
        failed=total - len(good),
        errors=dict(Counter(s.error for s in load.samples if s.error)),
        served_share=served_share(good),
        seconds=round(seconds, 4),
        sending_s=round(load.sending_s, 4),
        peak_concurrency=load.peak,
        input_tokens=inputs,
        cached_tokens=_total(s.cached_tokens for s in good),
        output_tokens=outputs,
        requests_per_s=round(len(good) / seconds, 4),
        output_tokens_per_s=round(outputs / seconds, 3),
        total_tokens_per_s=None if inputs is None else round((inputs + outputs) / seconds, 3),
        goodput=round(kept_all / seconds, 4) if slos else None,
        attainment=round(kept_all / total, 4) if slos else None,
        kept={m: round(sum(s.keeps(m, limit) for s in good) / total, 4) for m, limit in slos.items()},
        ttft_ms=Times.of(s.ttft_ms for s in good),
        tpot_ms=Times.of(s.tpot_ms for s in good if s.tpot_ms is not None),
        itl_ms=Times.of(gap for s in good for gap in s.itl_ms),
        e2e_ms=Times.of(s.e2e_ms for s in good),
        late_ms=Times.of(s.late_ms for s in load.samples),
    )


_MIDDLE = (0.1, 0.9)
"""Shares of the requests between which rates are taken: at both ends fewer of them are in flight."""
_KEPT_UP = 0.9
"""Share of the rate asked for that a service must answer at."""
FLIGHTS = 5
"""Requests that tell whether a service keeps up: so many times those in flight at the rate asked for."""


def _middle_rate(times: Iterable[float]) -> float | None:
    """Return the events per second between the first and the last tenth of them; ``None``: too few for a rate."""
    ordered = sorted(times)
    first, last = (round(share * (len(ordered) - 1)) for share in _MIDDLE) if ordered else (0, 0)
    if last <= first or ordered[last] <= ordered[first]:
        return None
    return (last - first) / (ordered[last] - ordered[first])


def served_share(samples: Sequence[Sample]) -> float | None:
    """Return the rate of the answers as a share of that at which their requests were due; ``None``: too few."""
    answered = [sample for sample in samples if not sample.error]
    served = _middle_rate(sample.arrivals[-1] for sample in answered)
    asked = _middle_rate(sample.due_s for sample in answered)
    return None if served is None or asked is None else round(served / asked, 4)


def keeps_up(load: ServeRecord) -> bool:
    """Whether a service answered about as many requests per second as were sent: else its queue only grew."""
    return load.served_share is not None and load.served_share >= _KEPT_UP


def detail(sample: Sample, started_s: float) -> RequestRecord:
    """Return the record of one request."""
    good = not sample.error
    return build_from(
        RequestRecord,
        sample,
        due_s=round(sample.due_s - started_s, 6),
        late_ms=round(sample.late_ms, 4),
        ttft_ms=round(sample.ttft_ms, 4) if good else None,
        tpot_ms=None if not good or sample.tpot_ms is None else round(sample.tpot_ms, 4),
        e2e_ms=round(sample.e2e_ms, 4) if good else None,
        itl_ms=[round(gap, 4) for gap in sample.itl_ms],
    )


# --- as text ---


def print_report(records: Sequence[Record], console: Console) -> None:
    """Print a block per load, or one table of a sweep."""
    for run in of_kind(records, RunRecord):
        warn_if_busy(run.machine, console)
    loads = of_kind(records, ServeRecord)
    if knees := of_kind(records, KneeRecord):
        _print_sweep(loads, knees[0], console)
    else:
        for load in loads:
            _print_block(load, console)
    print_failures(records, console)


def _line(console: Console, label: str, value: float | int | str | None) -> None:
    if value is None:
        return
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    console.print(f"{label + ':':<{_WIDTH - _FIGURE}}{text:>{_FIGURE}}", markup=False)


def _heading(console: Console, text: str, fill: str) -> None:
    console.print(text.center(_WIDTH, fill), markup=False)


def _print_block(load: ServeRecord, console: Console) -> None:
    _heading(console, " Serving Benchmark Result ", "=")
    _line(console, "Successful requests", load.completed)
    _line(console, "Failed requests", load.failed)
    for kind, count in sorted(load.errors.items()):
        _line(console, f"  {kind}", count)
    _line(console, "Request rate asked for (req/s)", load.request_rate)
    _line(console, "Benchmark duration (s)", load.seconds)
    _line(console, "Total input tokens", load.input_tokens)
    _line(console, "Total cached input tokens", load.cached_tokens)
    _line(console, "Total generated tokens", load.output_tokens)
    _line(console, "Request throughput (req/s)", load.requests_per_s)
    _line(console, "Request goodput (req/s)", load.goodput)
    for metric, share in load.kept.items():
        _line(console, f"  kept {metric} (%)", 100 * share)
    _line(console, "Output token throughput (tok/s)", load.output_tokens_per_s)
    _line(console, "Total token throughput (tok/s)", load.total_tokens_per_s)
    _line(console, "Peak concurrent requests", load.peak_concurrency)
    for key, name in METRICS.items():
        times: Times | None = getattr(load, key)
        if times is None or (key == "late_ms" and times.p99 < 1.0):
            continue
        _heading(console, name, "-")
        short = key.removesuffix("_ms").upper()
        for statistic in ("mean", "median", "p90", "p95", "p99"):
            _line(console, f"{statistic.capitalize()} {short} (ms)", getattr(times, statistic))
    console.print("=" * _WIDTH)


def _served(load: ServeRecord) -> float:
    """Return the requests per second that a load of a sweep was answered at, without its beginning and end."""
    share = load.served_share
    return load.requests_per_s if share is None or load.request_rate is None else share * load.request_rate


def _print_sweep(loads: Sequence[ServeRecord], knee: KneeRecord, console: Console) -> None:
    columns = ("req/s asked", "served", "goodput", "kept %", "TTFT p50", "p99", "ITL p50", "p99", "tok/s", "failed")
    table = make_table("Rates, in the order in which they were tried", columns, ())
    for load in loads:
        first = load.ttft_ms or Times(0, 0, 0, 0, 0)
        gaps = load.itl_ms or Times(0, 0, 0, 0, 0)
        table.add_row(
            f"{load.request_rate or 0:.3g}",
            f"{_served(load):.3g}",
            f"{load.goodput or 0:.3g}",
            f"{100 * (load.attainment or 0):.1f}",
            *(f"{value:.1f}" for value in (first.median, first.p99, gaps.median, gaps.p99)),
            f"{load.output_tokens_per_s:.0f}",
            str(load.failed),
        )
    console.print(table)
    share = f"{100 * knee.attainment:g} % of the requests"
    if knee.rate is None:
        console.print(f"Not found: no rate tried keeps the targets for {share}.")
        return
    above = "the highest tried" if knee.broke_at is None else f"{knee.broke_at:.4g} does not"
    console.print(
        f"Knee: {knee.rate:.4g} req/s keep the targets for {share} ({above}); served "
        f"{100 * (knee.served_share or 0):.0f} % as fast as asked, goodput {knee.goodput:.4g} req/s"
    )


# --- as a picture ---


def draw(records: Sequence[Record], samples: Sequence[Sample], path: Path) -> None:
    """Draw how TTFT and gaps are distributed, or goodput over the rates of a sweep, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    if knees := of_kind(records, KneeRecord):
        loads = sorted(of_kind(records, ServeRecord), key=lambda load: load.request_rate or 0)
        rates = [load.request_rate or 0.0 for load in loads]
        left.plot(rates, [load.goodput or 0 for load in loads], "-o", label="goodput")
        left.plot(rates, [_served(load) for load in loads], "--", label="served")
        left.set_ylabel("requests/s")
        right.plot(rates, [load.ttft_ms.p99 if load.ttft_ms else np.nan for load in loads], "-o", label="TTFT p99")
        right.plot(rates, [load.itl_ms.p99 if load.itl_ms else np.nan for load in loads], "-o", label="ITL p99")
        slos = next((run.slo for run in of_kind(records, RunRecord)), {})
        for (metric, limit), colour in zip(slos.items(), ("#888888", "#bb5555", "#55aa55", "#5555bb"), strict=False):
            right.axhline(limit, color=colour, linestyle=":", label=f"target of {metric.upper()}")
        right.set_yscale("log")
        right.yaxis.set_major_formatter("{x:g}")
        right.set_ylabel("ms")
        for axes in (left, right):
            if knees[0].rate is not None:
                axes.axvline(knees[0].rate, color="#333333", linewidth=1, label=f"knee: {knees[0].rate:.3g}")
            axes.set_xlabel("requests/s asked for")
            axes.legend(fontsize="small")
        figure.suptitle("Rates at which the targets are kept")
    else:
        good = [sample for sample in samples if not sample.error]
        for axes, name, values in (
            (left, "TTFT", [sample.ttft_ms for sample in good]),
            (right, "ITL", [gap for sample in good for gap in sample.itl_ms]),
        ):
            axes.plot(np.sort(values), np.linspace(0, 100, len(values)))
            axes.set_xlabel(f"{name}, ms")
            axes.set_ylabel("% of them within")
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=150)


_RATES = {
    "requests_per_s": "requests/s",
    "goodput": "goodput, requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s",
}
_STATISTICS = ("mean", "median", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both results; ``better``: whether the second one's is better."""

    name: str
    first: float
    second: float
    ratio: float | None
    better: bool | None


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return what differs between the last loads of two files.

    Raises:
        ConfigError: A file cannot be read, or has no load.
    """
    a = _last_load(first)
    b = _last_load(second)
    rows = [_row(label, a.get(name), b.get(name), more_is_better=True) for name, label in _RATES.items()]
    for name in METRICS:
        for statistic in _STATISTICS:
            both = [(load.get(name) or {}).get(statistic) for load in (a, b)]
            label = f"{name.removesuffix('_ms').upper()} {statistic}, ms"
            rows.append(_row(label, *both, more_is_better=False))
    rows.append(_row("failed requests", a["failed"], b["failed"], more_is_better=False))
    return {"files": [str(first), str(second)], "rows": [asdict(row) for row in rows if row is not None]}


def _last_load(path: Path) -> dict[str, Any]:
    result: dict[str, Any] | None = None
    for _, value in read_lines(path):
        if value.get("record") == ServeRecord.record:
            result = value
    if result is None:
        raise ConfigError(f"{path} has no result of baton bench serve --json", field="compare")
    missing = [name for name in ("failed", *_RATES, *METRICS) if name not in result]
    if missing or not all(_is_times(result[name]) for name in METRICS):
        lacks = ", ".join(missing) or "statistics"
        raise ConfigError(f"{path} is of another version: it lacks {lacks}", field="compare")
    return result


def _is_times(value: object) -> bool:
    return value is None or (isinstance(value, dict) and set(value) == set(Times.__dataclass_fields__))


def _row(name: str, a: float | None, b: float | None, *, more_is_better: bool) -> Compared | None:
    if a is None or b is None:
        return None
    better = None if a == b else (b > a) == more_is_better
    return Compared(name, a, b, round(b / a, 4) if a else None, better)


def print_comparison(document: dict[str, Any], console: Console) -> None:
    """Print it as a table; green is better in the second file."""
    names = [Path(name).stem for name in document["files"]]
    table = make_table("", ("", *names, "ratio"), ("",))
    for row in document["rows"]:
        colour = {True: "green", False: "red", None: "default"}[row["better"]]
        ratio = "" if row["ratio"] is None else f"[{colour}]{row['ratio']:.3f}[/{colour}]"
        table.add_row(row["name"], f"{row['first']:.2f}", f"{row['second']:.2f}", ratio)
    console.print(table)
