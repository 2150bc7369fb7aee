"""Bodies that arrive and are decoded: values are counted before, memory is bounded, and no body waits for ever."""

from __future__ import annotations

import orjson
import pytest

from baton.errors import InvalidRequestError
from baton_router.frontend.http.bodies import (
    MAX_CONTAINERS,
    MAX_VALUES,
    Body,
    BodyBudget,
    decode_json,
    max_body_bytes,
)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"metadata":[' + b"[]," * 1_000_000 + b"[]]}", "lists and objects"),
        (b'{"tools":[' + b'{"a":[]},' * 200_000 + b"1]}", "lists and objects"),
        (b'{"prompt":[' + b"1," * 2_000_000 + b"1]}", "values"),
        (b'{"stop":[' + b'"",' * 1_200_000 + b'""]}', "strings"),
        (b'{"a":"\\\\","metadata":[' + b"[]," * 1_000_000 + b"[]]}", "lists and objects"),
        (b'{"a":"\\"","metadata":[' + b"[]," * 1_000_000 + b"[]]}", "lists and objects"),
    ],
)
def test_too_many_values_are_refused_without_being_decoded(
    monkeypatch: pytest.MonkeyPatch, body: bytes, what: str
) -> None:
    def loads(data: bytes) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("baton_router.frontend.http.bodies.orjson.loads", loads)
    with pytest.raises(InvalidRequestError, match=f"too many {what}"):
        decode_json(body)


def test_what_is_in_strings_is_no_value() -> None:
    text = 'a, b [c] {d} \\ " \\" ' * 200_000
    assert text.count(",") + 2 * text.count("[") > MAX_CONTAINERS
    value = {"messages": [{"role": "user", "content": text}], "prompt": [1] * (MAX_VALUES // 2)}
    assert decode_json(bytearray(orjson.dumps(value))) == value


def test_a_body_may_be_as_long_as_the_context_needs() -> None:
    assert max_body_bytes(4096) == 4 << 20
    assert max_body_bytes(131072) == 8 << 20
    assert max_body_bytes(10_000_000) == 16 << 20


class Rig:
    """A budget, and which bodies were resumed."""

    def __init__(self) -> None:
        self.budget = BodyBudget(most=1000, share=400, free=10)
        self.resumed: list[str] = []

    def open(self, tenant: str, name: str) -> Body:
        return self.budget.open(tenant, lambda: self.resumed.append(name))


async def test_a_tenants_bodies_wait_for_its_oldest_and_go_on_when_it_is_decoded() -> None:
    rig = Rig()
    first, second, third = (rig.open("a", name) for name in "123")
    other = rig.open("b", "b")
    assert first.add(b"x" * 300)
    assert second.add(b"x" * 200)
    assert second.waits
    assert third.add(b"x" * 10)
    assert not third.waits, "what is short need not wait"
    assert first.add(b"x" * 200)
    assert not first.waits, "the oldest goes on, else none would ever end"
    assert other.add(b"x" * 200)
    assert not other.waits, "others have a share of their own"
    assert not second.add(b"x" * 200), "it did not wait, and far too much is there"
    assert rig.resumed == []
    first.close()
    assert rig.resumed == ["2"]
    assert not second.waits
    for body in (first, second, third, other):
        body.close()
    assert rig.budget.num_bytes == 0
    assert not rig.budget._tenants
    assert not rig.budget._waiting


async def test_all_together_wait_for_the_oldest() -> None:
    rig = Rig()
    bodies = [rig.open(f"t{i}", str(i)) for i in range(4)]
    for body in bodies:
        assert body.add(b"x" * 300)
    assert [body.waits for body in bodies] == [False, False, False, True]
    assert bodies[1].add(b"x" * 50)
    assert bodies[1].waits
    assert bodies[0].add(b"x" * 500)
    assert not bodies[0].waits
    bodies[0].close()
    assert rig.resumed == ["3", "1"]
    for body in bodies:
        body.close()
    assert rig.budget.num_bytes == 0


async def test_slow_tenants_keep_no_tenant_with_less_waiting() -> None:
    rig = Rig()
    slow = [rig.open(f"slow{i}", f"slow{i}") for i in range(3)]
    for body in slow:
        assert body.add(b"x" * 340)
    other = rig.open("other", "other")
    assert other.add(b"x" * 200)
    assert not other.waits, "less than a quarter"
    assert other.add(b"x" * 100)
    assert other.waits
    more = [rig.open(f"more{i}", f"more{i}") for i in range(30)]
    for body in more:
        body.add(b"x" * 30)
    assert rig.budget.num_bytes > 2000
    assert [body.waits for body in more].count(False) >= 22
    assert more[-1].waits, "twice as much is the end"
    for body in [*slow, other, *more]:
        body.close()
    assert rig.budget.num_bytes == 0
    assert not rig.budget._waiting
