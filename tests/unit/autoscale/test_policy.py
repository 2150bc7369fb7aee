"""The controller's decisions: what presses a role, who gives, and that constant load ends in peace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.autoscale.policy import Action, Decision, Policy, StepTime
from baton.autoscale.signals import Observation, RoleLoad, observe, pressures
from baton.client import Instance, Load, Quantiles, Stats
from baton.config.autoscale import AutoscaleConfig
from baton.errors import ConfigError
from baton.types import Role

P, D = Role.PREFILL, Role.DECODE
CALM = Stats(60.0, 1.0, 10.0, 0.5, 0, 0, 0, None, None)
CONFIG = AutoscaleConfig(scale_window_s=10.0, scale_cooldown_s=30.0, scale_interval_s=1.0)


def seen(
    at: float, prefill: int, decode: int, *, queue_s: float = 0.0, kv: float = 0.0, **stats: object
) -> Observation:
    p = RoleLoad(prefill, round(1000 * prefill * queue_s), 1000.0 * prefill, 0, 0, 64 * prefill, 0.0, min(1.0, queue_s))
    d = RoleLoad(decode, 0, 0.0, 0, 4 * decode, 64 * decode, kv, 1.0)
    return Observation(at, {P: p, D: d}, replace(CALM, **stats))  # type: ignore[arg-type]


def looks(policy: Policy, begin: float, seconds: int, *args: object, **load: object) -> Iterator[Decision]:
    for at in range(seconds):
        yield policy.decide(seen(begin + at, *args, **load))  # type: ignore[arg-type]


def test_a_pressed_role_gets_an_instance_of_one_that_can_spare_it() -> None:
    found = list(looks(Policy(CONFIG), 0.0, 12, 1, 3, queue_s=2.5, kv=0.24))
    assert {each.why for each in found[:9]} == {"watching"}
    assert (found[-1].action, found[-1].role) == (Action.SWITCH, P)
    assert str(found[-1]) == (
        "one decode instance becomes prefill: prefill 2.50 (2.5 s of prompts wait, 1 are wanted); decode would be at "
        "0.45 without one (24% of the KV blocks are in use, 80% are wanted)"
    )
    found = list(looks(Policy(CONFIG), 0.0, 12, 3, 1, queue_s=0.1, kv=0.95))
    assert (found[-1].action, found[-1].role) == (Action.SWITCH, D)


def test_a_burst_that_is_shorter_than_the_window_moves_nobody() -> None:
    policy = Policy(CONFIG)
    for at in range(60):
        queue_s = 4.0 if at % 20 < 2 else 0.0
        assert policy.decide(seen(at, 2, 2, queue_s=queue_s)).action is Action.HOLD


def test_nobody_is_taken_from_a_role_that_would_miss_it() -> None:
    decision = list(looks(Policy(CONFIG), 0.0, 12, 2, 2, queue_s=3.0, kv=0.5))[-1]
    assert decision.action is Action.HOLD
    assert "but decode would be at 1.25 without one" in decision.why
    decision = list(looks(Policy(CONFIG), 0.0, 12, 3, 1, queue_s=3.0, kv=0.0))[-1]
    assert "but decode has none to give" in decision.why


def test_after_a_change_it_rests_and_looks_anew() -> None:
    policy = Policy(CONFIG)
    assert list(looks(policy, 0.0, 12, 1, 3, queue_s=3.0))[-1].action is Action.SWITCH
    policy.start_cooldown(11.0)
    found = list(looks(policy, 12.0, 40, 2, 2, queue_s=3.0))
    begun = next(at for at, each in enumerate(found) if each.action is Action.SWITCH)
    assert 12.0 + begun >= 11.0 + CONFIG.scale_cooldown_s
    assert any(each.why == "resting after the last change" for each in found[:begun])


def test_instances_that_come_or_go_stop_the_clock() -> None:
    policy = Policy(CONFIG)
    list(looks(policy, 0.0, 9, 1, 3, queue_s=3.0))
    coming = replace(seen(9.0, 1, 3, queue_s=3.0), unsettled=("decode-3",))
    assert policy.decide(coming).why == "not all is settled: decode-3"
    assert policy.decide(seen(10.0, 1, 3, queue_s=3.0)).why == "watching"


def test_where_the_number_may_change_instances_are_added_and_ended() -> None:
    config = replace(CONFIG, scale_max_instances=4)
    assert list(looks(Policy(config), 0.0, 12, 1, 2, queue_s=3.0, kv=0.7))[-1].action is Action.ADD
    full = list(looks(Policy(config), 0.0, 12, 1, 3, queue_s=3.0, kv=0.7))[-1]
    assert full.action is Action.HOLD
    idle = list(looks(Policy(config), 0.0, 12, 1, 3, queue_s=0.0, kv=0.1))[-1]
    assert (idle.action, idle.role) == (Action.REMOVE, D)
    assert list(looks(Policy(config), 0.0, 12, 1, 1, queue_s=0.0, kv=0.1))[-1].action is Action.HOLD
    assert list(looks(Policy(CONFIG), 0.0, 12, 1, 3, queue_s=0.0, kv=0.1))[-1].action is Action.HOLD


def times(p90: float) -> Quantiles:
    return Quantiles(p90 / 2, p90, p90, p90)


def test_latencies_are_of_whoever_is_to_blame() -> None:
    config = replace(CONFIG, scale_ttft_ms=500.0, scale_itl_ms=50.0)
    calm = pressures([seen(0.0, 2, 2, ttft_ms=times(1000.0), itl_ms=times(100.0))], config)
    assert (calm[P].name, calm[P].value, calm[D].name, calm[D].value) == ("ttft", 2.0, "itl", 2.0)
    full = pressures([seen(0.0, 2, 2, kv=0.9, ttft_ms=times(1000.0))], config)
    assert (full[P].value, full[D].name, full[D].value) == (0.0, "ttft", 2.0)
    helping = seen(0.0, 2, 2, queue_s=1.5, itl_ms=times(100.0))
    loads = {**helping.loads, D: replace(helping.loads[D], waiting_tokens=300)}
    helped = pressures([replace(helping, loads=loads)], config)
    assert (helped[P].name, helped[P].value, helped[D].value) == ("itl", 2.0, 0.0)


def test_what_waits_in_the_router_waits_for_who_is_full() -> None:
    for_prefill = pressures([seen(0.0, 2, 2, queue_s=1.0, num_waiting=9, waiting_prompt_tokens=4000)], CONFIG)
    assert (for_prefill[P].value, for_prefill[D].value) == (3.0, 0.0)
    full = seen(0.0, 2, 2, queue_s=0.1, num_waiting=9, waiting_prompt_tokens=4000)
    loads = {**full.loads, D: replace(full.loads[D], running=120)}
    for_decode = pressures([replace(full, loads=loads)], CONFIG)
    assert (for_decode[P].value, for_decode[D].name, for_decode[D].value) == (pytest.approx(0.1), "queue", 2.25)


def test_looks_that_come_late_keep_the_window_full() -> None:
    policy = Policy(CONFIG)
    found = [policy.decide(seen(1.13 * at, 1, 3, queue_s=0.5)) for at in range(60)]
    first = next(at for at, each in enumerate(found) if each.why != "watching")
    assert all(each.why != "watching" for each in found[first:])


def test_what_does_not_grow_with_the_work_keeps_nobody() -> None:
    """The time of a prompt, and of a step's weights, is there with any number of instances."""
    config = replace(CONFIG, scale_ttft_ms=500.0, scale_itl_ms=50.0)
    calm = seen(0.0, 2, 2, queue_s=0.1, ttft_ms=times(300.0), itl_ms=times(30.0))
    found = pressures([calm], config, 0.2)
    assert found[P].without_one(2) == pytest.approx(0.6 * 1.1)
    assert found[D].without_one(2) == pytest.approx(0.6 * 1.2)
    assert found[D].without_one(1) == float("inf")
    assert pressures([calm], config)[D].without_one(2) == pytest.approx(1.2)


def test_a_steps_growing_share_is_learnt_from_looks() -> None:
    learnt = StepTime()
    for _ in range(30):
        learnt.add_sample(5.0, 30.0)
        assert learnt.growing_share(5.0, 30.0) == 1.0, "always the same"
    for batch in (1, 2, 4, 8, 16, 24):
        for _ in range(5):
            learnt.add_sample(float(batch), 20.0 + 2.0 * batch)
    assert learnt.growing_share(5.0, 30.0) == pytest.approx(10 / 30, rel=0.01)
    assert learnt.growing_share(100.0, 30.0) == 1.0


def test_a_look_counts_those_that_take_requests() -> None:
    load = Load(1, 2, 0, 100, 30, 0, 500, 250.0, 0.0, 0, False)
    base = Instance("p0", "h:1", P, True, "exact", load, 0, 0, max_num_seqs=32)
    found = observe(
        [
            base,
            replace(base, instance_id="p1", load=replace(load, draining=True)),
            replace(base, instance_id="d0", role=D),
            replace(base, instance_id="d1", role=D, healthy=False),
            replace(base, instance_id="d2", role=D, refused="another model"),
        ],
        CALM,
        7.0,
    )
    assert (found.count(P), found.count(D), found.unsettled) == (1, 1, ("d1", "p1"))
    assert found.loads[P] == RoleLoad(1, 500, 250.0, 2, 1, 32, 0.3, 1.0)


@given(
    prefill_work=st.floats(0.05, 8.0),
    decode_work=st.floats(0.05, 8.0),
    prefill=st.integers(1, 5),
    decode=st.integers(1, 5),
    most=st.sampled_from([0, 4, 8]),
)
@settings(max_examples=150, deadline=None)
def test_constant_load_ends_in_peace_within_the_bounds(
    prefill_work: float, decode_work: float, prefill: int, decode: int, most: int
) -> None:
    """Pressure falls as a role grows: whatever the load, it changes a bounded number of times and never back."""
    config = replace(CONFIG, scale_max_instances=most)
    policy, counts, done = Policy(config), {P: prefill, D: decode}, []
    for at in range(1500):
        if at > 400 + (done[-1][0] if done else 0):
            break  # many windows and pauses of the same load: nothing is left to come
        queue_s, kv = prefill_work / counts[P], min(1.0, 0.8 * decode_work / counts[D])
        decision = policy.decide(seen(float(at), counts[P], counts[D], queue_s=queue_s, kv=kv))
        if decision.role is None:
            continue
        other = D if decision.role is P else P
        done.append((at, decision.action, decision.role))
        counts[decision.role] += -1 if decision.action is Action.REMOVE else 1
        counts[other] -= decision.action is Action.SWITCH
        policy.start_cooldown(float(at))
        assert counts[P] >= config.scale_min_prefill
        assert counts[D] >= config.scale_min_decode
        assert decision.action is not Action.ADD or sum(counts.values()) <= most
        assert decision.action is Action.SWITCH or most
    assert all(b - a >= config.scale_cooldown_s for (a, *_), (b, *_) in itertools.pairwise(done))
    assert not done or done[-1][0] < 900, done
    switched = {role for _, action, role in done if action is Action.SWITCH}
    assert len(switched) < 2, done


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scale_kv": 0.0}, "scale_kv"),
        ({"scale_relaxed": 1.0}, "scale_relaxed"),
        ({"scale_idle": 0.8}, "scale_idle"),
        ({"scale_window_s": 0.5}, "scale_interval_s"),
        ({"scale_min_decode": 0}, "scale_min_decode"),
        ({"scale_max_instances": 1}, "scale_max_instances"),
        ({"scale_cooldown_s": -1.0}, "scale_cooldown_s"),
    ],
)
def test_bad_targets_are_named(changes: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AutoscaleConfig(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field
