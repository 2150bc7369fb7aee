"""What a prefill instance that hangs costs the requests that do not need it: 2P2D, real processes, one gets SIGSTOP.

Short prompts, which decode computes itself, and long ones, which are handed over, come at fixed rates. A phase in which
all instances run and one in which one prefill instance is stopped throughout, in turns. Reported are the times from
request to last token: of the short ones, and of the hand-overs that did not first try the stopped instance.

    python benchmarks/kv/stopped_prefill.py --write
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import time
from dataclasses import dataclass, field

import numpy as np

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient
from baton.types import PrefillPath

RESULT = Path(__file__).parents[1] / "results" / "kv" / "stopped_prefill.json"
MODEL = Path(__file__).parents[2] / "models" / "baton-tiny"
SHORT = 20
LONG = 300
NEW_TOKENS = 8


@dataclass
class Phase:
    """Seconds from request to last token, and how many prompts had to try a second instance."""

    short: list[float] = field(default_factory=list)
    handed_over: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    local: int = 0

    def figures(self) -> dict[str, float]:
        result: dict[str, float] = {"moved": len(self.moved), "computed_on_decode": self.local}
        for name, values in (("short", self.short), ("handed_over", self.handed_over), ("moved", self.moved)):
            for percent in (50, 99):
                if values:
                    result[f"{name}_p{percent}_ms"] = round(1e3 * float(np.percentile(values, percent)), 1)
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a phase")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--short-per-s", type=float, default=10.0)
    parser.add_argument("--long-per-s", type=float, default=3.0)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    print(json.dumps(result, indent=2))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run the phases in turns."""
    worker = ("--model", str(MODEL), "--kv-blocks", "4000")
    threshold = ("--remote-prefill-threshold", "64")
    extra = ExtraArgs(worker=worker, decode=threshold, router=threshold)
    phases = {"undisturbed": Phase(), "stopped": Phase()}
    plan = make_plan(ratio=Ratio(2, 2), extra=extra)
    async with (
        Supervisor(plan, lambda name, line: None) as supervisor,
        AsyncClient(plan.grpc_address, timeout=120.0, retries=0) as client,
    ):
        await load(client, Phase(), args, 5.0)  # connections, caches of code
        pid = supervisor.processes["prefill-0"].pid
        for _ in range(args.repeats):
            await load(client, phases["undisturbed"], args, args.seconds)
            os.kill(pid, signal.SIGSTOP)
            try:
                await load(client, phases["stopped"], args, args.seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(5.0)  # until its router hears it again
    figures = {name: phase.figures() for name, phase in phases.items()}
    ratios = {
        name: round(figures["stopped"][f"{name}_p99_ms"] / figures["undisturbed"][f"{name}_p99_ms"], 2)
        for name in ("short", "handed_over")
    }
    about = {"cpus": os.cpu_count(), "python": platform.python_version()}
    return {"machine": about, "load": {k: v for k, v in vars(args).items() if k != "write"}, **figures, "p99": ratios}


async def load(client: AsyncClient, phase: Phase, args: argparse.Namespace, seconds: float) -> None:
    """Send requests at the rates and wait for their ends."""
    rng = random.Random(time.monotonic_ns())

    async def ask(size: int) -> None:
        start = time.perf_counter()
        prompt = [rng.randrange(20, 500) for _ in range(size)]
        answer = await client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        took = time.perf_counter() - start
        trace = answer.trace
        if size == SHORT:
            phase.short.append(took)
        elif trace.failed_prefills:
            phase.moved.append(took)
        else:
            phase.handed_over.append(took)
        phase.local += size == LONG and trace.path is PrefillPath.LOCAL

    async def source(size: int, per_s: float, group: asyncio.TaskGroup) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            group.create_task(ask(size))
            await asyncio.sleep(rng.expovariate(per_s))

    async with asyncio.TaskGroup() as group:
        group.create_task(source(SHORT, args.short_per_s, group))
        group.create_task(source(LONG, args.long_per_s, group))


if __name__ == "__main__":
    raise SystemExit(main())
