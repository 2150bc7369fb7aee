"""Moves spans of memory over stream sockets in C, checksums included: thousands of blocks cost Python one call."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.kv_transfer.protocol.deadline import TICK_S, Wait
from baton.kv_transfer.protocol.read_wire import Checksums, Spans
from baton.kv_transfer.protocol.sockets import BATCH_BYTES, Stream
from baton.native import address_of, load_helper

MIN_HASHED_BYTES = 241
"""XXH3 has other ways for fewer bytes."""
_DIGEST_BYTES = 64 + 8 + 8 + 8 + 64 + 64
_HASHER_BYTES = 4 * 8 + _DIGEST_BYTES
_WIDEST_BITS = 512

Sizes = npt.NDArray[np.uint64]
"""Bytes of pieces, uint64 [n]."""


class PieceHasher:
    """Checksums of a stream of pieces, however it is cut up on its way.

    Attributes:
        sums: uint64 [pieces]; complete once all their bytes have been seen.
    """

    def __init__(self, library: Any, sizes: Sizes, vector_bits: int) -> None:
        self.sums: Checksums = np.zeros(len(sizes), np.uint64)
        self._sizes = sizes
        self._memory = np.zeros(_HASHER_BYTES // 8, np.uint64)
        self.address = address_of(self._memory)
        library.baton_begin_pieces(self.address, address_of(sizes), address_of(self.sums), vector_bits)


class SpanMover:
    """Sends and fills spans of memory, and hashes them on the way; thread safe."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls) -> SpanMover | None:
        """Return one, or ``None`` where there is no compiler."""
        library = load_helper(Path(__file__).with_name("socket_mover.c"))
        if library is None:
            return None
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        library.baton_begin_pieces.argtypes = [pointer, pointer, pointer, ctypes.c_int]
        library.baton_begin_pieces.restype = None
        library.baton_send_spans.argtypes = [ctypes.c_int, pointer, pointer, pointer, number, pointer]
        library.baton_send_spans.restype = ctypes.c_int64
        library.baton_recv_spans.argtypes = [ctypes.c_int, pointer, pointer, pointer, number, ctypes.c_int, pointer]
        library.baton_recv_spans.restype = ctypes.c_int64
        return cls(library)

    def hasher(self, sizes: Sizes, *, vector_bits: int = _WIDEST_BITS) -> PieceHasher | None:
        """Return a hasher of the pieces that will pass; ``None`` if one is too small to be hashed here.

        Args:
            sizes: Bytes of each, uint64 [pieces].
            vector_bits: Bound on the vector registers that are used.
        """
        if len(sizes) and int(sizes.min()) < MIN_HASHED_BYTES:
            return None
        return PieceHasher(self._library, sizes, vector_bits)

    def send(
        self,
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
        function, place = self._library.baton_send_spans, address_of(spans)
        gone = open_to = 0

        def once(fd: int, state: int, code: int) -> int:
            nonlocal gone, open_to
            if gate is not None and gone >= open_to:
                open_to = gate(gone)
            limit = BATCH_BYTES if gate is None else min(BATCH_BYTES, open_to - gone)
            moved = int(function(fd, place, state, _address(hasher), limit, code))
            gone += moved
            return moved

        _until_done(once, stream, spans, wait, "sending blocks", stall_s)

    def recv(self, stream: Stream, spans: Spans, wait: Wait, hasher: PieceHasher | None) -> None:
        """Fill spans one after the other; see :meth:`Stream.recv_into`."""
        function, place, tick_ms = self._library.baton_recv_spans, address_of(spans), int(TICK_S * 1000)

        def once(fd: int, state: int, code: int) -> int:
            return int(function(fd, place, state, _address(hasher), BATCH_BYTES, tick_ms, code))

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
