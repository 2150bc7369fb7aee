"""Block servers and connections: who gets in, who is sent away, what is left behind."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.transport.shared_memory import left_behind, segments
from tests.support.transport.transport_rig import (
    LAYOUT,
    PRINT,
    Rig,
    connect_raw,
    lets_go,
    open_fds,
    soon,
    tls_of,
)

from baton.errors import (
    BatonError,
    ConfigError,
    InvalidRequestError,
    PipeClosedError,
    QueueFullError,
    TransferError,
    UnauthenticatedError,
)
from baton.kv_cache.arena import HostArena
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockReads,
    BlockServer,
    BlockSource,
    Endpoint,
    LinkOptions,
    ServerOptions,
    TcpOptions,
)
from baton.kv_transfer.pipes import read_server
from baton.kv_transfer.pipes.base import ServeLimits
from baton.kv_transfer.pipes.read_server import ReadRoom
from baton.kv_transfer.pipes.tcp import TcpReadPipe, request_blocks
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.wire import (
    PURPOSE_READ,
    Facts,
    FrameKind,
    greet_as_client,
    pack_header,
    pack_request,
    recv_control,
)
from baton.rpc.service_token import Token
from baton.types import InstanceId


def test_auto_prefers_shared_memory_and_tells_of_a_fallback(caplog: pytest.LogCaptureFixture) -> None:
    arena, target = HostArena(8, LAYOUT.block_bytes), HostArena(8, LAYOUT.block_bytes)
    with_both = BlockServer(arena, PRINT, InstanceId("p0"))
    assert [e.kind for e in with_both.endpoints] == ["shm", "tcp"]
    source = with_both.source
    fetcher = BlockFetcher(target, PRINT)
    generations = arena.generations[:1]
    assert fetcher.fetch(source, [0], generations, [0], deadline=soon()).pipe_kind == "shm"
    fetcher.close()

    boot, user, name = source.endpoints[0].address.split("/")
    for address, reason in (
        (f"another-boot/{user}/{name}", "another host"),
        (f"{boot}/{user}/baton-kv-nobody", "cannot connect"),
        ("nonsense", "not a shared-memory address"),
    ):
        elsewhere = BlockSource(
            source.instance_id, source.epoch, (Endpoint("shm", address), source.endpoints[1]), PRINT, 8
        )
        fetcher = BlockFetcher(target, PRINT)
        result = fetcher.fetch(elsewhere, [0], generations, [0], deadline=soon())
        assert result.pipe_kind == "tcp"
        assert result.fallback_reason.startswith("shm: ")
        assert reason in result.fallback_reason
        assert reason in caplog.text
        fetcher.close()
    only_shm = BlockFetcher(target, PRINT, kinds=("shm",))
    with pytest.raises(PipeClosedError, match="no pipe reaches p0"):
        only_shm.fetch(elsewhere, [0], generations, [0], deadline=soon())
    only_shm.close()
    with_both.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_block_servers_want_the_token(kind: str) -> None:
    arena, target = HostArena(8, LAYOUT.block_bytes), HostArena(8, LAYOUT.block_bytes)
    server = BlockServer(arena, PRINT, InstanceId("p0"), kinds=(kind,), token=Token("secret"))
    for token in (None, Token("other")):
        fetcher = BlockFetcher(target, PRINT, links=LinkOptions(token=token))
        with pytest.raises(UnauthenticatedError):
            fetcher.fetch(server.source, [0], [0], [0], deadline=soon())
        fetcher.close()
    fetcher = BlockFetcher(target, PRINT, links=LinkOptions(token=Token("secret")))
    assert fetcher.fetch(server.source, [0], [0], [0], deadline=soon()).valid.all()
    fetcher.close()
    server.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_off_loopback_needs_a_token(host: str) -> None:
    arena = HostArena(1, LAYOUT.block_bytes)
    with pytest.raises(ConfigError) as caught:
        BlockServer(arena, PRINT, InstanceId("p0"), host=host)
    assert caught.value.field == "token"


def test_wrong_configuration_is_refused() -> None:
    arena = HostArena(1, LAYOUT.block_bytes)
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("pipes", {"kinds": ("pigeon",)}),
        ("pipes", {"kinds": ()}),
        ("pipes", {"kinds": ("tcp", "tcp")}),
        ("pipes", {"kinds": ("memory",)}),
        ("port", {"kinds": ("shm", "tcp"), "options": ServerOptions(port=port)}),
    ]
    before = open_fds()
    for field, options in cases:
        with pytest.raises(ConfigError) as caught:
            BlockServer(arena, PRINT, InstanceId("p0"), **options)
        assert caught.value.field == field
        del caught
    assert lets_go(before)
    taken.close()
    with pytest.raises(ConfigError):
        BlockServer(HostArena(1, 64), PRINT, InstanceId("p0"))
    wrong: list[dict[str, Any]] = [
        {"kinds": "pigeon"}, {"kinds": ()}, {"max_threads": 0}, {"links": LinkOptions(tcp=TcpOptions(streams=0))}
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ConfigError):
            BlockFetcher(arena, PRINT, **options)


def test_idle_connections_are_closed_and_made_again(tcp_rig: Rig) -> None:
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",), links=LinkOptions(idle_s=0.05))
    source, generations = tcp_rig.server.source, tcp_rig.source_arena.generations[:1]
    fetcher.fetch(source, [0], generations, [0], deadline=soon())
    end = soon()
    while len(fetcher._links) or tcp_rig.server.num_connections():
        assert time.monotonic() < end
        threading.Event().wait(0.005)
    assert fetcher.fetch(source, [0], generations, [0], deadline=soon()).valid.all()
    fetcher.close()


def test_the_server_drops_silent_peers_and_bounds_the_number_of_others() -> None:
    rig = Rig("tcp")
    server = rig.serve(max_connections=3, handshake_s=8.0, limits=ServeLimits(frame_s=60.0, idle_s=60.0))
    address = server.endpoints[0].address
    slow = [connect_raw("tcp", address) for _ in range(3)]  # slowloris: connected, and not a word
    for stream in slow:
        recv_control(stream, FrameKind.CHALLENGE, Wait(soon()))
    readers = [reader_of(server) for _ in range(3)]  # none of whom is kept out by those
    await_refusal(address)
    for stream in slow:
        with pytest.raises(BatonError):
            recv_control(stream, FrameKind.WELCOME, Wait(soon()))
        stream.close()
    assert server.num_connections() >= 3, "readers have longer"
    for stream in readers:
        stream.close()
    server.close()
    rig.close()


def await_refusal(address: str) -> None:
    """Connect until there is no room: a reader is told that it is one just before it counts as one."""
    end = soon()
    while True:
        extra = connect_raw("tcp", address)
        try:
            recv_control(extra, FrameKind.CHALLENGE, Wait(end))
        except QueueFullError:
            return
        finally:
            extra.close()
        assert time.monotonic() < end


def test_the_server_drops_idle_readers_who_come_again() -> None:
    rig = Rig("tcp")
    server = rig.serve(limits=ServeLimits(frame_s=60.0, idle_s=0.2))
    source, generations = server.source, rig.source_arena.generations[:1]
    for _ in range(2):  # the second time on a connection that the server has dropped
        assert rig.fetcher.fetch(source, [0], generations, [0], deadline=soon()).valid.all()
        end = soon()
        while server.num_connections():
            assert time.monotonic() < end
            threading.Event().wait(0.005)
    server.close()
    rig.close()


@pytest.mark.parametrize("kind", ["shm", "tcp", "tls"])
def test_connections_that_say_nothing_keep_no_reader_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(kind)
    server = BlockServer(
        rig.source_arena,
        rig.print,
        InstanceId("p1"),
        kinds=("shm", "tcp", *(("tls",) if kind == "tls" else ())),
        options=ServerOptions(tls=tls_of(kind), handshake_s=60.0),
    )
    threads = threading.active_count()
    silent = [
        connect_raw(each.kind, each.address) for each in server.endpoints for _ in range(150)
    ]  # and no token is needed for that
    deadline = time.monotonic() + 240
    while server.num_connections() > 64 * len(server.endpoints) or threading.active_count() > threads + 64 * len(
        server.endpoints
    ):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    generations = rig.source_arena.generations[:1]
    assert rig.fetcher.fetch(server.source, [0], generations, [0], deadline=soon()).valid.all()
    assert "were closed before their handshake" in caplog.text
    lines = len([record for record in caplog.records if record.name.endswith("blocks.server")])
    assert 0 < lines < 10, "a line now and then, not one per connection"
    for stream in silent:
        stream.close()
    rig.fetcher.close()
    server.close()
    rig.close()


def reader_of(server: BlockServer) -> Stream:
    stream: Stream = connect_raw("tcp", server.endpoints[0].address)
    source = server.source
    facts = Facts(source.epoch, source.fingerprint, source.num_blocks)
    greet_as_client(stream, None, Wait(soon()), purpose=PURPOSE_READ, facts=facts)
    return stream


def _greet(stream: Stream, hello: bytes) -> None:
    """Say hello and be welcomed; a server that leaves before it has read all of it takes its challenge with it."""
    stream.send_all([pack_header(FrameKind.HELLO, len(hello)), hello], Wait(soon()), "garbage")
    recv_control(stream, FrameKind.CHALLENGE, Wait(soon()))
    recv_control(stream, FrameKind.WELCOME, Wait(soon()))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_block_servers_survive_garbage(kind: str) -> None:
    rig = Rig(kind)
    for data in (b"", b"\0", os.urandom(100), pack_header(FrameKind.HELLO, 1 << 40), pack_header(FrameKind.HELLO, 2)):
        stream = connect_raw(kind, rig.server.endpoints[0].address)
        stream.send_all([data], Wait(soon()), "garbage")
        stream.close()
    for payload in (b"[]", b"{", b"\xff\xff", b"{}", b'{"nonce": 5}', b'{"nonce": "00"}', b"[" * 200_000):
        stream = connect_raw(kind, rig.server.endpoints[0].address)
        with pytest.raises(BatonError):
            _greet(stream, payload)
        stream.close()
    assert rig.fetch([0], [0]).valid.all()
    rig.close()


def test_a_server_checks_what_readers_ask_for(tcp_rig: Rig) -> None:
    tcp_rig.fetch([0], [0])
    pipe = next(iter(tcp_rig.fetcher._links._links.values())).pipe
    stream = next(iter(pipe._open)).stream  # type: ignore[attr-defined]
    one, size = (np.array([0]), np.zeros(1, np.uint64), np.array([0])), LAYOUT.block_bytes
    wrong = {
        "remote_ids": BlockReads(np.array([200]), *one[1:]),
        "source_shard": BlockReads(*one, source_shard=1),
        "segments": BlockReads(*one, segments=np.array([[size - 8, 0, 16]])),
    }
    wrong_sum = BlockReads(*one, segments=np.array([[0, 0, size], [0, 0, size]]))
    for field, reads in [*wrong.items(), ("segments", wrong_sum)]:
        with pytest.raises(InvalidRequestError) as caught:
            request_blocks(stream, reads, tcp_rig.target.blocks, Wait(soon()), options=TcpOptions())
        assert caught.value.field == field
    assert tcp_rig.fetch([1], [1]).valid.all()  # the connection is still in step
    for payload in (b"", struct.pack("<I", 5), struct.pack("<I", 1) + b"\0" * 13, DAMAGED):
        bad = BadRequest(tcp_rig)
        bad.stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], Wait(soon()), "bad")
        with pytest.raises(TransferError):
            recv_control(bad.stream, FrameKind.WELCOME, Wait(soon()))
        bad.stream.close()
    bad = BadRequest(tcp_rig)
    bad.stream.send_all([pack_header(FrameKind.READ, 1 << 33)], Wait(soon()), "too many")
    with pytest.raises(TransferError, match="longer than"):
        recv_control(bad.stream, FrameKind.WELCOME, Wait(soon()))
    bad.stream.close()
    assert tcp_rig.fetch([2], [2]).valid.all()


_WHOLE = pack_request(BlockReads(np.array([1]), np.zeros(1, np.uint64), np.array([0])), checksums=True)
DAMAGED = _WHOLE[:16] + bytes([_WHOLE[16] ^ 1]) + _WHOLE[17:]
"""Asks for a block that nobody wanted: a bit changed on its way."""


class BadRequest:
    """An authenticated connection whose next frame is up to the test."""

    def __init__(self, rig: Rig) -> None:
        self.stream = reader_of(rig.server)


def test_steps_must_have_all_the_segments(tcp_rig: Rig) -> None:
    one = np.array([1]), tcp_rig.source_arena.generations[[1]], np.array([1])
    for steps in ([[0, 2]], [[0, 0], [0, 1]], [[1 << 62, 1]]):
        reads = BlockReads(*one, segments=np.array([[0, 0, 16]]), steps=np.array(steps))
        bad = BadRequest(tcp_rig)
        payload = pack_request(reads, checksums=True)
        bad.stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], Wait(soon()), "bad")
        with pytest.raises(TransferError, match="steps"):
            recv_control(bad.stream, FrameKind.WELCOME, Wait(soon()))
        bad.stream.close()
    assert tcp_rig.fetch([1], [1]).valid.all()


@pytest.mark.parametrize("followed", [False, True])
def test_blocks_times_segments_of_a_request_are_bounded(tcp_rig: Rig, followed: bool) -> None:
    pairs, count = 512, 60_000  # 700 KB of request for 30 million spans, which are 1.2 GB of addresses
    segments = np.array([[8 * i, 0, 4] for i in range(pairs)])
    steps = np.array([[0, 1]] * pairs) if followed else None
    generations = np.full(count, tcp_rig.source_arena.generations[0])
    payload = pack_request(
        BlockReads(np.zeros(count, np.int64), generations, np.arange(count), segments, steps=steps), checksums=True
    )
    reader, before = BadRequest(tcp_rig), _peak_bytes()
    reader.stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], Wait(soon()), "too many")
    with pytest.raises(InvalidRequestError) as caught:
        recv_control(reader.stream, FrameKind.WELCOME, Wait(soon()))
    assert caught.value.field == "segments"
    assert _peak_bytes() - before < 100 << 20
    reader.stream.close()


def test_blocks_times_segments_of_all_requests_are_bounded_together(
    tcp_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_server, "SPANS", ReadRoom(4, "blocks times segments"))
    monkeypatch.setattr(read_server, "ROOM_WAIT_S", 0.1)
    ids = np.arange(3)
    reads = BlockReads(
        ids,
        tcp_rig.source_arena.generations[ids],
        ids,
        segments=np.array([[0, 0, 16]]),
        steps=np.array([[1 << 40, 1]]),  # which no computation comes to
    )
    payload, holding = pack_request(reads, checksums=True), BadRequest(tcp_rig)
    holding.stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], Wait(soon()), "holding")
    until(lambda: read_server.SPANS.taken == 3)
    second = BadRequest(tcp_rig)
    for _ in range(2):  # and its connection stays in step
        whole = BlockReads(ids[:2], tcp_rig.source_arena.generations[ids[:2]], ids[:2])
        with pytest.raises(QueueFullError, match="blocks times segments"):
            request_blocks(second.stream, whole, tcp_rig.target.blocks, Wait(soon()), options=TcpOptions())
    assert tcp_rig.fetch([1], [1]).valid.all()  # there is room for it
    holding.stream.close()
    until(lambda: read_server.SPANS.taken == 0)
    assert request_blocks(second.stream, whole, tcp_rig.target.blocks, Wait(soon()), options=TcpOptions()).all()
    second.stream.close()


def test_requests_that_come_together_are_bounded_before_they_are_read(
    tcp_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_server, "REQUESTS", ReadRoom(100_000, "bytes of requests"))
    monkeypatch.setattr(read_server, "ROOM_WAIT_S", 0.1)
    slow, late = BadRequest(tcp_rig), BadRequest(tcp_rig)
    slow.stream.send_all([pack_header(FrameKind.READ, 70_000)], Wait(soon()), "the head alone")
    until(lambda: read_server.REQUESTS.taken == 70_000)
    late.stream.send_all([pack_header(FrameKind.READ, 70_000)], Wait(soon()), "another")
    with pytest.raises(QueueFullError, match="bytes of requests"):
        recv_control(late.stream, FrameKind.WELCOME, Wait(soon()))
    assert tcp_rig.fetch([1], [1]).valid.all()  # small ones need no room
    slow.stream.close()
    until(lambda: read_server.REQUESTS.taken == 0)
    late.stream.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("kind", ["tcp", "tls", "gloo", "nixl"])
def test_reads_of_many_segments_are_split_into_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv_transfer.types.MAX_SPANS_PER_READ", 100)
    rig = Rig(kind)
    rig.fetch([0], [0])
    pipe = next(iter(rig.fetcher._links._links.values())).pipe
    ids, size = np.arange(1, 51), LAYOUT.block_bytes // 8
    segments = np.array([[at * size, at * size, size] for at in range(8)])
    reads = BlockReads(ids, rig.source_arena.generations[ids], ids, segments)
    assert pipe.read(reads, rig.target.blocks, Wait(soon())).all()
    assert rig.same(ids, ids)
    rig.close()


def test_a_reader_that_leaves_while_its_requests_wait_is_noticed(tcp_rig: Rig) -> None:
    one = np.array([1]), tcp_rig.source_arena.generations[[1]], np.array([1])
    reads = BlockReads(*one, segments=np.array([[0, 0, 16]]), steps=np.array([[1 << 40, 1]]))
    reader = BadRequest(tcp_rig)
    payload = pack_request(reads, checksums=True)
    frame = pack_header(FrameKind.READ, len(payload)) + payload
    reader.stream.send_all([frame, frame], Wait(soon()), "asking")  # the second lies unread when it leaves
    deadline = soon()
    while tcp_rig.server.num_connections() != 1:
        assert time.monotonic() < deadline
    reader.stream.close()
    while tcp_rig.server.num_connections():
        assert time.monotonic() < deadline


@pytest.mark.parametrize("on_host", [1, 2, 3])
def test_a_read_on_one_host_is_split_over_no_more_connections_than_it_is_given_there(
    tcp_rig: Rig, on_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, together = [1], TcpReadPipe._together  # a share may end so soon that another takes its connection

    def count(pipe: TcpReadPipe, one: Any, num_parts: int, wait: Wait) -> Any:
        parts.append(num_parts)
        return together(pipe, one, num_parts, wait)

    monkeypatch.setattr(TcpReadPipe, "_together", count)
    links = LinkOptions(tcp=TcpOptions(streams=3, share_bytes=1, streams_on_host=on_host))
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",), links=links)
    source, generations = tcp_rig.server.source, tcp_rig.source_arena.generations[:3]
    assert fetcher.fetch(source, [0, 1, 2], generations, [0, 1, 2], deadline=soon()).valid.all()
    assert max(parts) == on_host
    assert tcp_rig.server.num_connections() <= on_host
    fetcher.close()


def test_readers_cannot_write_into_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("shm")
    rig.fetch([0], [0])
    pipe = next(iter(rig.fetcher._links._links.values())).pipe
    arena = pipe._peer.shards.primary  # type: ignore[attr-defined]
    assert not arena.blocks.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        arena.generations[0] = 1
    del arena, pipe
    rig.close()


def test_no_descriptors_threads_or_shared_memory_are_left(rig: Rig) -> None:
    memory = segments()
    rig.fetch(np.arange(50), np.arange(50))
    fds, threads = open_fds(), threading.active_count()
    for _ in range(5):
        extra = Rig(rig.kind, 2, num_blocks=20)
        extra.fetch(np.arange(20), np.arange(20))
        extra.close()
        del extra
    assert lets_go(fds, threads)
    assert left_behind(memory) == set()
