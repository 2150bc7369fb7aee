"""Spans of memory through a socket in C: the bytes, the checksums on both sides, and waits that end."""

from __future__ import annotations

import functools
import socket
import time

import numpy as np
import pytest
import xxhash
from tests.support.transport.transport_rig import in_thread, soon

from baton.errors import DeadlineError, PipeClosedError
from baton.kv_transfer.native_copy import PieceHasher, recv_spans, send_spans
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.wire import Spans
from baton.native import address_of

MEBIBYTES = np.full(4, 1 << 20, np.uint64)


def tcp_pair() -> tuple[Stream, Stream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    return Stream(one, peer="two"), Stream(two, peer="one")


def cut(data: np.ndarray, rng: np.random.Generator, pieces: int) -> Spans:
    """Spans that cover an array in order, cut anywhere."""
    edges = np.unique(np.concatenate(([0, len(data)], rng.integers(0, len(data), pieces))))
    return np.stack((edges[:-1] + address_of(data), np.diff(edges)), axis=1).astype(np.uint64)


@pytest.mark.parametrize(
    "size", [1, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 32768, 700_001]
)
def test_bytes_and_checksums_however_the_spans_are_cut(size: int) -> None:
    rng = np.random.default_rng(size)
    sizes = np.array([size, size, size + 1, 241, size, 2 * size, size], np.uint64)
    data = rng.integers(0, 256, int(sizes.sum()), dtype=np.uint8)
    wanted = [xxhash.xxh3_64_intdigest(piece.data) for piece in np.split(data, np.cumsum(sizes)[:-1])]
    out, back = tcp_pair()
    for pieces in (1, 3, 40, 600):
        target = np.zeros_like(data)
        sent = PieceHasher(sizes)
        came = PieceHasher(sizes)
        mine, theirs = cut(data, rng, pieces), cut(target, rng, pieces)
        sending = in_thread(functools.partial(send_spans, out, mine, Wait(soon()), sent, stall_s=240.0))
        recv_spans(back, theirs, Wait(soon()), came)
        sending.result(240)
        assert (target == data).all()
        assert sent.sums.tolist() == came.sums.tolist() == wanted
    out.close()
    back.close()


@pytest.mark.parametrize("hashed", [False, True])
def test_words_after_the_bytes_are_left_and_short_ones_wake(hashed: bool) -> None:
    """What the receiver asked the kernel for (many bytes per wake-up) ends with its spans."""
    out, back = tcp_pair()
    data = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(data)

    def send() -> None:
        for at in range(0, len(data), 300_001):  # pieces that are no multiple of anything
            out.send_all([data[at : at + 300_001].data], Wait(soon()), "sending")
        out.send_all([b"end"], Wait(soon()), "sending")

    sending = in_thread(send)
    recv_spans(
        back,
        cut(target, np.random.default_rng(0), 9),
        Wait(soon()),
        PieceHasher(MEBIBYTES) if hashed else None,
    )
    assert (target == data).all()
    assert back.recv_exact(3, Wait(soon()), "receiving") == b"end"
    assert back.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    sending.result(240)
    out.close()
    back.close()


@pytest.mark.parametrize("hashed", [False, True])
def test_a_peer_that_stops_or_leaves_in_the_middle(hashed: bool) -> None:
    out, back = tcp_pair()
    target = np.zeros(4 << 20, np.uint8)
    spans = cut(target, np.random.default_rng(0), 50)

    def hasher() -> PieceHasher | None:
        return PieceHasher(MEBIBYTES) if hashed else None

    out.send_all([bytes(700_000)], Wait(soon()), "sending")
    with pytest.raises(DeadlineError):
        recv_spans(back, spans, Wait(time.monotonic() + 0.1), hasher())
    much = np.zeros(64 << 20, np.uint8)
    with pytest.raises(DeadlineError):  # nobody takes what is sent
        send_spans(back, cut(much, np.random.default_rng(0), 50), Wait(soon()), None, stall_s=0.1)
    out.close()
    with pytest.raises(PipeClosedError):
        recv_spans(back, spans, Wait(soon()), hasher())
    back.close()
