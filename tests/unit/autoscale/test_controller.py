"""The controller between a router and a fleet: what it does, says and counts; dry runs; errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prometheus_client import CollectorRegistry

from baton.autoscale.controller import AutoscaleMetrics, Controller
from baton.client import Instance, Load, Stats
from baton.config.autoscale import AutoscaleConfig
from baton.errors import BusyError, UnavailableError
from baton.types import Role

P, D = Role.PREFILL, Role.DECODE
CONFIG = AutoscaleConfig(scale_window_s=5.0, scale_cooldown_s=20.0, scale_interval_s=1.0)


class World:
    """A router, a fleet and a clock, all in one."""

    def __init__(self) -> None:
        self.now, self.prefill, self.decode, self.waiting_tokens = 0.0, 1, 3, 9000
        self.error: Exception | None = None
        self.silent, self.under_way = False, ""
        self.done: list[tuple[str, Role]] = []
        self.taken_back: list[dict[Role, int]] = []

    async def list_instances(self) -> list[Instance]:
        if self.silent:
            raise UnavailableError("nobody is there")
        load = Load(1, 0, 0, 100, 10, 0, self.waiting_tokens, 1000.0, 0.0, 0, False)
        roles = [P] * self.prefill + [D] * self.decode
        return [Instance(f"i{at}", "h:1", role, True, "exact", load, 0, 0) for at, role in enumerate(roles)]

    async def stats(self, *, window: float = 60.0) -> Stats:
        return Stats(window, 1.0, 1.0, None, 0, 0, 0, None, None)

    async def switch(self, role: Role) -> str:
        if self.error is not None:
            raise self.error
        self.done.append(("switch", role))
        self.prefill, self.decode = self.prefill + 1, self.decode - 1
        return "i3 is a prefill instance now"

    async def add(self, role: Role) -> str:
        raise AssertionError

    async def remove(self, role: Role) -> str:
        raise AssertionError

    async def pending(self) -> str:
        return self.under_way

    async def take_back(self, least: Mapping[Role, int]) -> str:
        self.taken_back.append(dict(least))
        return "baton-decode: 3 -> 2 replicas"


def controller(world: World, config: AutoscaleConfig = CONFIG) -> tuple[Controller, list[str], CollectorRegistry]:
    lines: list[str] = []
    metrics = AutoscaleMetrics()
    made = Controller(config, world, world, lines.append, metrics=metrics, now=lambda: world.now)
    return made, lines, metrics.registry


async def run(made: Controller, world: World, seconds: int) -> None:
    for _ in range(seconds):
        await made.step()
        world.now += 1.0


async def test_it_acts_says_why_and_counts() -> None:
    world = World()
    made, lines, registry = controller(world)
    await run(made, world, 8)
    assert world.done == [("switch", P)]
    assert lines[0] == "watching"
    assert lines[1].startswith("one decode instance becomes prefill: prefill 9.00 (9 s of prompts wait, 1 are wanted)")
    assert lines[2] == "done: i3 is a prefill instance now"
    counted = registry.get_sample_value(
        "baton_autoscale_changes_total", {"action": "switch", "role": "prefill", "outcome": "done"}
    )
    assert counted == 1
    assert registry.get_sample_value("baton_autoscale_instances", {"role": "prefill"}) == 2
    assert registry.get_sample_value("baton_autoscale_pressure", {"role": "prefill", "signal": "queue"}) == 9
    world.waiting_tokens = 0
    await run(made, world, 40)
    assert world.done == [("switch", P)]
    assert len(lines) < 9, "what stays the same is said once"


async def test_a_dry_run_says_what_it_would_do_and_does_not() -> None:
    world = World()
    made, lines, registry = controller(world, replace(CONFIG, scale_dry_run=True))
    await run(made, world, 60)
    assert world.done == []
    assert 2 <= sum(line.startswith("would be done: one decode instance becomes prefill") for line in lines) <= 3
    counted = registry.get_sample_value(
        "baton_autoscale_changes_total", {"action": "switch", "role": "prefill", "outcome": "dry_run"}
    )
    assert counted is not None
    assert counted >= 2


async def test_what_fails_is_said_and_tried_again_after_the_pause() -> None:
    world = World()
    world.error = BusyError("it stayed busy")
    made, lines, _ = controller(world)
    await run(made, world, 8)
    assert "not done: it stayed busy" in lines
    world.error = None
    await run(made, world, 15)
    assert world.done == []
    await run(made, world, 15)
    assert world.done == [("switch", P)]


async def test_a_router_that_is_away_is_said_once_and_asked_again() -> None:
    world = World()
    world.silent = True
    made, lines, registry = controller(world)
    await run(made, world, 5)
    assert lines == ["cannot look: nobody is there"]
    assert registry.get_sample_value("baton_autoscale_failures_total", {"what": "look"}) == 5
    world.silent = False
    await run(made, world, 8)
    assert world.done == [("switch", P)]


async def test_what_is_under_way_is_waited_for() -> None:
    world = World()
    world.under_way = "baton-decode has 2 of 3 pods"
    made, lines, _ = controller(world)
    await run(made, world, 20)
    assert (world.done, lines) == ([], ["not all is settled: baton-decode has 2 of 3 pods"])


async def test_a_replica_that_never_gets_ready_is_given_up_and_scaling_goes_on() -> None:
    world = World()
    made, lines, registry = controller(world, replace(CONFIG, scale_start_s=60.0))
    world.under_way = "baton-decode has 2 of 3 pods"
    await run(made, world, 60)
    assert (world.done, world.taken_back) == ([], [])
    await run(made, world, 60)
    assert world.taken_back == [{P: 1, D: 1}]
    assert world.done[0] == ("switch", P)
    assert lines[1:3] == [
        "given up after 60 s: baton-decode has 2 of 3 pods",
        "taken back: baton-decode: 3 -> 2 replicas",
    ]
    assert registry.get_sample_value("baton_autoscale_given_up") == 1
    assert registry.get_sample_value("baton_autoscale_failures_total", {"what": "start"}) == 1
    world.under_way = ""
    await run(made, world, 1)
    assert registry.get_sample_value("baton_autoscale_given_up") == 0
    world.under_way = "baton-decode has 2 of 3 pods"  # another one, later
    await run(made, world, 59)
    assert len(world.taken_back) == 1


async def test_what_makes_progress_is_waited_for() -> None:
    world = World()
    made, _, _ = controller(world, replace(CONFIG, scale_start_s=60.0))
    for ready in range(5):
        world.under_way = f"baton-decode has {ready} of 5 pods"
        await run(made, world, 59)
    assert (world.done, world.taken_back) == ([], [])
