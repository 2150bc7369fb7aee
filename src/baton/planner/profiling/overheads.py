"""What a request takes beyond the engine: router, front end, hand-over; from an idle deployment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from baton.bench.core.report import Record
from baton.bench.core.traces import TraceRequest
from baton.bench.serve.options import ServeOptions
from baton.bench.serve.records import ServeRecord
from baton.bench.serve.run import Benchmark
from baton.config.flags import AccessConfig
from baton.errors import UnavailableError
from baton.planner.profile import Overheads, Profile
from baton.planner.simulator.routing import MakeRouting
from baton.planner.simulator.simulation import Deployment, Simulation

REQUESTS = 12
OUTPUT = 24
Step = Callable[[str, int], None]


def measure_overheads(
    url: str, access: AccessConfig, profile: Profile, make_routing: MakeRouting, *, isl: int, step: Step
) -> Overheads:
    """Compare a deployment that has nothing else to do with what the profile says of single requests.

    Args:
        url: Of the deployment: the engine that was profiled, with a prefill instance.
        access: Token and certificates.
        profile: Of its engine and link.
        make_routing: Makes the simulated router.
        isl: Prompt tokens of requests that are handed over.
        step: Is told of progress.

    Raises:
        UnavailableError: It does not answer, or requests fail.
    """
    short = max(1, min(isl, profile.limits.remote_prefill_threshold - 1))
    step("short requests", 1)
    ttft, itl = _measured(url, access, short)
    own_ttft, own_itl = _predicted(profile, make_routing, short, prefills=0)
    step("requests that are handed over", 0)
    far_ttft, _ = _measured(url, access, isl)
    far_own, _ = _predicted(profile, make_routing, isl, prefills=1)
    request, per_step = max(0.0, ttft - own_ttft), max(0.0, itl - own_itl)
    # Steps of prompts take the same time more as those of decodes; requests need not take it twice.
    request = max(0.0, request - per_step)
    return Overheads(request, max(0.0, far_ttft - far_own - request - per_step), per_step)


def _measured(url: str, access: AccessConfig, isl: int) -> tuple[float, float]:
    options = ServeOptions(url=url, isl=isl, osl=OUTPUT, requests=REQUESTS, max_concurrency=1, warmup=3)
    records: list[Record] = []
    Benchmark(options, access, {}).run(records.append, lambda what, left: None)
    load = next(each for each in records if isinstance(each, ServeRecord))
    if load.failed or load.ttft_ms is None or load.itl_ms is None:
        raise UnavailableError(f"requests to {url} failed: {load.errors}")
    return load.ttft_ms.median / 1e3, load.itl_ms.median / 1e3


def _predicted(profile: Profile, make_routing: MakeRouting, isl: int, *, prefills: int) -> tuple[float, float]:
    engine = profile.engines[0]
    deployment = Deployment(
        prefills, 1, engine, engine, profile.limits, profile.link, profile.layers, profile.kv_bytes_per_token
    )
    deployment = dataclasses.replace(deployment, overheads=Overheads())
    outcome = Simulation(deployment, make_routing).run([TraceRequest(0.0, isl, OUTPUT, tuple(range(-(-isl // 512))))])
    return outcome.percentile("ttft", 50) / 1e3, outcome.percentile("itl", 50) / 1e3
