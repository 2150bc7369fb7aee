"""Every decoder of what comes from outside: whatever comes is read, or refused by an error of Baton's.

Where a checksum or a MAC stands before a decoder, what is made up here carries a right one, so that it is reached.
Formats of the disk tier are in ``test_kvstore_disk.py`` too, the file of API keys in ``test_router_accounts.py``.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
import time
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
import xxhash
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.api.v1 import common_pb2, kvstore_pb2, router_pb2, worker_pb2
from baton.errors import BatonError, PermissionDeniedError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer import wire
from baton.kv_transfer.pipes import nixl, nixl_agent, torch_distributed
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import MAX_BLOCKS_PER_READ, BlockReads, source_from_pb
from baton.kv_transfer.wire import (
    Facts,
    FrameKind,
    error_from_fields,
    fingerprint_from_fields,
    greet_as_server,
    pack_header,
    parse_header,
    parse_object,
)
from baton.rpc import convert
from baton.rpc.errors import from_status
from baton.rpc.service_token import Token
from baton.rpc.ticket import SCHEME, Bearer, TicketCheck, request_digest, ticket_header
from baton_kvstore.tiers.disk.directory import decode_checkpoint
from baton_kvstore.tiers.disk.segment import VERSION
from baton_router.frontend.grpc.servicer import text_request
from baton_router.frontend.openai.openai_request import parse_chat, parse_completion

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KIND = replace(
    Fingerprint.of(model="m", model_digest="d", rope="", layout=KVLayout((LayerShape(1, 1, 1),), 16, "float32")),
    block_bytes=4096,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
surrogates = st.text(st.characters(categories=["L", "N", "Cs"]), max_size=6)
numbers = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63]))


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """JSON objects that have about the right fields, of any kind."""
    return st.dictionaries(st.sampled_from(names), values | surrogates, max_size=len(names))


# Frames


@FUZZ
@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**20))
def test_frame_headers(data: bytes, bound: int) -> None:
    for head in (data, b"BTNP\x01" + data[5:], b"BTNP\x01" + data[5:6] + b"\0\0" + data[8:]):
        with contextlib.suppress(TransferError):
            kind, length = parse_header(head, {FrameKind.READ: bound, FrameKind.ERROR: 16})
            assert length <= (bound if kind is FrameKind.READ else 16)


@FUZZ
@given(st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_control_frames(data: bytes) -> None:
    with contextlib.suppress(TransferError):
        assert isinstance(error_from_fields(parse_object(bytearray(data))), BatonError)


@FUZZ
@example([0, 0, 0, 0, 0], [1], [(0, 1)], [(0, 2**61)] * 8 + [(0, 1)], b"")  # 8 * 2**61 is 0 in 64 bits
@given(
    st.lists(numbers, min_size=5, max_size=5),
    st.lists(numbers, max_size=6),
    st.lists(st.tuples(numbers, numbers), max_size=6),
    st.lists(st.tuples(numbers, numbers), max_size=6),
    st.binary(max_size=40),
)
def test_read_requests(
    head: list[int],
    blocks: list[int],
    segments: list[tuple[int, int]],
    steps: list[tuple[int, int]],
    more: bytes,
) -> None:
    for made_up in (True, False):
        counts = head if made_up else [len(blocks), len(segments), head[2], head[3], len(steps)]
        body = struct.pack("<5I", *(n % 2**32 for n in counts))
        body += b"".join(struct.pack("<I", n % 2**32) for n in blocks) + struct.pack(f"<{len(blocks)}Q", *blocks)
        body += b"".join(struct.pack("<QQ", *pair) for pair in (*segments, *steps)) + (more if made_up else b"")
        body += struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
        with contextlib.suppress(BatonError):
            request = wire.parse_request(bytearray(body))
            reads = request.reads
            assert len(reads) == len(blocks)
            if reads.steps is not None:
                assert reads.segments is not None
                assert sum(int(n) for n in reads.steps[:, 1]) == len(reads.segments)
            reads.check_range(1 << 20, len(reads))


@FUZZ
@given(st.binary(max_size=100), st.integers(1, 40), st.booleans())
def test_tails_of_answers(data: bytes, count: int, checksums: bool) -> None:
    ids = np.arange(count)
    reads = BlockReads(ids, ids.astype(np.uint64), ids)
    size = wire.tail_bytes(reads, 1, checksums=checksums)
    body = data.ljust(size, b"\0")[:size]
    if checksums:
        body = body[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(b"sent" + body[:-8]))
    tail = wire.parse_tail(reads, b"sent", body, checksums=checksums)
    assert len(tail.unchanged) == count <= MAX_BLOCKS_PER_READ


@FUZZ
@given(objects("agent", "metadata", "digest", "arenas", "devices", "key", "value"))
def test_introductions_of_pipes(fields: dict[str, Any]) -> None:
    for parse in (
        nixl_agent.parse_agent,
        lambda x: nixl.parse_arenas(x.get("arenas"), x.get("devices")),
        torch_distributed._parse_entry,
    ):
        with contextlib.suppress(TransferError):
            parse(fields)


@FUZZ
@example({"model": "\ud800"})
@example({"block_size": 10**4000})
@example({"layer_shapes": [{"kv_heads": 1, "k_dim": -1, "v_dim": 2**70}]})
@example({"unsplit_layers": [2**70, -1]})
@given(st.dictionaries(st.sampled_from(list(KIND.__dataclass_fields__)), values | surrogates))
def test_fingerprints_of_peers(changes: dict[str, Any]) -> None:
    right = json.loads(json.dumps(Facts(b"e", KIND, 1).to_fields()["fingerprint"]))
    for fields in (changes, {**right, **changes}):
        with contextlib.suppress(BatonError):
            found = fingerprint_from_fields(fields)
            found.digest()
            found.content_key()
            KIND.require_source(found, who="peer")


@settings(FUZZ, max_examples=40)
@example({"proof": "\ud800"}, True)
@given(objects("nonce", "proof", "purpose", "epoch", "digest", "fingerprint", "num_blocks"), st.booleans())
def test_whoever_greets_a_server(hello: dict[str, Any], knows_nonce: bool) -> None:
    ours, theirs = socket.socketpair()
    server, client = Stream(ours, peer="client"), Stream(theirs, peer="server")
    if knows_nonce:
        hello = {**hello, "nonce": "00" * 32}
    payload = json.dumps(hello).encode()

    def say() -> None:
        client.send_all([pack_header(FrameKind.HELLO, len(payload)), payload], Wait(time.monotonic() + 5), "greeting")

    thread = threading.Thread(target=say)
    thread.start()
    try:
        with pytest.raises(BatonError):
            greet_as_server(
                server, Token("token"), Wait(time.monotonic() + 5), purpose="read", facts=Facts(b"e", KIND, 1)
            )
    finally:
        thread.join()
        server.close()
        client.close()


# Protobuf


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a kind from random bytes, which mostly set unknown fields, and from its own fields at random."""

    def parsed(data: bytes) -> Message:
        try:
            return kind.FromString(data)
        except DecodeError:
            return kind()

    @st.composite
    def filled(draw: st.DrawFn) -> Message:
        message = kind()
        fill(draw, message, 3)
        return message

    return st.binary(max_size=80).map(parsed) | filled()


def fill(draw: st.DrawFn, message: Message, depth: int) -> None:
    """Set some of a message's fields to anything that fits them."""
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        times = draw(st.integers(0, 3)) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        for _ in range(times):
            if field.message_type is not None:
                if depth:
                    part = getattr(message, field.name)
                    fill(draw, part.add() if field.is_repeated else part, depth - 1)
                continue
            value = draw(SCALARS[field.cpp_type])
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)


_FD: Any = common_pb2.Tenant.DESCRIPTOR.fields[0]
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    _FD.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    _FD.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    _FD.CPPTYPE_UINT32: numbers.map(lambda n: n % 2**32),
    _FD.CPPTYPE_UINT64: numbers,
    _FD.CPPTYPE_FLOAT: st.floats(width=32),
    _FD.CPPTYPE_DOUBLE: st.floats(),
    _FD.CPPTYPE_BOOL: st.booleans(),
    _FD.CPPTYPE_ENUM: st.integers(0, 9),
    _FD.CPPTYPE_STRING: st.text(max_size=8),
    _FD.CPPTYPE_BYTES: st.sampled_from([b"", b"x", b"y" * 16, b"z" * 32]),
}


@FUZZ
@given(messages(common_pb2.SamplingParams), messages(common_pb2.TokenLogprob), messages(common_pb2.Tenant))
def test_conversions(sampling: Any, logprob: Any, tenant: Any) -> None:
    for convert_one, message in (
        (lambda m: convert.sampling_from_pb(m).validate(vocab_size=1000), sampling),
        (convert.logprob_from_pb, logprob),
        (lambda m: convert.prompt_logprobs_from_pb([m, m]), logprob),
        (convert.tenant_from_pb, tenant),
    ):
        with contextlib.suppress(BatonError):
            convert_one(message)


@FUZZ
@given(messages(common_pb2.Fingerprint), messages(common_pb2.KvSource))
def test_descriptions_of_kv(fingerprint: Any, source: Any) -> None:
    with contextlib.suppress(BatonError):
        found = convert.fingerprint_from_pb(fingerprint)
        found.digest()
        KIND.require_source(found.undivided(), who="peer")
    with contextlib.suppress(BatonError):
        source_from_pb(source)
    source.epoch = b"e" * 16
    source.endpoints.add(kind="tcp", address="127.0.0.1:1")
    with contextlib.suppress(BatonError):
        source_from_pb(source).fingerprint.undivided().digest()


@FUZZ
@given(messages(router_pb2.RouterGenerateRequest))
def test_requests_of_the_routers_clients(request: Any) -> None:
    with contextlib.suppress(BatonError):
        text_request(request, None)


@FUZZ
@given(messages(worker_pb2.TicketBody), messages(worker_pb2.GenerateRequest), st.binary(max_size=60), st.booleans())
def test_tickets(body: Any, request: Any, junk: bytes, signed: bool) -> None:
    key = b"k" * 16
    request.ticket.body = body.SerializeToString() + junk
    request.ticket.mac = hmac.digest(key, request.ticket.body, "sha256") if signed else junk
    check = TicketCheck(key, Bearer("i", b"e"), lambda: 1000.0)
    for header in (ticket_header(request.ticket), SCHEME + junk.decode("latin-1"), junk):
        with contextlib.suppress(PermissionDeniedError):
            check.admit(header)
    right = worker_pb2.TicketBody(
        instance_id="i", epoch=b"e", request_digest=request_digest(request), expires_ms=body.expires_ms, nonce=b"n" * 16
    )
    request.ticket.body = right.SerializeToString()
    request.ticket.mac = hmac.digest(key, request.ticket.body, "sha256")
    with contextlib.suppress(PermissionDeniedError):
        TicketCheck(key, Bearer("i", b"e"), lambda: 1000.0).admit(ticket_header(request.ticket))


@FUZZ
@given(st.sampled_from(list(grpc.StatusCode)), st.text(max_size=20), st.binary(max_size=60), st.binary(max_size=30))
def test_errors_of_peers(code: grpc.StatusCode, message: str, details: bytes, inner: bytes) -> None:
    wrapped = kvstore_pb2.PutRequest()  # any message with the right shape: field 3 of a Status is its list of details
    wrapped.source.instance_id = "type.googleapis.com/baton.api.v1.ErrorDetail"
    for data in (details, b"\x1a" + bytes([len(inner)]) + inner, wrapped.SerializeToString()):
        assert isinstance(from_status(code, message, data), BatonError)


# Files


@FUZZ
@given(
    st.lists(numbers, min_size=2, max_size=2),
    st.lists(st.lists(numbers, min_size=3, max_size=3), max_size=4),
    st.binary(max_size=200),
)
def test_checkpoints_with_a_right_checksum(head: list[int], rows: list[list[int]], more: bytes) -> None:
    body = struct.pack("<8sIQI", b"BATONIDX", VERSION, head[0], head[1] % 2**32)
    body += b"".join(struct.pack("<QQQ", *row) for row in rows) + more
    data = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body, seed=7))
    found = decode_checkpoint(data, 7)
    assert found is None or sum(len(covered.blocks) for covered in found[1].values()) * 64 <= len(data)


# HTTP

FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n"),
    *("stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "logit_bias", "seed", "user", "best_of"),
    *("cache_salt", "session_id", "priority", "ttft_ms", "itl_ms", "stop_token_ids", "min_p", "chat_template_kwargs"),
    *("tools", "response_format", "prompt_logprobs", "request_id", "reasoning_effort"),
]
message_objects = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), values | st.just("user"), max_size=3)
    | values,
    max_size=3,
)


@FUZZ
@given(st.dictionaries(st.sampled_from(FIELDS), values | st.just("text")), message_objects, values)
def test_http_bodies(body: dict[str, Any], said: list[Any], anything: Any) -> None:
    for value in (body, {**body, "prompt": "x"}, anything):
        with contextlib.suppress(BatonError):
            parse_completion(value, 8, 64)
    for value in (body, {**body, "messages": said}, {**body, "messages": [{"role": "user", "content": "x"}]}, anything):
        with contextlib.suppress(BatonError):
            parse_chat(value)


@FUZZ
@given(st.binary(max_size=100))
def test_bytes_that_are_json_by_chance(data: bytes) -> None:
    with contextlib.suppress(orjson.JSONDecodeError, BatonError):
        parse_chat(orjson.loads(data))
