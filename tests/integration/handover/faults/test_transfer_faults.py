"""Block transfer while things break: cut, stalled and garbled connections, killed and stopped processes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.transport.shared_memory import left_behind, segments
from tests.support.transport.transport_faults import BIG, LAYOUT, Hook, Process, Proxy, fingerprint, soon

from baton.errors import BatonError, CancelledError, DeadlineError, PipeClosedError, StaleBlockError, TransferError
from baton.kv_cache.arena import HostArena
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockReads,
    BlockServer,
    BlockSource,
    Endpoint,
    LinkOptions,
    TcpOptions,
)
from baton.kv_transfer.streams import Wait, connect_tcp
from baton.kv_transfer.wire import HEADER, PURPOSE_READ, Facts, greet_as_client, tail_bytes
from baton.types import InstanceId


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(32, LAYOUT.block_bytes)
    arena.blocks[:] = np.arange(32, dtype=np.uint8)[:, None]
    arena.generations[:] = np.arange(32) + 1000
    yield arena
    arena.close()


@pytest.fixture
def server(arena: HostArena) -> Iterator[BlockServer]:
    server = BlockServer(arena, fingerprint(LAYOUT), InstanceId("p0"), kinds=("tcp",))
    yield server
    server.close()


@pytest.fixture
def target() -> Iterator[HostArena]:
    target = HostArena(32, LAYOUT.block_bytes)
    target.blocks[:] = 0xEE
    yield target
    target.close()


@pytest.fixture(params=[1, 3], ids=["one-stream", "three-streams"])
def streams(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def fetcher(streams: int, target: HostArena) -> Iterator[BlockFetcher]:
    fetcher = BlockFetcher(
        target,
        fingerprint(LAYOUT),
        kinds=("tcp",),
        links=LinkOptions(tcp=TcpOptions(streams, share_bytes=1, streams_on_host=streams)),
    )
    yield fetcher
    fetcher.close()


IDS = np.array([3, 4, 5, 20, 9, 30])


LOCAL = np.arange(6)


def fetch(fetcher: BlockFetcher, source: BlockSource, **options: Any) -> Any:
    return fetcher.fetch(source, IDS, IDS + 1000, LOCAL, **({"deadline": soon()} | options))


def cuts(total: int, handshake: int) -> list[int]:
    """Offsets worth cutting at: through the handshake and the headers, within the blocks, all of the trailer."""
    dense = [*range(0, handshake, 37), *range(handshake - 2, handshake + 24)]
    sparse = np.linspace(handshake + 24, total - 4, 9).astype(int).tolist()
    return sorted({*dense, *sparse, *range(total - 4, total)})


def handshake_bytes(server: BlockServer) -> int:
    """Bytes the server says before it is asked for blocks."""
    seen: list[int] = []

    def count(at: int, data: bytes) -> bytes:
        seen.append(at + len(data))
        return data

    proxy = Proxy(server.endpoints[0].address, count)
    stream = connect_tcp(proxy.address, Wait(soon()))
    source = server.source
    facts = Facts(source.epoch, source.fingerprint, source.num_blocks)
    greet_as_client(stream, None, Wait(soon()), purpose=PURPOSE_READ, facts=facts)
    stream.close()
    proxy.close()
    return max(seen)


def test_a_connection_cut_anywhere_fails_and_the_next_fetch_works(
    server: BlockServer, fetcher: BlockFetcher, target: HostArena, streams: int
) -> None:
    handshake = handshake_bytes(server)
    # The smallest answer on any of the connections: a header, two bitmaps, and a share of the blocks.
    count = len(IDS) // streams
    share = BlockReads.of(IDS[:count], IDS[:count], IDS[:count])
    total = handshake + HEADER.size + 1 + count * LAYOUT.block_bytes + tail_bytes(share, count, checksums=True)
    for at_cut in cuts(total, handshake):
        target.blocks[:] = 0xEE
        proxy = Proxy(server.endpoints[0].address, cut_at=at_cut)
        with pytest.raises(TransferError):
            fetch(fetcher, proxy.source(server.source))
        proxy.close()
        assert (target.blocks[6:] == 0xEE).all()
        assert len(fetcher._links) == 0 or not any(link.users for link in fetcher._links._links.values())
    assert fetch(fetcher, server.source).valid.all()
    assert (target.blocks[LOCAL] == IDS[:, None]).all()


def test_a_garbled_control_byte_never_makes_a_wrong_block_valid(
    server: BlockServer, fetcher: BlockFetcher, target: HostArena
) -> None:
    handshake = handshake_bytes(server)
    for at_byte in [*range(0, handshake, 41), *range(handshake, handshake + 17)]:

        def garble(at: int, data: bytes, at_byte: int = at_byte) -> bytes:
            if not at <= at_byte < at + len(data):
                return data
            changed = bytearray(data)
            changed[at_byte - at] ^= 0x41
            return bytes(changed)

        proxy = Proxy(server.endpoints[0].address, garble)
        try:
            result = fetch(fetcher, proxy.source(server.source), deadline=soon(2))
        except BatonError:
            pass  # refused: right
        else:
            good = result.valid
            assert (target.blocks[LOCAL[good]] == IDS[good, None]).all()
        proxy.close()
        for link in list(fetcher._links._links.values()):
            fetcher._links.drop(link)
    assert fetch(fetcher, server.source).valid.all()


@pytest.mark.parametrize("where", [10, 5000, 100_000])
def test_a_stalled_connection_ends_at_the_deadline(
    server: BlockServer, fetcher: BlockFetcher, target: HostArena, where: int
) -> None:
    release, gone_on = threading.Event(), threading.Event()

    def stall(at: int, data: bytes) -> bytes:
        if at + len(data) > where and not release.wait(240):
            gone_on.set()
        return data

    proxy = Proxy(server.endpoints[0].address, stall)
    with pytest.raises(DeadlineError):
        fetch(fetcher, proxy.source(server.source), deadline=soon(0.2))
    assert not gone_on.is_set(), "it waited for the connection"
    target.blocks[:] = 0xEE
    release.set()  # what comes late goes nowhere
    proxy.close()
    assert (target.blocks == 0xEE).all()
    assert fetch(fetcher, server.source).valid.all()


def test_a_cancelled_fetch_stops_writing(server: BlockServer, fetcher: BlockFetcher, target: HostArena) -> None:
    reached, release, flag = threading.Event(), threading.Event(), threading.Event()

    def stall(at: int, data: bytes) -> bytes:
        if at + len(data) > 100_000:
            reached.set()
            release.wait(240)
        return data

    proxy = Proxy(server.endpoints[0].address, stall)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fetch(fetcher, proxy.source(server.source), cancelled=flag)
        except BatonError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(240)
    flag.set()
    thread.join(240)
    assert [type(e) for e in errors] == [CancelledError]
    target.blocks[:] = 0xEE
    release.set()
    proxy.close()
    assert (target.blocks == 0xEE).all()


def test_a_block_recycled_while_it_is_sent_is_not_valid() -> None:
    """The transfer is bigger than all buffers on the way, so the server is still sending when the owner recycles."""
    arena, target = HostArena(64, BIG.block_bytes), HostArena(64, BIG.block_bytes)
    arena.generations[:] = 7

    def recycle(at: int, data: bytes) -> bytes:
        if arena.generations[63] == 7 and at > 100_000:
            arena.generations[63] = 8
            arena.blocks[63] = 0xFF
        return data

    with contextlib.closing(BlockServer(arena, fingerprint(BIG), InstanceId("p0"), kinds=("tcp",))) as server:
        proxy = Proxy(server.endpoints[0].address, recycle)
        with contextlib.closing(BlockFetcher(target, fingerprint(BIG), kinds=("tcp",))) as fetcher:
            ids = np.arange(64)
            result = fetcher.fetch(proxy.source(server.source), ids, np.full(64, 7), ids, deadline=soon())
        proxy.close()
    assert result.valid.tolist() == [True] * 63 + [False]
    assert result.num_bytes == 63 * BIG.block_bytes


def test_a_block_recycled_while_it_is_copied_is_not_valid() -> None:
    arena, target = HostArena(96, BIG.block_bytes), HostArena(96, BIG.block_bytes)
    arena.generations[:] = 7

    def recycle() -> None:
        arena.generations[[0, 95]] = 8

    hook = Hook(3, recycle)  # after the first 32 MiB: block 0 has been copied and checked, block 95 has not
    server = BlockServer(arena, fingerprint(BIG), InstanceId("p0"), kinds=("shm",))
    fetcher = BlockFetcher(target, fingerprint(BIG))
    ids = np.arange(96)
    fetcher.fetch(server.source, [0], [7], [0], deadline=soon())
    result = fetcher.fetch(server.source, ids, np.full(96, 7), ids, deadline=soon(), cancelled=hook)
    fetcher.close()
    server.close()
    assert hook.acted
    assert np.flatnonzero(~result.valid).tolist() == [95]


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process(BIG, 96)
    yield process
    process.stop()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_fetch_from_another_process(process: Process, kind: str) -> None:
    target = HostArena(96, BIG.block_bytes)
    ids = np.random.default_rng(0).permutation(96)
    with contextlib.closing(BlockFetcher(target, fingerprint(BIG), kinds=(kind,))) as fetcher:
        result = fetcher.fetch(process.source, ids, ids + 1000, np.arange(96), deadline=soon())
        assert (result.valid.all(), result.pipe_kind) == (True, kind)
    assert (target.blocks == ids.astype(np.uint8)[:, None]).all()


@pytest.mark.parametrize(
    ("kind", "look"), [("shm", 4), ("tcp", 3), ("nixl", 3), ("nixl", 4), ("gloo", 4), ("gloo", 60)]
)
def test_sigkill_of_the_server_in_mid_transfer(kind: str, look: int) -> None:
    if kind in {"nixl", "gloo"}:
        warm_up(kind)
    memory = segments()
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    target = HostArena(96, BIG.block_bytes)
    ids = np.arange(96)
    kinds = ",".join(dict.fromkeys(("shm", kind)))
    process = Process(BIG, 96, kinds=kinds)
    fetcher = BlockFetcher(target, fingerprint(BIG), kinds=(kind,))
    fetcher.fetch(process.source, [1], [1001], [0], deadline=soon())
    died = threading.Event()

    def kill() -> None:
        process.kill()
        died.set()

    with pytest.raises(PipeClosedError):  # and not the deadline
        fetcher.fetch(process.source, ids, ids + 1000, ids, deadline=soon(), cancelled=Hook(look, kill))
    assert died.is_set()
    with pytest.raises(PipeClosedError):
        fetcher.fetch(process.source, [0], [1000], [0], deadline=soon())
    successor = Process(BIG, 96, kinds=kinds)  # same instance, another epoch
    assert fetcher.fetch(successor.source, ids, ids + 1000, ids, deadline=soon()).valid.all()
    old_epoch = BlockSource(InstanceId("p0"), process.source.epoch, successor.source.endpoints, fingerprint(BIG), 96)
    with pytest.raises(StaleBlockError):
        fetcher.fetch(old_epoch, [0], [1000], [0], deadline=soon())
    fetcher.close()
    process.stop()
    successor.stop()
    target.close()
    del target, fetcher
    gc.collect()
    assert left_behind(memory) == set()
    assert not any(name in open_unix_sockets() for name in (process.address("shm"), successor.address("shm")))
    assert len(os.listdir("/proc/self/fd")) <= fds  # what tests before left may be gone meanwhile


def warm_up(kind: str) -> None:
    """Have done what a library does once per process, and keeps."""
    arena = HostArena(4, LAYOUT.block_bytes)
    with contextlib.closing(BlockServer(arena, fingerprint(LAYOUT), InstanceId("w"), kinds=(kind,))) as server:
        target = HostArena(4, LAYOUT.block_bytes)
        with contextlib.closing(BlockFetcher(target, fingerprint(LAYOUT), kinds=(kind,))) as fetcher:
            assert fetcher.fetch(server.source, [1], [0], [2], deadline=soon()).valid.all()
        target.close()
    arena.close()


def open_unix_sockets() -> str:
    with open("/proc/net/unix", encoding="ascii", errors="replace") as table:
        return table.read()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_sigkill_at_random_moments_never_yields_a_wrong_block(kind: str) -> None:
    rng = np.random.default_rng(5)
    target = HostArena(64, BIG.block_bytes)
    ids = np.arange(64)
    fetcher = BlockFetcher(target, fingerprint(BIG), kinds=(kind,))
    for _ in range(4):
        process = Process(BIG, 64)
        killer = threading.Timer(float(rng.uniform(0, 0.06)), process.kill)
        killer.start()
        with contextlib.suppress(PipeClosedError):
            while True:
                target.blocks[:] = 0xEE
                assert fetcher.fetch(process.source, ids, ids + 1000, ids, deadline=soon()).valid.all()
                assert (target.blocks == ids.astype(np.uint8)[:, None]).all()
        killer.join()
        process.stop()
    fetcher.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_stopped_server_costs_the_deadline_and_works_again_afterwards(process: Process, kind: str) -> None:
    target = HostArena(96, BIG.block_bytes)
    fetcher = BlockFetcher(target, fingerprint(BIG), kinds=(kind,))
    process.popen.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError):  # and no waiting for a process that says nothing
        fetcher.fetch(process.source, [1], [1001], [0], deadline=soon(0.2))
    process.popen.send_signal(signal.SIGCONT)
    assert fetcher.fetch(process.source, [1], [1001], [0], deadline=soon()).valid.all()
    fetcher.close()


def test_an_address_where_something_else_answers(fetcher: BlockFetcher, server: BlockServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            client, _ = other.accept()
            with client, contextlib.suppress(ConnectionError):
                client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                while client.recv(4096):  # closed before, it would be reset, maybe before the answer is read
                    continue

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = Endpoint("tcp", f"127.0.0.1:{other.getsockname()[1]}")
        source = server.source
        elsewhere = BlockSource(source.instance_id, source.epoch, (endpoint,), source.fingerprint, source.num_blocks)
        with pytest.raises(TransferError, match="does not speak"):
            fetch(fetcher, elsewhere)
        thread.join(240)
