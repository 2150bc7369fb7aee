"""The controller of the ratio while the load changes its shape: 2P2D, at first long answers, then long prompts.

Real instances in this process (the demo model, its engine, router, gRPC, hand-over), whose steps are stretched to those
of an accelerator of their own: so many seconds per prompt token, and per decode step and sequence. So two processors
can show what four devices would do. The same requests are sent twice, with the controller and without; afterwards each
answer is compared with what the engine alone makes of the prompt. ``--only`` runs one of the two, and ``--write`` then
keeps what the file has of the other.

    python benchmarks/router/autoscale.py --write --plot docs/images/autoscale.svg
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from baton.autoscale.controller import Controller
from baton.autoscale.fleets import RoleFleet
from baton.autoscale.policy import Action, Decision
from baton.autoscale.signals import ROLES, Observation
from baton.client import AsyncClient
from baton.config import EngineConfig
from baton.config.autoscale import AutoscaleConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.engine import LLM, SamplingParams
from baton.engine.executor.base import Executor, load_executor
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput
from baton.errors import BatonError
from baton.types import Role
from baton.worker.instance import WorkerInstance
from baton_router.app import RouterApp

RESULT = Path(__file__).parents[1] / "results" / "autoscale.json"
MODEL = str(Path(__file__).parents[2] / "models" / "baton-tiny")
PREFILL_S_PER_TOKEN = 1.5e-3
STEP_S = 60e-3
STEP_S_PER_SEQUENCE = 6e-3
TTFT_MS = 3000.0
ITL_MS = 180.0
STEP: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "prefill_chunk": 256}
RATIO = {Role.PREFILL: 2, Role.DECODE: 2}


@dataclass(frozen=True)
class Phase:
    """A shape of load.

    Attributes:
        seconds: How long it comes.
        rate: Requests per second.
        isl: Prompt tokens.
        osl: Output tokens.
    """

    name: str
    seconds: float
    rate: float
    isl: int
    osl: int


PHASES = (Phase("long answers", 50.0, 4.0, 40, 60), Phase("long prompts", 80.0, 5.2, 300, 6))


class PacedExecutor:
    """An executor whose steps take as long as those of an accelerator would."""

    def __init__(self, inner: Executor) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a step, then wait for the rest of its time."""
        began = time.perf_counter()
        out = self.inner.forward(batch)
        new = np.diff(batch.query_starts)
        prompts = int(new[new > 1].sum())
        decodes = int((new == 1).sum())
        wanted = PREFILL_S_PER_TOKEN * prompts + (STEP_S + STEP_S_PER_SEQUENCE * decodes if decodes else 0.0)
        time.sleep(max(0.0, wanted - (time.perf_counter() - began)))
        return out


@dataclass
class Sent:
    """A request and what came of it; times in milliseconds."""

    phase: int
    prompt: list[int]
    osl: int
    due_s: float
    token_ids: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0
    itl_ms: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def kept_targets(self) -> bool:
        """Whether it kept both targets: time to first token, and the 95th percentile of its gaps."""
        return not self.error and self.ttft_ms <= TTFT_MS and float(np.percentile(self.itl_ms or [0], 95)) <= ITL_MS


def requests(seed: int, scale: float) -> list[Sent]:
    """Draw the load: Poisson arrivals, prompts of random tokens."""
    rng = np.random.default_rng(seed)
    results = list[Sent]()
    begin = 0.0
    for number, phase in enumerate(PHASES):
        at = begin
        while (at := at + float(rng.exponential(1 / phase.rate))) < begin + scale * phase.seconds:
            results.append(Sent(number, rng.integers(20, 500, phase.isl).tolist(), phase.osl, at))
        begin += scale * phase.seconds
    return results


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[tuple[AsyncClient, list[WorkerInstance]]]:
    """Run the router and the instances."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(patch("baton.worker.instance.load_executor", lambda c: PacedExecutor(load_executor(c))))
        router = RouterApp(RouterConfig(model=MODEL, remote_prefill_threshold=64, port=0, grpc_port=0))
        await router.start()
        stack.push_async_callback(router.stop)
        address = f"127.0.0.1:{router.grpc_port}"
        instances = []
        for role, count in RATIO.items():
            for at in range(count):
                config = WorkerConfig(instance_id=f"{role}-{at}", routers=(address,), pipes=("shm",))
                engine = EngineConfig(model=MODEL, dtype="float32", kv_blocks=3000, step_budget_ms=0, **STEP)
                instance = WorkerInstance(role, config, engine)
                await instance.start()
                stack.push_async_callback(instance.stop, 0)
                instances.append(instance)
        client = await stack.enter_async_context(AsyncClient(address, timeout=120, retries=0))
        async with asyncio.timeout(60):
            while True:
                if sum(each.healthy for each in await client.list_instances()) == sum(RATIO.values()):
                    break
                await asyncio.sleep(0.05)
        yield client, instances


async def send(client: AsyncClient, sent: Sent, began: float) -> None:
    """Send a request when it is due."""
    await asyncio.sleep(max(0.0, began + sent.due_s - time.perf_counter()))
    start = last = time.perf_counter()
    try:
        stream = await client.generate(sent.prompt, stream=True, max_tokens=sent.osl, temperature=0, ignore_eos=True)
        async for chunk in stream:
            now = time.perf_counter()
            if chunk.token_ids and not sent.token_ids:
                sent.ttft_ms = 1e3 * (now - start)
            elif chunk.token_ids:
                sent.itl_ms += [1e3 * (now - last) / len(chunk.token_ids)] * len(chunk.token_ids)
            sent.token_ids += chunk.token_ids
            last = now
    except BatonError as error:
        sent.error = f"{error.code}: {error.message}"


async def run(load: list[Sent], config: AutoscaleConfig | None) -> dict[str, Any]:
    """Send the load once; with a controller if there is a configuration for it."""
    rows: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    async with fleet() as (client, instances):
        blocks = lambda: {x.context.base.instance_id: x.context.engine.core.stats().blocks_cached for x in instances}  # noqa: E731
        began = time.perf_counter()

        def looked(seen: Observation, decision: Decision) -> None:
            at = round(time.perf_counter() - began, 1)
            stats = seen.stats
            rows.append(
                {"at_s": at}
                | {role.value: seen.count(role) for role in ROLES}
                | {f"pressure_{role}": round(each.value, 2) for role, each in decision.pressures.items()}
                | {"ttft_p90_ms": None if stats.ttft_ms is None else round(stats.ttft_ms.p90)}
                | {"itl_p90_ms": None if stats.itl_ms is None else round(stats.itl_ms.p90, 1)}
            )
            if decision.action is not Action.HOLD:
                changes.append({"at_s": at, "what": str(decision), "cached_before": blocks()})

        def print_line(line: str) -> None:
            if line.startswith(("done", "not done")):
                cached = blocks()
                changes[-1] |= {"done_s": round(time.perf_counter() - began, 1), "told": line, "cached_after": cached}
                print(f"{changes[-1]['at_s']:>6} s  {changes[-1]['what']}\n          {line}", flush=True)

        # Without a controller one that may not do anything looks on, for the trace.
        watching = config or dataclasses.replace(CONTROLLER, scale_dry_run=True)
        controller = Controller(watching, client, RoleFleet(client, 30.0), print_line, on_observation=looked)
        looking = asyncio.create_task(controller.run())
        await asyncio.gather(*(send(client, each, began) for each in load))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        for instance in instances:
            await instance.context.engine.call(instance.context.engine.core.check_integrity)
    if config is None:
        changes.clear()
    return {"phases": [figures(load, number) for number in range(len(PHASES))], "changes": changes, "trace": rows}


def figures(load: list[Sent], number: int) -> dict[str, Any]:
    """Return what became of a phase's requests: all of them, and those of its second half."""
    requests = [each for each in load if each.phase == number]
    middle = (requests[0].due_s + requests[-1].due_s) / 2
    late = [each for each in requests if each.due_s >= middle]
    result: dict[str, Any] = {"name": PHASES[number].name, "requests": len(requests)}
    result["failed"] = sum(bool(each.error) for each in requests)
    for name, those in (("", requests), ("late_", late)):
        good = [each for each in those if not each.error]
        result[f"{name}kept"] = round(sum(each.kept_targets for each in those) / len(those), 3)
        result[f"{name}ttft_p90_ms"] = round(float(np.percentile([each.ttft_ms for each in good], 90)))
        result[f"{name}itl_p90_ms"] = round(float(np.percentile([x for each in good for x in each.itl_ms], 90)), 1)
    return result


def wrong(load: list[Sent]) -> int:
    """Return how many answers are not the engine's own."""
    count = 0
    with LLM(EngineConfig(model=MODEL, dtype="float32", kv_blocks=3000)) as llm:
        for number, phase in enumerate(PHASES):
            requests = [each for each in load if each.phase == number]
            sampling = SamplingParams(max_tokens=phase.osl, temperature=0.0, ignore_eos=True)
            right = [list(output.token_ids) for output in llm.generate([each.prompt for each in requests], sampling)]
            count += sum(each.token_ids != tokens for each, tokens in zip(requests, right, strict=True))
    return count


CONTROLLER = AutoscaleConfig(
    scale_ttft_ms=TTFT_MS,
    scale_itl_ms=ITL_MS,
    scale_prefill_queue_s=2.0,
    scale_window_s=8.0,
    scale_cooldown_s=12.0,
    scale_drain_s=10.0,
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw pressures, and the ratio beneath them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rows = result["controller"]["trace"]
    for role, colour in (("prefill", "tab:orange"), ("decode", "tab:green")):
        points = [(row["at_s"], row[f"pressure_{role}"]) for row in rows if f"pressure_{role}" in row]
        top.plot(*zip(*points, strict=True), color=colour, label=f"{role}: strongest signal / target")
        bottom.step([row["at_s"] for row in rows], [row[role] for row in rows], color=colour, label=f"{role} instances")
    top.axhline(1.0, color="grey", lw=0.8, ls="--")
    for change in result["controller"]["changes"]:
        for axes in (top, bottom):
            axes.axvline(change["at_s"], color="tab:blue", lw=0.8)
    turn = PHASES[0].seconds * result["scale"]
    for axes in (top, bottom):
        axes.axvline(turn, color="black", lw=0.8, ls=":")
        axes.legend(loc="upper right", fontsize=8)
        axes.grid(visible=True, alpha=0.3)
    top.set_ylim(0, 4)
    top.set_ylabel("pressure")
    top.set_title(
        "long answers, from the dotted line on long prompts; blue: the controller changes a role", fontsize=10
    )
    bottom.set_yticks([1, 2, 3])
    bottom.set_xlabel("seconds")
    figure.savefig(path)


def main() -> int:
    """Measure and report; exit status 1 if a request failed or a token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    parser.add_argument("--scale", type=float, default=1.0, help="of the phases' lengths")
    parser.add_argument("--only", choices=("controller", "fixed"), default="", help="one of the two runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    parser.add_argument("--plot", type=Path, default=None, help="draw the trace into an .svg or .png file")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "scale": args.scale,
        "phases": [dataclasses.asdict(phase) for phase in PHASES],
        "targets": {"ttft_ms": TTFT_MS, "itl_ms": ITL_MS},
    }
    bad = 0
    for name, config in (("controller", CONTROLLER), ("fixed", None)):
        if args.only in ("", name):
            load = requests(args.seed, args.scale)
            result[name] = asyncio.run(run(load, config))
            result[name] |= {"wrong_answers": wrong(load), "errors": sorted({x.error for x in load if x.error})}
            print(json.dumps({name: result[name]["phases"], "wrong": result[name]["wrong_answers"]}, indent=2))
            bad += result[name]["wrong_answers"] + len(result[name]["errors"])
    if args.write:
        before = json.loads(RESULT.read_text()) if args.only and RESULT.exists() else {}
        RESULT.write_text(json.dumps({**before, **result}, indent=1) + "\n")
    if args.plot is not None:
        draw(result, args.plot)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
