"""A long run of a whole deployment: descriptors, threads and memory of each process level off.

    python benchmarks/soak.py                                  # 50,000 requests to 2P2D, 1 % of them aborted
    python benchmarks/soak.py --requests 3000 --out /tmp/soak

Instances are started as ``baton up`` starts them. Requests have prompts of mixed lengths, some with a shared beginning;
one in a hundred is left by its client in mid-stream. Every few seconds the descriptors, threads and resident memory of
each process, with its own children, are read. ``soak.json`` has all samples, ``soak.svg`` shows them.

What counts is the second half of the run: a straight line is fitted to each number, and what that grows by in the half
must be within a bound. Exit status 1 if it is not, or if a request failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor

_QUANTITIES = {"descriptors": 4.0, "threads": 8.0, "rss_mb": 16.0, "private_mb": 16.0}
"""What is sampled, and the growth in the second half that counts as level. Resident memory has the peers' arenas, page
by page as they are read: it levels off later than what is the process's own. Threads that fetch KV come and go."""
_MEMORY_SHARE = 0.03
"""Growth of memory that counts as level, too, as a share of it."""
_MIN_SAMPLES = 8


@dataclass
class Series:
    """The samples of one process.

    Attributes:
        at: Seconds since the start of the load.
        values: Samples by quantity.
    """

    at: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _QUANTITIES})

    def add(self, at: float, pid: int) -> None:
        """Sample a process and its children."""
        totals = dict.fromkeys(_QUANTITIES, 0.0)
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):  # a child that ends meanwhile
                    totals["descriptors"] += process.num_fds()
                    totals["threads"] += process.num_threads()
                    memory = process.memory_info()
                    totals["rss_mb"] += memory.rss / 1e6
                    totals["private_mb"] += (memory.rss - memory.shared) / 1e6
        except psutil.NoSuchProcess:
            return
        self.at.append(at)
        for name, value in totals.items():
            self.values[name].append(value)

    def verdict(self, name: str) -> dict[str, Any]:
        """Return what a quantity grows by in the second half, by a fitted line, and whether that is level."""
        values = np.array(self.values[name])
        half = len(values) // 2
        at = np.array(self.at[half:])
        latter = values[half:]
        slope = float(np.polyfit(at, latter, 1)[0]) if len(latter) >= _MIN_SAMPLES else 0.0
        growth = slope * float(at[-1] - at[0]) if len(at) else 0.0
        bound = _QUANTITIES[name]
        if name.endswith("_mb"):
            bound = max(bound, _MEMORY_SHARE * float(latter.mean()))
        return {
            "first": float(values[0]),
            "middle": float(values[half]),
            "last": float(values[-1]),
            "most": float(values.max()),
            "growth_in_second_half": round(growth, 2),
            "bound": round(bound, 1),
            "level": len(latter) >= _MIN_SAMPLES and growth <= bound,
        }


class Load:
    """Requests to a router.

    Args:
        url: Base URL of the router.
        args: Command line.
    """

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, timeout=300.0, limits=httpx.Limits(max_connections=args.concurrency + 4)
        )
        self._args = args
        self._rng = random.Random(args.seed)
        self._prefixes = [self._tokens(256) for _ in range(32)]
        self.done = self.aborted = 0
        self.failures: list[str] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(20, 500) for _ in range(count)]

    def _prompt(self) -> list[int]:
        if self._rng.random() < 0.5:
            return self._rng.choice(self._prefixes) + self._tokens(self._rng.randrange(1, 100))
        return self._tokens(self._rng.randrange(8, 400))

    async def run(self) -> None:
        """Make all requests."""
        left = iter(range(self._args.requests))

        async def work() -> None:
            for _ in left:
                await self._ask(aborts=self._rng.random() < self._args.abort_share)

        await asyncio.gather(*(work() for _ in range(self._args.concurrency)))
        await self._http.aclose()

    async def _ask(self, *, aborts: bool) -> None:
        body = {
            "prompt": self._prompt(),
            "max_tokens": 64 if aborts else self._rng.randrange(1, 24),
            "temperature": 0,
            "ignore_eos": True,
            "stream": aborts or self._rng.random() < 0.7,
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    self.failures.append(f"{answer.status_code} {(await answer.aread())[:200]!r}")
                    return
                async for _ in answer.aiter_lines():
                    if aborts:
                        self.aborted += 1
                        return
            self.done += 1
        except httpx.HTTPError as error:
            self.failures.append(f"{type(error).__name__}: {error}")


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Run the deployment and the load; return the report."""
    extra = ExtraArgs(worker=("--model", args.model, "--kv-blocks", str(args.kv_blocks)))
    plan = make_plan(ratio=Ratio(args.prefill, args.decode), pipes=args.pipes, extra=extra)
    supervisor = Supervisor(plan, lambda name, line: print(f"{name}: {line}", file=sys.stderr))
    series: dict[str, Series] = {}
    async with supervisor:
        load = Load(f"http://{plan.http_address}", args)
        began = time.monotonic()

        def sample() -> None:
            for name, process in supervisor.processes.items():
                series.setdefault(name, Series()).add(time.monotonic() - began, process.pid)

        running = asyncio.create_task(load.run())
        while not running.done():
            sample()
            await asyncio.wait([running], timeout=args.sample_s)
        running.result()
        seconds = time.monotonic() - began
        sample()
    verdicts = {name: {each: one.verdict(each) for each in _QUANTITIES} for name, one in series.items()}
    level = all(each["level"] for one in verdicts.values() for each in one.values())
    return {
        "requests": args.requests,
        "completed": load.done,
        "aborted": load.aborted,
        "failed": len(load.failures),
        "failures": load.failures[:20],
        "seconds": round(seconds, 1),
        "level": level,
        "processes": verdicts,
        "samples": {name: {"at": one.at, **one.values} for name, one in series.items()},
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw every quantity over time, a line per process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(_QUANTITIES), 1, sharex=True, figsize=(8, 11))
    for axis, name in zip(axes, _QUANTITIES, strict=True):
        for process, samples in report["samples"].items():
            axis.plot(samples["at"], samples[name], label=process)
        axis.axvline(report["seconds"] / 2, color="grey", linewidth=0.5)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize="small", ncols=3)
    axes[0].set_title(f"{report['completed']} requests, {report['aborted']} aborted, {report['failed']} failed")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Run the soak; return the exit status."""
    parser = argparse.ArgumentParser(description="A long run: descriptors, threads and memory level off.")
    parser.add_argument("--requests", type=int, default=50_000, help="number of requests")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once")
    parser.add_argument("--abort-share", type=float, default=0.01, help="share of requests that their client leaves")
    parser.add_argument("--prefill", type=int, default=2, help="prefill instances")
    parser.add_argument("--decode", type=int, default=2, help="decode instances")
    parser.add_argument("--pipes", default="auto", help="kinds of pipe, in order of preference")
    parser.add_argument("--kv-blocks", type=int, default=2000, help="KV blocks of each instance")
    parser.add_argument("--model", default=str(Path(__file__).parents[1] / "models/baton-tiny"), help="model folder")
    parser.add_argument("--sample-s", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--out", type=Path, default=None, help="folder for soak.json and soak.svg; default: a new one")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="soak-"))
    out.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(soak(args))
    (out / "soak.json").write_text(json.dumps(report))
    plot(report, out / "soak.svg")
    for process, quantities in report["processes"].items():
        for name, each in quantities.items():
            print(
                f"{process:10} {name:11} {each['first']:8.1f} {each['middle']:8.1f} {each['last']:8.1f}  "
                f"{each['growth_in_second_half']:+7.2f} in the second half (at most {each['bound']:g})"
                f"{'' if each['level'] else '  GROWS'}"
            )
    print(
        f"{report['completed']} requests, {report['aborted']} aborted, {report['failed']} failed, "
        f"{report['seconds']:.0f} s: {'level' if report['level'] else 'NOT level'}; {out}"
    )
    return 0 if report["level"] and not report["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
