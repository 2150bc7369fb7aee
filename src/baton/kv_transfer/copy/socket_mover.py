"""Moves spans of memory over stream sockets in C, checksums included: thousands of blocks cost Python one call."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash._xxhash

from baton.kv_transfer.protocol.deadline import TICK_S, Wait
from baton.kv_transfer.protocol.read_wire import Checksums, Spans
from baton.kv_transfer.protocol.sockets import BATCH_BYTES, Stream
from baton.native import address_of, function

_pointer, _number = ctypes.c_void_p, ctypes.c_uint64
_hasher_new = function("hasher_new", _pointer, _pointer, _pointer, _number, keep_lock=True)
_hasher_free = function("hasher_free", None, _pointer, keep_lock=True)
_send_spans = function("send_spans", ctypes.c_int64, ctypes.c_int, _pointer, _pointer, _pointer, _number, _pointer)
_recv_spans = function(
    *("recv_spans", ctypes.c_int64, ctypes.c_int, _pointer, _pointer, _pointer, _number, ctypes.c_int, _pointer)
)


def _use_xxh3() -> None:
    """Hand xxHash's own functions to the C helpers, so that Baton carries no copy of it.

    Raises:
        ImportError: The xxhash package is built without xxHash's public C functions.
    """
    # On x86 those that end in "dispatch" use the processor's widest vectors; in some builds all of them do.
    wanted = [
        ("XXH3_createState",),
        ("XXH3_freeState",),
        ("XXH3_64bits_reset",),
        ("XXH3_64bits_update_dispatch", "XXH3_64bits_update"),
        ("XXH3_64bits_digest",),
    ]
    library = ctypes.CDLL(xxhash._xxhash.__file__)
    addresses = []
    for names in wanted:
        symbol = next((name for name in names if hasattr(library, name)), None)
        if symbol is None:
            raise ImportError(f"the xxhash package ({xxhash._xxhash.__file__}) lacks the C function {names[-1]}")
        addresses.append(ctypes.cast(library[symbol], ctypes.c_void_p).value)
    function("use_xxh3", None)((ctypes.c_void_p * len(wanted))(*addresses))


_use_xxh3()


class PieceHasher:
    """Checksums (XXH3, 64 bits) of a stream of pieces, however it is cut up on its way.

    Args:
        sizes: Bytes of each piece, none of them empty, uint64 [pieces].

    Attributes:
        sums: uint64 [pieces]; complete once all their bytes have been seen.
    """

    def __init__(self, sizes: npt.NDArray[np.uint64]) -> None:
        self.sums: Checksums = np.zeros(len(sizes), np.uint64)
        self._sizes = sizes  # kept: C has its address
        self.address: int | None = _hasher_new(address_of(sizes), address_of(self.sums), len(sizes))
        if self.address is None:
            raise MemoryError("no memory for checksums")

    def __del__(self) -> None:
        _hasher_free(getattr(self, "address", None))


def send_spans(
    stream: Stream,
    spans: Spans,
    wait: Wait,
    hasher: PieceHasher | None,
    *,
    stall_s: float,
    gate: Callable[[int], int] | None = None,
) -> None:
    """Send spans one after the other; see :meth:`Stream.send_all`.

    Args:
        stream: Where to.
        spans: Of this process's memory.
        wait: Deadline and cancel flag.
        hasher: For their checksums.
        stall_s: Every bit of progress moves the deadline to this many seconds from then.
        gate: Given how many bytes have gone, returns how many may go in all, at least one more; it may wait.
    """
    place = address_of(spans)
    gone = open_to = 0

    def once(fd: int, state: int, code: int) -> int:
        nonlocal gone, open_to
        if gate is not None and gone >= open_to:
            open_to = gate(gone)
        limit = BATCH_BYTES if gate is None else min(BATCH_BYTES, open_to - gone)
        moved = int(_send_spans(fd, place, state, _address(hasher), limit, code))
        gone += moved
        return moved

    _until_done(once, stream, spans, wait, "sending blocks", stall_s)


def recv_spans(stream: Stream, spans: Spans, wait: Wait, hasher: PieceHasher | None) -> None:
    """Fill spans one after the other; see :meth:`Stream.recv_into`."""
    place, tick_ms = address_of(spans), int(TICK_S * 1000)

    def once(fd: int, state: int, code: int) -> int:
        return int(_recv_spans(fd, place, state, _address(hasher), BATCH_BYTES, tick_ms, code))

    _until_done(once, stream, spans, wait, "receiving blocks", None)


def _address(hasher: PieceHasher | None) -> int | None:
    return None if hasher is None else hasher.address


def _until_done(
    once: Callable[[int, int, int], int], stream: Stream, spans: Spans, wait: Wait, what: str, stall_s: float | None
) -> None:
    """Call with a descriptor, a state and a place for an error number until no bytes are left."""
    state, code = np.array([0, 0, spans[:, 1].sum(), 0], np.uint64), ctypes.c_int()
    places = address_of(state), ctypes.addressof(code)
    with stream.in_use():
        fd = stream.sock.fileno()
        while int(state[2]):
            moved = once(fd, *places)
            if code.value == errno.EPIPE:
                raise stream.gone(what)
            if code.value not in (0, errno.EAGAIN):
                raise stream.gone(what, OSError(code.value, os.strerror(code.value)))
            if stall_s is not None and moved:
                wait = Wait(time.monotonic() + stall_s, wait.cancelled)
            elif int(state[2]):
                wait.check(what)
