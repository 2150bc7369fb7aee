"""Where the bytes of a read lie, and how the connection that carries them is set up."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from baton.kv_cache.arena import HostArena
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.pipes.base import ServeLimits, TcpOptions
from baton.kv_transfer.pipes.read_server import serve_reads
from baton.kv_transfer.pipes.tcp import request_blocks
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads
from baton.kv_transfer.wire import source_spans, target_spans
from baton.native import address_of

BLOCK = 64


@pytest.mark.parametrize("counts", [[1], [2, 2, 2], [1, 3, 2]])
def test_spans_are_the_bytes_step_by_step_and_no_two_of_them_touch(counts: list[int]) -> None:
    rng = np.random.default_rng(len(counts))
    blocks = rng.integers(0, 256, (6, BLOCK), dtype=np.uint8)
    ids = np.array([4, 1, 2])
    edges = np.sort(rng.choice(np.arange(1, BLOCK), 2 * sum(counts) - 1, replace=False))
    edges = np.concatenate(([0], edges))  # a segment at the begin of a block: the end of the one before may touch it
    edges[-1] = BLOCK
    table = np.stack((edges[::2], edges[::2], edges[1::2] - edges[::2]), axis=1)
    steps = np.split(table, np.cumsum(counts)[:-1])
    flat = blocks.reshape(-1)
    wanted = np.concatenate(
        [blocks[i, at : at + size] for segments in steps for i in ids for at, _, size in segments.tolist()]
    )
    for spans in (source_spans(blocks, ids, steps), target_spans(blocks, ids, steps)):
        places = [(int(at) - address_of(blocks), int(size)) for at, size in spans]
        assert np.array_equal(np.concatenate([flat[at : at + size] for at, size in places]), wanted)
        assert all(at + size != then for (at, size), (then, _) in itertools.pairwise(places))


def test_no_blocks_have_no_spans() -> None:
    blocks = np.zeros((2, BLOCK), np.uint8)
    assert source_spans(blocks, np.zeros(0, np.int64), [np.array([[0, 0, BLOCK]])]).shape == (0, 2)


@pytest.mark.parametrize(("address", "suited"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_only_connections_within_a_host_are_bounded_and_unpaced(address: str, suited: bool) -> None:
    shards = KVShards((HostArena(2, 4096, private=True),))
    shards.primary.blocks[:] = 7
    shards.primary.generations[:] = 1
    local = np.zeros((2, 4096), np.uint8)
    with socket.create_server((address, 0)) as listener:
        # From an address of its own: two that differ are two hosts, as far as a connection tells.
        near = socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0))
        far = listener.accept()[0]
    client, server = Stream(near, peer="server"), Stream(far, peer="client")
    assert client.stays_on_host is server.stays_on_host is suited

    def settings() -> tuple[int, bytes]:
        return (
            far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            far.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"),
        )

    before = settings()
    serving = threading.Thread(target=serve_reads, args=(server, shards, ServeLimits(idle_s=20.0)))
    serving.start()
    try:
        for streams, size in ((1, 1 << 20), (4, 256 << 10), (1, 1 << 20)):
            reads = BlockReads.of([0, 1], [1, 1], [1, 0])
            options = TcpOptions(streams=streams)
            assert request_blocks(client, reads, local, Wait(time.monotonic() + 240), options=options).all()
            if suited:
                buffer = min(size, int(Path("/proc/sys/net/core/wmem_max").read_text()))
                assert settings() == (2 * buffer, b"reno")  # the kernel doubles what is asked for, for its own books
            else:
                assert settings() == before
        assert (local == 7).all()
    finally:
        client.close()
        serving.join(240)
        server.close()
        shards.close()
    assert not serving.is_alive()
