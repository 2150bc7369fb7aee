"""Frames, addresses and the handshake's parts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import (
    BatonError,
    CancelledError,
    DeadlineError,
    FingerprintMismatchError,
    InternalError,
    PipeClosedError,
    StaleBlockError,
    TransferError,
    all_errors,
)
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.streams import Wait, connect_tcp, split_address
from baton.kv_transfer.wire import (
    BadFrameError,
    Facts,
    FrameKind,
    error_from_fields,
    fingerprint_from_fields,
    pack_header,
    parse_header,
    parse_object,
)
from baton.rpc.addresses import join_address

LAYOUT = KVLayout((LayerShape(2, 16, 16), LayerShape(1, 8, 24)), 16, "bfloat16")
PRINT = Fingerprint.of(model="m", model_digest="d", rope="r", layout=LAYOUT)
FACTS = Facts(b"\2" * 16, PRINT, 100)


def as_received(facts: Facts, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(facts.to_fields()))
    return fields | changes


@given(st.sampled_from(list(FrameKind)), st.integers(0, 2**64 - 1))
def test_headers_round_trip_within_their_bound(kind: FrameKind, length: int) -> None:
    header = pack_header(kind, length)
    assert parse_header(header, {kind: length}) == (kind, length)
    if length:
        with pytest.raises(BadFrameError):
            parse_header(header, {kind: length - 1})
    with pytest.raises(BadFrameError):
        parse_header(header, {})


@given(st.binary(min_size=16, max_size=16))
def test_foreign_bytes_are_no_header(data: bytes) -> None:
    if data[:4] != b"BTNP":
        with pytest.raises(BadFrameError):
            parse_header(data, dict.fromkeys(FrameKind, 2**64))


@given(st.binary(max_size=100))
def test_foreign_bytes_are_no_object(data: bytes) -> None:
    try:
        fields = parse_object(data)
    except BadFrameError:
        return
    assert isinstance(fields, dict)


@pytest.mark.parametrize("error", [cls("why", field="what") for cls in all_errors().values()], ids=lambda e: e.code)
def test_errors_cross_the_wire(error: BatonError) -> None:
    got = error_from_fields({"code": error.code, "message": "why", "field": "what"})
    assert (type(got), got.message, got.field) == (type(error), "why", "what")


def test_an_error_without_a_code_of_its_own_is_sent_as_its_parent() -> None:
    class OfThisProcessError(InternalError):
        """Has the code of its parent, which is what comes out at the other end."""

    assert type(error_from_fields({"code": OfThisProcessError.code, "message": "why"})) is InternalError


def test_unknown_errors_are_transfer_errors() -> None:
    for fields in ({}, {"code": "martian", "message": 5, "field": []}):
        got = error_from_fields(fields)
        assert type(got) is TransferError
        assert got.field is None


def test_equal_facts_pass() -> None:
    FACTS.require(as_received(FACTS), who="peer")
    assert fingerprint_from_fields(as_received(FACTS)["fingerprint"]) == PRINT


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"epoch": "00"}, StaleBlockError, "epoch"),
        ({"epoch": None}, StaleBlockError, "epoch"),
        ({"digest": "00"}, FingerprintMismatchError, "digest"),
        ({"num_blocks": 99}, FingerprintMismatchError, "num_blocks"),
        ({"fingerprint": None}, BadFrameError, "fingerprint"),
        ({"fingerprint": {}}, BadFrameError, "fingerprint"),
    ],
)
def test_different_facts_are_named(changes: dict[str, Any], error: type[BatonError], field: str) -> None:
    with pytest.raises(error) as caught:
        FACTS.require(as_received(FACTS, **changes), who="peer")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", "16"),
        ("block_size", True),
        ("model_digest", 5),
        ("layer_shapes", "x"),
        ("layer_shapes", [[2, 16, 16]]),
        ("layer_shapes", [{"kv_heads": 2, "k_dim": 16}]),
        ("layer_shapes", [{"kv_heads": 2, "k_dim": 16, "v_dim": None}]),
        ("extra", 1),
    ],
)
def test_malformed_fingerprints_are_refused(field: str, value: Any) -> None:
    fields = as_received(FACTS)["fingerprint"] | {field: value}
    with pytest.raises(BadFrameError):
        fingerprint_from_fields(fields)


def test_every_field_of_a_fingerprint_travels() -> None:
    facts = dataclasses.replace(FACTS, fingerprint=dataclasses.replace(PRINT, states="3 states"))
    fields = as_received(facts)["fingerprint"]
    assert set(fields) == {item.name for item in dataclasses.fields(Fingerprint)}
    assert fingerprint_from_fields(fields) == facts.fingerprint
    known_before = as_received(FACTS)["fingerprint"]
    assert set(fields) - set(known_before) == {"states"}
    assert fingerprint_from_fields(known_before) == PRINT


@given(st.sampled_from(["127.0.0.1", "host.example", "::1"]), st.integers(1, 65535))
def test_addresses_round_trip(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "host", ":80", "host:", "host:x", "host:0", "host:65536", "host:-1", "host:²³"]
)
def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(PipeClosedError, match="host:port"):
        split_address(address)


@pytest.mark.parametrize("host", ["a..b", "ü" * 300, "a\0b"])
def test_a_host_that_can_have_no_name_is_one_that_nothing_listens_at(host: str) -> None:
    """Peers send addresses: a wrong one must end like any other failed connection, so that the next is tried."""
    with pytest.raises(PipeClosedError, match="cannot connect"):
        connect_tcp(f"{host}:80", Wait())


def test_wait() -> None:
    Wait().check("anything")
    assert Wait().nap() is None
    with pytest.raises(DeadlineError, match="sleeping"):
        Wait(time.monotonic()).check("sleeping")
    flag = threading.Event()
    wait = Wait(time.monotonic() + 240, flag)
    wait.check("anything")
    assert 0 < (wait.nap() or 0) < 0.1
    flag.set()
    with pytest.raises(CancelledError, match="sleeping"):
        wait.check("sleeping")


def test_the_transport_does_not_import_torch() -> None:
    """Services without torch (router, KV store) use all of this."""
    modules = [
        "blocks",
        "lookup_buffer",
        "wire",
        *(f"pipes.{x}" for x in ("memory", "shm", "tcp", "nixl")),
    ]
    code = "import sys\n" + "".join(f"import baton.kv_transfer.{name}\n" for name in modules)
    code += "assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
