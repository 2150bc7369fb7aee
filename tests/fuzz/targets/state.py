"""What other processes tell a router: KV events, the numbers of replicas, registrations and API keys in Redis."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
from tests.fuzz.choices import Choices

from baton.api.v1 import events_pb2
from baton.config.router import RouterConfig
from baton.errors import BatonError, ConfigError
from baton.hashing import HashChain
from baton.rpc.channel import Backoff
from baton.rpc.redis import read_registration
from baton_router.accounts import Accounts, entries_of_json, entries_of_lines
from baton_router.indexer.events import EventApplier, EventGapError
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry import discovery as discoveries
from baton_router.registry.discovery import UNANSWERED, GoneError, KubernetesDiscovery
from baton_router.registry.registry import Registry
from baton_router.replication.capacity import Peers
from baton_router.replication.wire import Entry, EntryError, decode, encode

_TIERS = ["", "device", "host", "disk", "remote", "tape", "\n"]


def _names(choices: Choices) -> list[bytes]:
    begin, step = choices.number(0, 40), choices.pick([1, 1, 3])
    made = [bytes([begin + step * i]) * 32 for i in range(choices.number(0, 12))]
    return made if choices.number(0, 7) else [each[: choices.number(0, 40)] for each in made]


def _put(choices: Choices, said: events_pb2.KvBlocksStored | events_pb2.KvBlocksRemoved) -> None:
    """Name blocks, one by one or packed."""
    if choices.flag():
        whole = [each for each in _names(choices) if len(each) == 32]  # of half a hash the index knows half
        said.packed_hashes = b"".join(whole) + choices.take(choices.pick([0, 0, 31]))
    if choices.flag() or not said.packed_hashes:
        said.block_hashes.extend(_names(choices))


def events(data: bytes) -> None:
    """Any batches in any order: applied, or a gap; afterwards the index holds what a plain set says it does."""
    choices, index, now = Choices(data), PrefixIndex(), [0.0]
    appliers = [EventApplier(index, now=lambda: now[0], stale_limit_s=10) for _ in range(2)]
    held: list[set[bytes]] = [set(), set()]
    exact = [False, False]
    while choices.more():
        at = choices.number(0, 1)
        applier = appliers[at]
        now[0] += choices.number(0, 3)
        batch = events_pb2.KvEventBatch(
            epoch=choices.pick([b"a" * 16, b"b" * 16, b""]),
            sequence=choices.number(0, 6) if choices.flag() else applier._sequence + 1,
            snapshot=choices.number(0, 3) == 0,
            more=choices.number(0, 7) == 0,
        )
        for _ in range(choices.number(0, 3)):
            event, kind = batch.events.add(), choices.number(0, 3)
            if kind == 0:
                _put(choices, event.stored)
                event.stored.tier = choices.pick(_TIERS)
            elif kind == 1:
                _put(choices, event.removed)
                event.removed.tier = choices.pick(_TIERS)
            elif kind == 2:
                event.cleared.tier = choices.pick(_TIERS)
        try:
            if choices.number(0, 7) == 0:
                applier.heartbeat(batch, 1.0)
                continue
            applied = applier.apply(batch)
        except EventGapError:
            held[at], exact[at] = (held[at], exact[at]) if applier._known else (set(), False)
            continue
        if batch.snapshot:
            held[at], exact[at] = set(), True
        for event in batch.events if applied else ():
            name = event.WhichOneof("event")
            if name is None or getattr(event, name).tier not in ("", "device"):
                continue
            if name == "cleared":
                held[at] = set()
                continue
            said = getattr(event, name)
            right = {each for each in said.block_hashes if len(each) == 32}
            whole = range(0, len(said.packed_hashes) - 31, 32)
            right |= {said.packed_hashes[at : at + 32] for at in whole}
            held[at] = held[at] | right if name == "stored" else held[at] - right
        if exact[at]:
            assert applier.num_blocks == len(held[at])
            for each in list(held[at])[:3]:
                assert index.match_any(HashChain(each), [1 << applier.slot]) == [1]
    for applier in appliers:
        applier.close()


_ENTRY = ["replica", "epoch", "seq", "totals", "full", "count", "registered", "left", "v", "expected"]


def replicas(data: bytes) -> None:
    """An entry of a replica is read and says the same again, or is refused by an ``EntryError``."""
    choices = Choices(data)
    peers = Peers("me", 3.0, lambda: 0.0)
    for _ in range(choices.number(1, 4)):
        if choices.number(0, 3) == 0:
            raw = choices.take(choices.number(0, 300))
        else:
            fields = {
                "replica": choices.pick(["me", "b", "c"]), "epoch": "1", "seq": choices.number(0, 9), "v": 1,
                "totals": {choices.pick(["i", "j"]): [choices.number(0, 9) for _ in range(choices.number(0, 4))]},
                "full": choices.flag(), "left": choices.number(0, 7) == 0,
                "registered": [["a:1", choices.pick(["prefill", "decode", "x"])]] * choices.number(0, 2),
                "expected": {
                    "at": [["i", "ee" * choices.number(0, 70)]] * choices.number(0, 2),
                    "chains": ["QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE="[: choices.pick([44, 43, 4, 0])]],
                    "new": [[choices.number(0, 3), choices.number(0, 2), choices.number(0, 2)]],
                    "over": [choices.number(0, 9)], "live": [],
                },
                **(choices.fields(_ENTRY, 2) if choices.flag() else {}),
            }  # fmt: skip
            try:
                raw = orjson.dumps(fields)
            except TypeError:  # what no JSON can say
                continue
            raw = choices.mutated(raw) if choices.number(0, 3) == 0 else raw
        try:
            entry = decode(raw)
        except EntryError:
            continue
        assert isinstance(entry, Entry)
        assert decode(encode(entry)) == entry
        peers.apply(entry)
        peers.in_flight("i")
        peers.live()
    peers.expire()


_ACCOUNT = [
    *("keys", "key_sha256", "weight", "max_in_flight", "requests_per_minute", "tokens_per_minute", "kv_bytes"),
    *("kv_disk_bytes", "priority_floor", "admin"),
]


class _Found:
    """Who is told of addresses."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def found(self, addresses: set[str]) -> None:
        assert all(isinstance(each, str) for each in addresses)
        self.addresses = addresses


@functools.cache
def _account() -> str:
    path = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    atexit.register(shutil.rmtree, path)
    (path / "token").write_text("token")
    return str(path)


def _slice(choices: Choices) -> dict[str, Any]:
    names = ["metadata", "addressType", "ports", "endpoints", "name", "port", "conditions", "ready", "addresses"]
    endpoint = {"addresses": [choices.text()], "conditions": {"ready": choices.pick([True, False, None])}}
    return {
        "metadata": {"name": choices.pick(["a", "b"]), "resourceVersion": "1"},
        "ports": [{"name": "grpc", "port": choices.integer()}],
        "endpoints": [endpoint | choices.fields(names, 1) for _ in range(choices.number(0, 2))],
        **choices.fields(names, choices.pick([0, 0, 2])),
    }


def _json(choices: Choices, value: Any) -> bytes:
    try:
        data = orjson.dumps(value)
    except TypeError:  # what no JSON can say
        data = b"{}"
    return choices.mutated(data) if choices.number(0, 15) == 0 else data


def _answer(choices: Choices, request: httpx.Request) -> httpx.Response:
    status = choices.pick([200] * 13 + [410, 500, 204])
    if "watch" in request.url.params:
        lines = []
        for _ in range(choices.number(0, 4)):
            kind = choices.pick(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", ""])
            item = {"code": choices.pick([410, 500])} if kind == "ERROR" else _slice(choices)
            event = {"type": kind, "object": choices.pick([item] * 7 + [choices.value()])}
            lines.append(_json(choices, event | choices.fields(["type", "object"], choices.pick([0, 0, 0, 1]))))
        return httpx.Response(status, content=b"\n".join(lines))
    page: dict[str, Any] = {"items": [_slice(choices) for _ in range(choices.number(0, 2))]}
    page["metadata"] = {"resourceVersion": choices.pick(["7", "", 7])}
    if choices.more() and choices.number(0, 3) == 0:
        page["metadata"]["continue"] = choices.pick(["more", choices.value()])
    page |= choices.fields(["items", "metadata"], choices.pick([0, 0, 0, 1]))
    return httpx.Response(status, content=_json(choices, page))


def kubernetes(data: bytes) -> None:
    """What an API server says of EndpointSlices gives addresses, or fails as the watch expects."""
    choices, registry = Choices(data), None
    config = RouterConfig(kubernetes_selector="a=b", kubernetes_api="http://api", kubernetes_account=_account())
    config = replace(config, kubernetes_namespace="n", kubernetes_port="grpc")

    async def follow() -> None:
        watching = KubernetesDiscovery(config, cast("Registry", registry), None)
        found: Any = _Found()
        watching._roles = found
        await watching._api.http.aclose()
        transport = httpx.MockTransport(lambda request: _answer(choices, request))
        async with httpx.AsyncClient(base_url="http://api", transport=transport) as http:
            watching._api.http = http
            while choices.more():
                with contextlib.suppress(*UNANSWERED, GoneError):
                    await watching._list()
                    await watching._watch(Backoff(1.0, random.Random(1)))

    asyncio.run(follow())


def _registration(value: bytes) -> tuple[str, str]:
    fields, _ = read_registration(None, "instance", value, 1_000_000)
    return discoveries._parse(fields)


def registrations(data: bytes) -> None:
    """Values of Redis that others wrote: an instance's registration, the table of API keys; and such a file."""
    choices = Choices(data)
    raw = choices.take(choices.number(0, 200))
    item = {"address": choices.pick(["h:1", "[::1]:9", "h:0", "h", "a b:1", "h:" + "9" * 5000]), "role": "decode"}
    item.update(choices.fields(["address", "role", "epoch"], 2))
    with contextlib.suppress(TypeError):
        whole = orjson.dumps(item)
        for value in (raw, whole, choices.mutated(whole)):
            # What discovery calls a registration that cannot be read.
            with contextlib.suppress(BatonError, ValueError, KeyError, TypeError):
                address, role = _registration(value)
                assert address.rpartition(":")[2].isdigit()
                assert role in ("prefill", "decode")
    tenants = {
        choices.text(): choices.fields(_ACCOUNT, 4) | {"keys": [choices.text()]} for _ in range(choices.number(0, 3))
    }
    accounts = Accounts({}, b"s" * 32)
    with contextlib.suppress(TypeError):
        whole = orjson.dumps({"tenants": tenants})
        for value in (raw, whole, choices.mutated(whole)):
            with contextlib.suppress(ConfigError):
                accounts.replace(entries_of_json(value))
    with contextlib.suppress(BatonError):
        entries_of_lines(raw.decode("utf-8", "replace"))
    accounts.identify(choices.text())
    accounts.identify(f"Bearer {choices.text()}")
