"""API keys and the tenants they stand for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.config.router import RouterConfig
from baton.errors import ConfigError, InvalidRequestError, QueueFullError
from baton.hashing import root_hash
from baton.types import RequestId, Role, SamplingParams
from baton_router.accounts import (
    AccountEntry,
    Accounts,
    FileAccounts,
    entries_of_lines,
    entries_of_tenants,
    read_entries,
    read_secret,
)
from baton_router.admission.estimates import Estimates, Room
from baton_router.admission.gate import Admission, TenantLimits
from baton_router.frontend.grpc.servicer import SERVICE, admits_clients
from baton_router.metrics import Amount
from baton_router.registry.instance import Instance
from baton_router.scheduler.placer import Fleet, Placer
from baton_router.scheduler.speeds import Speeds
from baton_router.types import Account, RoutedRequest

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SECRET = b"0123456789abcdef"
TENANTS = {
    "tenants": {
        "acme": {"keys": ["sk-acme", "sk-acme-2"], "weight": 2, "kv_bytes": 1 << 20, "admin": True},
        "beta": {"key_sha256": [hashlib.sha256(b"sk-beta").hexdigest()], "requests_per_minute": 6},
    }
}


def accounts(value: object = TENANTS, secret: bytes = SECRET) -> Accounts:
    return Accounts(entries_of_tenants(value), secret)


def test_a_key_stands_for_its_tenant() -> None:
    book = accounts()
    acme, beta = book.identify("Bearer sk-acme"), book.identify("bearer sk-beta")
    assert acme is not None
    assert beta is not None
    assert (acme.name, acme.weight, acme.tenant.kv_bytes, acme.admin, acme.limited) == (
        "acme",
        2.0,
        1 << 20,
        True,
        False,
    )
    assert (beta.name, beta.weight, beta.admin, beta.limited) == ("beta", 1.0, False, True)
    assert book.identify("Bearer sk-acme-2") is acme
    for wrong in ("", "sk-acme", "Basic sk-acme", "Bearer sk-acm", "Bearer \ud800", "Bearer sk-acme,sk-beta"):
        assert book.identify(wrong) is None


def test_salts_are_apart_and_stay() -> None:
    one, again, other = accounts(), accounts(), accounts(secret=b"another secret of routers")
    seen = set()
    for key in ("sk-acme", "sk-beta"):
        account, same, foreign = (x.identify(f"Bearer {key}") for x in (one, again, other))
        assert account is not None
        assert same is not None
        assert foreign is not None
        for salt in ("", "a", "b"):
            assert account.salt(salt) == same.salt(salt)
            assert account.salt(salt) != foreign.salt(salt)
            seen.add(account.salt(salt))
        assert str(SECRET) not in repr(account)
    assert len(seen) == 6


@CALM
@given(st.text(max_size=100), st.text(max_size=100))
def test_no_salt_of_a_client_leads_into_another_tenants_cache(mine: str, theirs: str) -> None:
    acme, beta = accounts().identify("Bearer sk-acme"), accounts().identify("Bearer sk-beta")
    assert acme is not None
    assert beta is not None
    assert root_hash(b"kv", acme.salt(mine)) != root_hash(b"kv", beta.salt(theirs))
    assert acme.salt(beta.salt(theirs)) != beta.salt(theirs)
    assert (acme.salt(mine) == acme.salt(theirs)) == (mine == theirs)


def test_a_salt_has_a_bound() -> None:
    acme = accounts().identify("Bearer sk-acme")
    assert acme is not None
    with pytest.raises(InvalidRequestError) as caught:
        acme.salt("x" * 513)
    assert caught.value.field == "cache_salt"


def test_lines_name_tenants_after_their_keys() -> None:
    both, rest = entries_of_lines("# ours\none\n\n two \n"), entries_of_lines("two\n")
    assert {x.tenant.id for x in both.values()} == {
        f"key-{hashlib.sha256(k).hexdigest()[:8]}" for k in (b"one", b"two")
    }
    digest = hashlib.sha256(b"two").digest()
    assert both[digest].tenant == rest[digest].tenant  # taking a line out gives nobody another's cache


def test_a_lone_tenant_is_the_administrator() -> None:
    lone, two = Accounts.of_keys("one"), Accounts.of_keys("one", "two")
    assert [x.admin for book in (lone, two) if (x := book.identify("Bearer one")) is not None] == [True, False]
    two.replace(entries_of_lines("one"))  # what the others did is still there to be seen
    left = two.identify("Bearer one")
    assert left is not None
    assert (left.admin, left.priority_floor) == (False, 0)


def test_what_is_written_of_a_lone_tenant_holds() -> None:
    written: dict[str, Any] = {"keys": ["one"], "admin": False, "priority_floor": 3}
    lone = Accounts(entries_of_tenants({"tenants": {"a": written}}), b"secret").identify("Bearer one")
    assert lone is not None
    assert (lone.admin, lone.priority_floor) == (False, 3)


@pytest.mark.parametrize("name", ["keys.toml", "keys.json", "keys.txt"])
def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    texts = {
        "keys.toml": '[tenants.acme]\nkeys = ["one"]\n',
        "keys.json": json.dumps({"tenants": {"acme": {"keys": ["one"]}}}),
        "keys.txt": "one\n",
    }
    path.write_text(texts[name])
    assert list(read_entries(path)) == [hashlib.sha256(b"one").digest()]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as caught:
        read_entries(path)
    assert caught.value.field == "api_keys"
    path.write_text({"keys.toml": "[tenants]", "keys.json": '{"tenants": {}}', "keys.txt": "# none\n"}[name])
    with pytest.raises(ConfigError, match="has no key"):
        read_entries(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_entries(tmp_path / "absent")


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({}, "tenants"),
        ({"tenants": []}, "tenants"),
        ({"tenants": {"a": []}}, "tenants.a"),
        ({"tenants": {"a b": {"keys": ["k"]}}}, "tenants.a b"),
        ({"tenants": {"a": {}}}, "no key"),
        ({"tenants": {"a": {"keys": "k"}}}, "tenants.a.keys"),
        ({"tenants": {"a": {"keys": ["k k"]}}}, "key"),
        ({"tenants": {"a": {"key_sha256": ["12"]}}}, "tenants.a.key_sha256"),
        ({"tenants": {"a": {"keys": ["k"], "weight": 0}}}, "tenants.a.weight"),
        ({"tenants": {"a": {"keys": ["k"], "weight": float("nan")}}}, "tenants.a.weight"),
        ({"tenants": {"a": {"keys": ["k"], "kv_bytes": -1}}}, "tenants.a.kv_bytes"),
        ({"tenants": {"a": {"keys": ["k"], "kv_bytes": True}}}, "tenants.a.kv_bytes"),
        ({"tenants": {"a": {"keys": ["k"], "admin": 1}}}, "tenants.a.admin"),
        ({"tenants": {"a": {"keys": ["k"], "quota": 1}}}, "tenants.a.quota"),
        ({"tenants": {"a": {"keys": ["k"]}, "b": {"keys": ["k"]}}}, "twice"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(value: object, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        entries_of_tenants(value)
    assert where in caught.value.message


@CALM
@given(st.binary(max_size=400), st.sampled_from([".toml", ".json", ""]))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        assert read_entries(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@CALM
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", ""]),
        st.dictionaries(
            st.sampled_from(["keys", "key_sha256", "weight", "kv_bytes", "admin", "max_in_flight", "x"]), json_values
        ),
    )
)
def test_any_table_is_read_or_refused(tenants: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        entries_of_tenants({"tenants": tenants})


async def test_keys_come_and_go_while_it_runs(tmp_path: Path) -> None:
    path, secret = tmp_path / "keys", tmp_path / "secret"
    path.write_text("one\n")
    secret.write_bytes(SECRET)
    file = FileAccounts(str(path), str(secret), shared=True)
    before = file.accounts.identify("Bearer one")
    assert before is not None
    assert not await file.renew()
    path.write_text("one\ntwo\n")
    assert await file.renew()
    after = file.accounts.identify("Bearer one")
    assert after is not None
    assert after.salt("") == before.salt("")
    assert file.accounts.identify("Bearer two") is not None
    path.write_text("# broken\n")
    assert not await file.renew()
    assert file.accounts.identify("Bearer two") is not None
    path.write_text("two\n")
    assert await file.renew()
    assert file.accounts.identify("Bearer one") is None


def test_routers_that_share_tenants_need_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    with pytest.raises(ConfigError) as caught:
        FileAccounts(str(path), "", shared=True)
    assert caught.value.field == "tenant_secret_file"
    (tmp_path / "short").write_text("short")
    for bad in ("short", "absent"):
        with pytest.raises(ConfigError) as caught:
            read_secret(str(tmp_path / bad))
        assert caught.value.field == "tenant_secret_file"


def limited(**limits: int) -> Account:
    account = accounts({"tenants": {"a": {"keys": ["k"], **limits}}}).identify("Bearer k")
    assert account is not None
    return account


def test_limits_of_a_tenant() -> None:
    now = [0.0]
    books = TenantLimits(lambda: now[0], Amount())
    few = limited(max_in_flight=2)
    books.begin(few, 10)
    books.begin(few, 10)
    with pytest.raises(QueueFullError, match="at once"):
        books.begin(few, 10)
    books.end(few)
    books.begin(few, 10)

    books = TenantLimits(lambda: now[0], Amount())
    slow = limited(requests_per_minute=6)
    for _ in range(6):
        books.begin(slow, 10)
    with pytest.raises(QueueFullError, match="6 requests a minute") as caught:
        books.begin(slow, 10)
    assert caught.value.retry_after_s == pytest.approx(10)
    now[0] += 10
    books.begin(slow, 10)

    books = TenantLimits(lambda: now[0], Amount())
    small = limited(tokens_per_minute=600)
    books.begin(small, 1200)  # more than a minute's worth, of a full bucket
    with pytest.raises(QueueFullError, match="600 tokens a minute") as caught:
        books.begin(small, 60)
    assert caught.value.retry_after_s == pytest.approx(66)
    now[0] += 66
    books.begin(small, 60)


@CALM
@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 500)), max_size=60))
def test_no_tenant_gets_more_than_its_rate(asks: list[tuple[float, float]]) -> None:
    now, taken, account = [0.0], 0.0, limited(tokens_per_minute=600, requests_per_minute=30)
    books = TenantLimits(lambda: now[0], Amount())
    let_in = 0
    for pause, cost in asks:
        now[0] += pause
        with contextlib.suppress(QueueFullError):
            books.begin(account, cost)
            taken, let_in = taken + cost, let_in + 1
    assert taken <= 600 + 10 * now[0] + 1e-6
    assert let_in <= 30 + now[0] / 2 + 1e-6


class NoInstances:
    def ready(self, role: Role) -> list[Instance]:
        return []


async def test_output_that_a_client_gives_counts_like_its_prompt() -> None:
    speeds = Speeds()
    fleet = cast(Fleet, NoInstances())
    room = Room(fleet, speeds, None, None, time.monotonic)
    admission = Admission(room, Estimates(cast(Placer, None), speeds, fleet), RouterConfig(), CollectorRegistry())
    account = limited(tokens_per_minute=2000)
    sampling = SamplingParams(max_tokens=905, seed=1)
    given = RoutedRequest(RequestId("r"), [1] * 10, sampling, account=account, output_token_ids=[1] * 900)
    for _ in range(2):
        admission.release(await admission.enter(given), 5)
    with pytest.raises(QueueFullError, match="2000 tokens a minute"):
        await admission.enter(given)


async def test_what_a_tenant_is_charged_in_advance_is_moved_by_its_own_answers_alone() -> None:
    speeds = Speeds()
    fleet = cast(Fleet, NoInstances())
    estimates = Estimates(cast(Placer, None), speeds, fleet)
    room = Room(fleet, speeds, None, None, time.monotonic)
    admission = Admission(room, estimates, RouterConfig(), CollectorRegistry())
    held = accounts({"tenants": {"a": {"keys": ["k"], "tokens_per_minute": 10**9}, "b": {"keys": ["l"]}}})

    async def charge(max_tokens: int, *, n: int = 1, generated: int = 0, announced: int | None = None) -> float:
        sampling = SamplingParams(max_tokens=max_tokens, n=n)
        account = held.identify("Bearer k")
        request = RoutedRequest(RequestId("r"), [1], sampling, account=account, expected_tokens=announced)
        ticket = await admission.enter(request)
        admission.release(ticket, generated)
        return ticket.expected

    for _ in range(50):  # of another tenant
        speeds.output.add(0.0, 5000.0, speeds.now())
    assert [await charge(100, n=3), await charge(4000)] == [300, 256]
    assert [await charge(4000, n=2, announced=1000), await charge(4000, announced=9)] == [2000, 256]
    announced = RoutedRequest(RequestId("r"), [1], SamplingParams(max_tokens=9000, n=2), expected_tokens=8000)
    assert estimates.output_tokens(announced) == 16_000
    announced.expected_tokens = 9
    assert estimates.output_tokens(announced) == pytest.approx(10_000), "a small number buys no turns in the queue"
    for _ in range(50):
        await charge(4000, n=2, generated=2 * 1000)
    for _ in range(50):
        speeds.output.add(0.0, 1.0, speeds.now())
    assert await charge(4000) == pytest.approx(1000, rel=0.01)
    assert await charge(300) == 300


def test_keys_need_the_services_token() -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(api_keys="keys")
    assert caught.value.field == "token_file"
    RouterConfig(api_keys="keys", token_file="token")


def test_what_is_for_services_is_closed_to_keys_and_to_callers_without_any() -> None:
    held = accounts({"tenants": {"a": {"keys": ["one"]}, "ops": {"keys": ["root"], "admin": True}}})
    admits = admits_clients(held)
    assert admits is not None
    for name in ("Register", "Heartbeat", "Deregister", "ListInstances", "GetStats"):
        assert not admits(f"/{SERVICE}/{name}", "Bearer one"), name
        assert not admits(f"/{SERVICE}/{name}", None), name
        assert admits(f"/{SERVICE}/{name}", "Bearer root") is (name in ("ListInstances", "GetStats"))
    assert admits(f"/{SERVICE}/Generate", "Bearer one")
    assert not admits(f"/{SERVICE}/Generate", None)
    assert admits_clients(None) is None


async def test_a_file_is_read_again_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tens of thousands of tenants take seconds to read: requests go on meanwhile."""
    file = tmp_path / "keys.json"
    file.write_text('{"tenants": {"a": {"keys": ["sk-a"]}}}')
    file.chmod(0o600)
    source = FileAccounts(str(file), "", shared=False)
    readers = []

    def read(path: Path) -> dict[bytes, AccountEntry]:
        readers.append(threading.current_thread())
        return read_entries(path)

    monkeypatch.setattr("baton_router.accounts.read_entries", read)
    file.write_text('{"tenants": {"a": {"keys": ["sk-a"]}, "b": {"keys": ["sk-b"]}}}')
    assert await source.renew()
    assert len(source.accounts) == 2
    assert readers[0] is not threading.main_thread()
