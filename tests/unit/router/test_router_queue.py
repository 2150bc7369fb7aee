"""The router's queue: bounds hold, priorities and deadlines order it, every tenant gets its share, nothing is left."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.scripted import ScriptedDispatcher

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.tokenizer import TextModelCache
from baton.types import RequestId, SamplingParams
from baton_router.accounts import Accounts, Tenants, entries_of_tenants
from baton_router.admission.estimates import DrainRate
from baton_router.admission.queue import QUANTUM, AdmissionMetrics, FairQueue, Waiting
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics
from baton_router.processor.text_request import TextRequest
from baton_router.types import RoutedRequest

COSTS = st.integers(1, 20_000)
SLOW = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Maker:
    """Makes requests that wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.number = loop, 0

    def __call__(
        self, tenant: str = "a", cost: float = 100.0, *, priority: int = 0, deadline: float = math.inf, tokens: int = 10
    ) -> Waiting:
        self.number += 1
        request = RoutedRequest(
            RequestId(str(self.number)), [1] * tokens, SamplingParams(), priority=priority, tenant=tenant
        )
        start_by = min(deadline, 1e9 + self.number)
        return Waiting(request, self.number, 0.0, deadline, start_by, cost, self.loop.create_future())


@pytest.fixture
def make(loop: asyncio.AbstractEventLoop) -> Maker:
    return Maker(loop)


def unbounded() -> FairQueue:
    return FairQueue(10**6, 10**9, 1.0)


def drained(queue: FairQueue) -> list[Waiting]:
    items = []
    while len(queue):
        items.append(queue.pop())
    return items


def assert_empty(queue: FairQueue) -> None:
    assert (len(queue), queue.tokens, queue.cost, queue.tenants(), list(queue)) == (0, 0, 0.0, {}, [])
    assert not queue._classes
    assert not queue._priorities


# --- order ---


def test_priorities_before_turns_before_deadlines_before_arrival(make: Maker) -> None:
    queue = unbounded()
    late, soon, first, urgent = make(deadline=9.0), make(deadline=5.0), make(), make("b", priority=-1)
    second = make()
    for item in (late, first, second, soon, urgent):
        queue.add(item)
    assert drained(queue) == [urgent, soon, late, first, second]
    assert_empty(queue)


def test_a_modest_tenant_is_next_but_one(make: Maker) -> None:
    queue = unbounded()
    for _ in range(500):
        queue.add(make("greedy", QUANTUM))
    queue.pop()
    mine = make("modest", QUANTUM)
    queue.add(mine)
    assert mine in [queue.pop(), queue.pop()]


def test_a_request_larger_than_many_turns_is_found_at_once(make: Maker) -> None:
    queue = unbounded()
    for tenant in "abc":
        queue.add(make(tenant, QUANTUM * 10_000_000))
    queue.add(make("d", 10))
    assert queue.pop().request.tenant == "d"
    assert len(drained(queue)) == 3


def test_weights_divide_what_is_served(make: Maker) -> None:
    entries = entries_of_tenants({"tenants": {"a": {"keys": ["a"], "weight": 3}, "b": {"keys": ["b"]}}})
    accounts, queue, served = Accounts(entries, b"secret"), unbounded(), Counter[str]()
    for tenant in "ab":
        for _ in range(400):
            item = make(tenant, 100)
            item.request = msgspec.structs.replace(item.request, account=accounts.identify(f"Bearer {tenant}"))
            queue.add(item)
    for _ in range(400):
        served[queue.pop().request.tenant] += 1
    assert served["a"] == pytest.approx(3 * served["b"], rel=0.1)


@SLOW
@given(st.lists(st.lists(COSTS, min_size=30, max_size=40), min_size=2, max_size=5), st.integers(20, 60))
def test_tenants_that_always_have_work_get_the_same(
    loop: asyncio.AbstractEventLoop, costs: list[list[int]], rounds: int
) -> None:
    make, queue, served = Maker(loop), unbounded(), Counter[str]()
    sources = {f"t{i}": iter(row * 100) for i, row in enumerate(costs)}
    largest = max(map(max, costs))
    for tenant, source in sources.items():
        for _ in range(1 + len(tenant)):
            queue.add(make(tenant, next(source)))
    for _ in range(rounds):
        item = queue.pop()
        tenant = item.request.tenant
        served[tenant] += int(item.cost)
        queue.add(make(tenant, next(sources[tenant])))
        amounts = [served[name] for name in sources]
        assert max(amounts) - min(amounts) <= QUANTUM + 2 * largest


@SLOW
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), COSTS, st.sampled_from([-1, 0, 0, 3]), st.integers(1, 50)),
        min_size=1,
        max_size=40,
    ),
    st.tuples(st.sampled_from("abcdx"), COSTS, st.sampled_from([-1, 0, 3])),
)
def test_what_is_said_to_be_ahead_is_ahead(
    loop: asyncio.AbstractEventLoop, rows: list[tuple[str, int, int, int]], new: tuple[str, int, int]
) -> None:
    make, queue = Maker(loop), unbounded()
    for tenant, cost, priority, deadline in rows:
        queue.add(make(tenant, cost, priority=priority, deadline=float(deadline)))
    mine = make(new[0], new[1], priority=new[2], deadline=25.5)
    said = queue.cost_ahead(mine)
    queue.add(mine)
    order = drained(queue)
    really = sum(item.cost for item in order[: order.index(mine)])
    largest = max(new[1], *(cost for _, cost, _, _ in rows))
    assert abs(said - really) <= 4 * (QUANTUM + 2 * largest)
    assert_empty(queue)


# --- bounds and books ---

OPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 30), st.integers(1, 100)),
        st.tuples(st.just("take")),
        st.tuples(st.just("remove"), st.integers(0, 100)),
        st.tuples(st.just("late"), st.integers(1, 100)),
    ),
    max_size=80,
)


@SLOW
@given(OPS, st.integers(0, 12), st.integers(1, 200), st.sampled_from([0.3, 0.5, 1.0]))
def test_bounds_hold_and_books_add_up(
    loop: asyncio.AbstractEventLoop, ops: list[tuple[object, ...]], requests: int, tokens: int, share: float
) -> None:
    make, queue, model = Maker(loop), FairQueue(requests, tokens, share), list[Waiting]()
    for op in ops:
        if op[0] == "add":
            _, tenant, priority, size, deadline = op
            item = make(str(tenant), float(size), priority=priority, tokens=size, deadline=float(deadline))  # type: ignore[arg-type]
            _let_in(queue, model, item)
        elif op[0] == "take" and model:
            item = queue.pop()
            assert item.request.priority == min(x.request.priority for x in model)
            mates = [x for x in model if (x.request.tenant, x.request.priority) == _key(item)]
            assert item.order == min(x.order for x in mates)
            model.remove(item)
        elif op[0] == "remove" and model:
            item = model.pop(op[1] % len(model))  # type: ignore[operator]
            queue.remove(item)
        elif op[0] == "late":
            gone = queue.pop_late(float(op[1]))  # type: ignore[arg-type]
            assert {x.number for x in gone} == {x.number for x in model if x.start_by < op[1]}  # type: ignore[operator]
            model = [x for x in model if x not in gone]
        _check(queue, model, requests, tokens)
    for item in model:
        assert item.queued
        queue.remove(item)
    assert_empty(queue)
    assert not queue._by_arrival


def _key(item: Waiting) -> tuple[str, int]:
    return item.request.tenant, item.request.priority


def _let_in(queue: FairQueue, model: list[Waiting], item: Waiting) -> None:
    """As the gate does."""
    if queue.over_share(item.request.tenant, item.tokens):
        return
    if queue.full(item.tokens):
        victim = queue.victim(item.request.tenant, item.request.priority)
        if victim is None or queue.full(item.tokens, without=victim):
            return
        assert victim.request.priority >= item.request.priority
        queue.remove(victim)
        model.remove(victim)
    queue.add(item)
    model.append(item)


def _check(queue: FairQueue, model: list[Waiting], requests: int, tokens: int) -> None:
    assert len(queue) == len(model) <= requests
    assert queue.tokens == sum(x.tokens for x in model)
    assert len(model) == 1 or queue.tokens <= tokens
    assert math.isclose(queue.cost, sum(x.cost for x in model), abs_tol=1e-6)
    assert {name: held.requests for name, held in queue.tenants().items()} == Counter(x.request.tenant for x in model)
    assert {x.number for x in queue} == {x.number for x in model}


def test_a_full_queue_makes_room_for_who_has_less_or_is_more_important(make: Maker) -> None:
    queue = FairQueue(4, 1000, 1.0)
    mine = [make("greedy") for _ in range(4)]
    for item in mine:
        queue.add(item)
    assert queue.full(10)
    assert queue.victim("greedy", 0) is None
    assert queue.victim("modest", 1) is None, "the less important one goes nowhere"
    assert queue.victim("modest", 0) is mine[-1]
    assert queue.victim("greedy", -1) is mine[-1]
    queue.remove(mine[-1])
    queue.add(make("modest"))
    queue.remove(mine[0])
    queue.add(make("modest"))
    assert queue.victim("modest", 0) is None, "both have the same now"


# --- metrics, drain and tenants ---


def test_tenants_that_clients_make_up_do_not_fill_the_metrics(make: Maker) -> None:
    queue, registry = unbounded(), CollectorRegistry()
    metrics = AdmissionMetrics(registry, queue, lambda: 7.0)
    for i in range(200):
        queue.add(make(f"t{i}", priority=i % 3 - 1))
    text = generate_latest(registry).decode()
    assert text.count("baton_router_queue_tenant_requests{") == 51
    assert registry.get_sample_value("baton_router_queue_tenant_requests", {"tenant": "other"}) == 150
    for name, count in (("high", 67), ("normal", 67), ("low", 66)):
        assert registry.get_sample_value("baton_router_queue_requests", {"priority": name}) == count
    item = queue.pop()
    metrics.started(item, 0.5)
    assert registry.get_sample_value("baton_router_queue_wait_seconds_sum", {"priority": "high"}) == 0.5
    assert registry.get_sample_value("baton_router_queue_tokens") == 1990
    assert registry.get_sample_value("baton_router_queue_drain_tokens_per_second") == 7.0


def test_the_drain_rate_is_what_left_over_the_time_that_there_was_a_queue() -> None:
    drain = DrainRate()
    assert drain.rate(1000.0, 0.0) == 0.0, "nothing is known"
    drain.add_served(100.0, 2.0)
    assert drain.rate(1000.0, 0.0) == pytest.approx(500), "Little's law before anything was seen"
    assert drain.rate(0.0, 0.0) == 0.0
    drain.start(0.0)
    for tenth in range(1, 601):
        drain.add_left(30.0, tenth / 10)
    assert drain.rate(1000.0, 60.0) == pytest.approx(300, rel=0.1)
    drain.stop(60.0)
    assert drain.rate(1000.0, 1000.0) == pytest.approx(300, rel=0.1), "a time without a queue says nothing"
    drain.start(1000.0)
    assert drain.rate(0.0, 1100.0) < 10, "nothing leaves any more"


def test_served_requests_tell_how_long_they_take() -> None:
    drain = DrainRate()
    for _ in range(50):
        drain.add_served(100.0, 0.5)
    assert drain.rate(1000.0, 0.0) == pytest.approx(2000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_tenant_share", 0.0),
        ("queue_tenant_share", 1.5),
        ("queue_requests", -1),
        ("queue_tokens", 0),
        ("queue_timeout_s", 0.0),
        ("instance_slots", -1),
        ("prefill_queue_tokens", -1),
    ],
)
def test_bounds_that_cannot_be_name_their_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_names_of_tenants_say_nothing_of_salts_and_people() -> None:
    tenants = Tenants()
    assert tenants.name(Accounts.of_keys("k").identify("Bearer k"), "salt", "me") == "key-8254c329"
    assert tenants.name(None, "", "") == ""
    salt, user = tenants.name(None, "secret", "me"), tenants.name(None, "", "me")
    assert salt.startswith("salt-")
    assert user.startswith("user-")
    assert "secret" not in salt
    assert tenants.name(None, "secret", "you") == salt != tenants.name(None, "other", "you")
    assert Tenants().name(None, "secret", "") != salt, "a guess cannot be tried out elsewhere"


# --- priority is no way around weights ---


def weighted(*, floor: int = 0) -> Accounts:
    tenants = {"heavy": {"keys": ["heavy"], "weight": 10}, "light": {"keys": ["light"], "priority_floor": floor}}
    return Accounts(entries_of_tenants({"tenants": tenants}), b"secret")


async def asked(accounts: Accounts, tenant: str, priority: int) -> RoutedRequest:
    """Return a request as the router's queue gets it."""
    account = accounts.identify(f"Bearer {tenant}")
    request = TextRequest("def", SamplingParams(max_tokens=1), priority=priority, account=account)
    processor = InputProcessor(ScriptedDispatcher(), TextModelCache(), GenerationMetrics(CollectorRegistry()))
    return (await processor.prepare(request)).routed


@pytest.mark.parametrize(("floor", "share"), [(0, 10), (-5, 0)])
async def test_priority_does_not_defeat_weights(make: Maker, floor: int, share: int) -> None:
    accounts, queue, served = weighted(floor=floor), unbounded(), Counter[str]()
    heavy, light = await asked(accounts, "heavy", 0), await asked(accounts, "light", -1000)
    assert (heavy.priority, light.priority) == (0, floor)
    for _ in range(1000):
        for request in (heavy, light):
            item = make(request.tenant, 100)
            item.request, item.priority = request, request.priority
            queue.add(item)
    for _ in range(1000):
        served[queue.pop().request.tenant] += 1
    assert served["heavy"] == pytest.approx(share * served["light"], rel=0.1)
    assert (await asked(accounts, "light", 7)).priority == 7, "its own work it may put last"


def test_a_single_tenant_has_no_floor_and_a_wrong_one_is_named() -> None:
    alone = Accounts(entries_of_tenants({"tenants": {"a": {"keys": ["a"]}}}), b"secret").identify("Bearer a")
    assert alone is not None
    assert alone.priority_floor == -(2**31)
    for wrong in (1.5, True, "0", 2**31):
        with pytest.raises(ConfigError, match=r"tenants\.a\.priority_floor"):
            entries_of_tenants({"tenants": {"a": {"keys": ["a"], "priority_floor": wrong}}})


def test_who_has_waited_long_takes_turns_with_the_highest_class(make: Maker) -> None:
    queue, order = FairQueue(10**6, 10**9, 1.0, ageing_s=30), list[str]()
    for _ in range(5):
        queue.add(make("low", QUANTUM, priority=9))
    for second in range(60):
        for _ in range(2):  # more than leaves
            item = make("high", QUANTUM, priority=-second % 3)
            item.arrived = float(second)
            queue.add(item)
        queue.age(float(second))
        order.append(queue.pop().request.tenant)
    assert "low" not in order[:30]
    assert order[30:].count("low") == 5
    assert set(order[30:40]) == {"low", "high"}, "in turns, not first"
    while len(queue):
        queue.age(1000.0)
        queue.pop()
    assert_empty(queue)
    assert not queue._aged
    assert not queue._by_arrival


def test_priority_takes_no_place_from_other_tenants(make: Maker) -> None:
    queue = FairQueue(4, 1000, 1.0)
    others = [make(f"other{i}", priority=5) for i in range(3)]
    for item in others:
        queue.add(item)
    queue.add(mine := make("mine", priority=5))
    assert queue.victim("late", -1000) is None, "all have as much as the newcomer would"
    assert queue.victim("mine", -1000) is mine, "its own it may replace"
    queue.remove(others[0])
    queue.add(second := make("other1", priority=5))
    assert queue.victim("late", 5) is queue.victim("late", -1000) is second
