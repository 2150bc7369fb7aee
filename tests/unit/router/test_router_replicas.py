"""How routers divide a capacity, what they believe of each other, and who waits for room."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.router import RouterConfig
from baton.types import Role
from baton_router.registry.load import LoadTracker, Waiters
from baton_router.replication.capacity import CapacityShare, InstanceCapacity, Peers, fair_shares
from baton_router.replication.wire import Entry, EntryError, Registered, Totals, decode, encode

WANTS = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 100), min_size=1, max_size=8)


@given(capacity=st.integers(0, 100), wants=WANTS)
def test_shares_add_up_and_nobody_is_left_out(capacity: int, wants: dict[str, int]) -> None:
    shares = fair_shares(capacity, wants)
    assert shares.keys() == wants.keys()
    assert sum(shares.values()) == capacity
    assert min(shares.values()) >= min(capacity // len(wants), max(1, capacity // (2 * len(wants))))


@given(capacity=st.integers(0, 100), wants=WANTS)
def test_shares_are_max_min_fair(capacity: int, wants: dict[str, int]) -> None:
    shares = fair_shares(capacity, wants)
    for poor in wants:
        if shares[poor] >= wants[poor]:
            continue
        for rich in wants:  # nobody has more than one that goes short by more than what cannot be divided
            assert shares[rich] <= max(shares[poor] + len(wants), 1), (shares, poor, rich)


def test_an_idle_fleet_divides_equally_and_a_busy_one_by_need() -> None:
    assert fair_shares(12, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 4, "c": 4}
    assert fair_shares(12, {"a": 50, "b": 1, "c": 1}) == {"a": 8, "b": 2, "c": 2}
    assert fair_shares(12, {"a": 50, "b": 50, "c": 1}) == {"a": 5, "b": 5, "c": 2}
    assert sorted(fair_shares(2, {"a": 5, "b": 5, "c": 5}).values()) == [0, 1, 1]


def entry(sequence: int, *, replica: str = "b", epoch: str = "1", full: bool = False, **requests: int) -> Entry:
    totals = {name: Totals(count, 10 * count) for name, count in requests.items()}
    return Entry(replica, epoch, sequence, totals, full)


def test_entries_travel_and_others_are_refused() -> None:
    sent = Entry("r", "e", 7, {"d0": Totals(1, 2, 3, 4)}, True, 3, (Registered("h:1", Role.DECODE),))
    assert decode(encode(sent)) == sent
    good = encode(sent)
    for bad in (b"", b"[]", b"{}", good.replace(b'"v":1', b'"v":2'), good.replace(b"[1,2,3,4]", b"[1,2,3,-4]")):
        with pytest.raises(EntryError):
            decode(bad)
    for bad in (good.replace(b'"decode"', b'"cook"'), good.replace(b'"r"', b'""'), good.replace(b"[1,2,3,4]", b"7")):
        with pytest.raises(EntryError):
            decode(bad)


def test_peers_take_news_in_order_and_forget_who_falls_silent() -> None:
    clock = [100.0]
    peers = Peers("a", 3.0, lambda: clock[0])
    assert not peers.apply(entry(1, replica="a", d0=9)), "its own"
    assert peers.apply(entry(1, d0=2, d1=1))
    assert peers.apply(entry(3, d0=5))
    assert not peers.apply(entry(2, d0=1)), "an old one"
    assert (peers.in_flight("d0"), peers.in_flight("d1")) == ((5, 50), (1, 10))
    peers.apply(entry(4, full=True, d0=1))
    assert (peers.in_flight("d0"), peers.in_flight("d1")) == ((1, 10), (0, 0))
    peers.apply(entry(1, epoch="2", full=True, d1=2))
    assert (peers.in_flight("d0"), peers.in_flight("d1")) == ((0, 0), (2, 20)), "another process of the same name"
    clock[0] += 3.5
    assert [x.name for x in peers.expire()] == ["b"]
    assert peers.expire() == []
    assert peers.in_flight("d1") == (0, 0)
    peers.apply(entry(2, epoch="2"))
    assert peers.in_flight("d1") == (2, 20)
    peers.apply(Entry("b", "2", 3, left=True))
    assert peers.all() == []


def make_units(*, expected: int = 0) -> tuple[InstanceCapacity, CapacityShare, list[int]]:
    freed: list[int] = []
    units = InstanceCapacity("a", 12, expected, shared=True, freed=freed.append)
    part = units.parts["d0"] = CapacityShare(12, LoadTracker(Role.DECODE, limit=0))
    return units, part, freed


def test_units_grow_only_when_granted_and_shrink_before_redis_is_told() -> None:
    units, part, freed = make_units()
    peers = Peers("a", 3.0, lambda: 0.0)
    (claim,) = units.claims(peers, waiting=0)
    assert (claim.units, claim.held, part.tracker.limit) == (12, 0, 0), "nothing before it was granted"
    units.granted(claim, 9)
    assert (part.held, part.tracker.limit, freed) == (9, 9, [9])
    part.tracker.requests = 9
    peers.apply(Entry("b", "1", 1, {"d0": Totals(wants=50)}))
    assert units.claims(peers, waiting=0) == [], "what is in use stays written down"
    assert part.tracker.limit == 6, "takes effect at once"
    part.tracker.requests = 4
    (claim,) = units.claims(peers, waiting=0)
    assert claim.units == part.tracker.limit == 6


def test_units_given_up_are_gone_although_the_answer_was_lost() -> None:
    units, part, _ = make_units()
    part.held = part.tracker.limit = 12
    peers = Peers("a", 3.0, lambda: 0.0)
    peers.apply(Entry("b", "1", 1, {"d0": Totals(wants=50)}))
    (claim,) = units.claims(peers, waiting=0)
    given_up = claim.units
    assert given_up < 12
    peers.apply(Entry("b", "1", 2, left=True))
    (claim,) = units.claims(peers, waiting=0)
    assert claim.units == 12, "wanted back"
    assert part.tracker.limit == given_up, "but not used before it is granted"
    (held,) = units.holdings(sure=True)
    assert (held.units, held.used) == (given_up, given_up)


def test_alone_a_router_keeps_to_an_equal_part_and_nothing_unheard_of() -> None:
    units, part, _ = make_units()
    part.held = part.tracker.limit = 9
    units.alone(3)
    assert part.tracker.limit == 4
    units.alone(2)
    assert part.tracker.limit == 4, "it never grows without Redis"


async def test_room_wakes_in_order_and_passes_on_a_turn_that_is_not_used() -> None:
    room, woken = Waiters(), list[int]()

    async def wait(number: int) -> None:
        await room.wait(60)
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert len(room) == 4
    room.wake(2)
    tasks[0].cancel()  # woken, and gone before it could run
    await asyncio.gather(*tasks[:3], return_exceptions=True)
    assert woken == [1, 2]
    await asyncio.wait_for(room.wait(0.0), 240)
    assert len(room) == 1
    room.wake_all()
    await tasks[3]
    assert len(room) == 0


def test_configuration_names_what_is_wrong() -> None:
    for options, field in (
        ({"redis": "localhost"}, "redis"),
        ({"redis_prefix": ""}, "redis_prefix"),
        ({"replica_name": "a\n"}, "replica_name"),
        ({"max_inflight_per_instance": -1}, "max_inflight_per_instance"),
    ):
        with pytest.raises(Exception) as refused:  # noqa: PT011
            RouterConfig(**options)  # type: ignore[arg-type]
        assert refused.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("now", "news"),
    [
        (Totals(3, 10_000, 2, 4), False),
        (Totals(3, 10_900, 2, 4), False),
        (Totals(3, 11_500, 2, 4), True),
        (Totals(3, 8_500, 2, 4), True),
        (Totals(4, 10_000, 2, 4), True),
        (Totals(3, 10_000, 3, 4), True),
        (Totals(3, 10_000, 2, 5), True),
    ],
)
def test_tokens_are_news_when_they_change_by_more_than_an_eighth(now: Totals, news: bool) -> None:
    assert now.is_news(Totals(3, 10_000, 2, 4)) is news
    assert now.is_news(None)


def test_wishes_rise_when_a_share_may_become_another() -> None:
    clock = [100.0]
    peers = Peers("a", 3.0, lambda: clock[0])

    def after(*changes: Entry) -> int:
        before = peers.wishes
        for change in changes:
            assert peers.apply(change)
        return peers.wishes - before

    def told(sequence: int, *, full: bool = False, **totals: Totals) -> Entry:
        return Entry("b", "1", sequence, totals, full)

    assert after(told(1)) == 1, "one that came"
    assert after(told(2, d0=Totals(1, 10, 1, 2))) == 1
    assert after(told(3, d0=Totals(2, 99, 2, 2)), told(4, full=True, d0=Totals(2, 99, 2, 2))) == 0, "same wishes"
    assert after(told(5, d0=Totals(2, 99, 2, 3))) == 1
    assert after(told(6, full=True)) == 1, "nothing any more"
    clock[0] += 4
    peers.expire()
    assert after(told(7)) == 1, "came back"
