"""Copies and casts of blocks between two mappings, fenced by generations; big ones do not hold the interpreter lock.

One call of C (``native/block_copy.c``) reads any number of blocks, past the cache: scattered blocks about as fast as
one big ``memcpy``, where a ``memcpy`` per block is 1.6 times slower.

Another (``native/dtype_cast.c``) converts KV between types on its way. It rounds to nearest, ties to even, as
``torch.Tensor.to`` does; to int8 as the engine does when it writes its own KV. A block with a finite number that the
target's dtype could only hold as infinity is told apart: its KV cannot be had in that dtype, and a number close to it
would be another one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash._xxhash

from baton.errors import ConfigError, PipeClosedError
from baton.kv_cache.layout import CODES, FLOAT_BYTES
from baton.kv_transfer.streams import BATCH_BYTES, TICK_S, Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Generations, Ids, Valid
from baton.kv_transfer.wire import Checksums, Spans
from baton.native import address_of, function

COPY_BATCH_BYTES = 32 << 20
"""Bytes between two looks at the cancel flag (a few milliseconds)."""
SMALL_READ_BYTES = 64 << 10
"""Reads of up to so many bytes keep the interpreter lock (a few microseconds)."""
_data = ctypes.c_char_p
_pointer = ctypes.c_void_p
_size = ctypes.c_size_t
_ARGUMENTS = (_pointer, _data, _data, _data, _size, _data, _size, _pointer)
_read_small = function("read_blocks", ctypes.c_int, *_ARGUMENTS, keep_lock=True)
"""With the lock: a thread that took it meanwhile could have it for milliseconds."""
_read = function("read_blocks", ctypes.c_int, *_ARGUMENTS)
_line_holds = function("line_holds", ctypes.c_int, ctypes.c_int64, keep_lock=True)
WIDEST_BITS = 512
_STALE, _RIGHT, _OVER = range(3)
_CONVERT_S = 60.0
_cast_blocks = function(
    *("cast_blocks", None, ctypes.c_int),
    *(_pointer, _pointer, _pointer, _pointer, _pointer, _pointer, _size, _pointer, _size, _pointer),
)


def merge_runs(remote_ids: Ids, local_ids: Ids) -> npt.NDArray[np.int64]:
    """Join neighbours: int64 [runs, 3] of first local id, first remote id, number of blocks.

    A run goes on while both ids rise by one.
    """
    if len(remote_ids) == 0:
        return np.empty((0, 3), dtype=np.int64)
    breaks = np.flatnonzero((np.diff(remote_ids) != 1) | (np.diff(local_ids) != 1)) + 1
    first = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((first, [len(remote_ids)])))
    return np.stack((local_ids[first], remote_ids[first], counts), axis=1)


class Line:
    """A connection to the owner of mapped pools, whose leases end with it.

    Its descriptor is a copy, closed with the last reader that has it: no call can be in the kernel with it then, and
    reads need no lock against the stream being closed.

    Raises:
        PipeClosedError: The stream was closed.
    """

    def __init__(self, stream: Stream) -> None:
        self.peer = stream.peer
        self.descriptor = -1
        with stream.in_use():
            self.descriptor = os.dup(stream.sock.fileno())

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def fence() -> None:
    """Order the memory reads before this call before those after it, on every machine.

    Two pairs of lock and unlock: reads before the first unlock cannot sink below it, reads after the second lock
    cannot rise above it.
    """
    for _ in range(2):
        lock = threading.Lock()
        lock.acquire()
        lock.release()


class _Way(ctypes.Structure):
    """The C structure ``way``."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("to_bytes", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("source_bytes", ctypes.c_uint64),
        ("generations", ctypes.c_uint64),
        ("line", ctypes.c_int64),
    )


class BlockReader:
    """Reads one mapped pool's blocks into pools of this process; thread safe.

    Args:
        remote: uint8 [blocks, block_bytes], C-contiguous.
        generations: Generations of the remote blocks, uint64 [blocks]; may change at any time.
        line: Connection to the pool's owner; ``None``: this process owns the pool.
    """

    def __init__(self, remote: Bytes, generations: Generations, line: Line | None = None) -> None:
        # Kept alive here: C has their addresses only.
        self._pool = (remote, generations)
        self._line = line
        descriptor = -1 if line is None else line.descriptor
        self._from = address_of(remote), remote.shape[1], address_of(generations), descriptor
        self._way: tuple[weakref.ref[Bytes], Any] | None = None  # to the pool of the latest read; pools don't move

    def read(self, local: Bytes, reads: BlockReads, wait: Wait) -> Valid:
        """Copy blocks, or their segments, and say which had the wanted generation before and after.

        Args:
            local: uint8 [blocks, block_bytes], C-contiguous, writable, with its own number and size of blocks.
            reads: Blocks to copy, in range; checked by the caller.
            wait: Looked at every ``COPY_BATCH_BYTES``.

        Returns:
            bool [n].

        Raises:
            PipeClosedError: The pool's owner is gone; what was copied must not be used.
            DeadlineError, CancelledError: Part of the blocks may have been written.
        """
        wait.check("copying blocks")
        count = len(reads.remote_ids)
        each = reads.bytes_per_block(local.shape[1])
        if count * each <= COPY_BATCH_BYTES or count <= 1:
            return self._copy(local, reads, count * each)
        batch = max(1, COPY_BATCH_BYTES // each)
        parts: list[Valid] = []
        for at in range(0, count, batch):
            part = reads.select(slice(at, at + batch))
            parts.append(self._copy(local, part, len(part) * each))
            wait.record_progress()
            wait.check("copying blocks")
        return np.concatenate(parts)

    def holds(self) -> bool:
        """Whether the connection to the pool's owner is there; never blocks."""
        return bool(_line_holds(self._from[3]))

    def _copy(self, local: Bytes, reads: BlockReads, num_bytes: int) -> Valid:
        """Copy blocks of so many bytes together; see :meth:`read`."""
        known = self._way
        if known is None or known[0]() is not local:
            way = _Way(address_of(local), local.shape[1], *self._from)
            known = self._way = weakref.ref(local), ctypes.byref(way)
        segments = reads.segments_of(local.shape[1])
        count = len(reads.remote_ids)
        valid = bytearray(count or 1)
        call = _read_small if num_bytes <= SMALL_READ_BYTES else _read
        # As bytes, whose address ctypes has at once: to ask an array for its own takes longer than a small copy.
        ids = (reads.remote_ids.tobytes(), reads.generations.tobytes(), reads.local_ids.tobytes())
        said = ctypes.byref(ctypes.c_char.from_buffer(valid))
        if not call(known[1], *ids, count, segments.tobytes(), len(segments), said):
            raise self._owner_error()
        return np.frombuffer(valid, np.bool_, count)

    def _owner_error(self) -> PipeClosedError:
        peer = self._line.peer if self._line else "the owner"
        return PipeClosedError(f"{peer} went away during a read: its lease on the blocks is over")


class _Side(ctypes.Structure):
    """The C structure ``side``."""

    _fields_ = (("base", ctypes.c_uint64), ("block_bytes", ctypes.c_uint64))


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """What a read that converts has brought.

    Attributes:
        valid: bool [n], as :meth:`ReadPipe.read` returns; blocks out of range are not.
        out_of_range: bool [n]: blocks with numbers that the target's dtype cannot hold.
    """

    valid: Valid
    out_of_range: Valid


def read_casting(
    local: Bytes,
    remote: Bytes,
    generations: Generations,
    reads: BlockReads,
    wait: Wait,
    *,
    vector_bits: int = WIDEST_BITS,
) -> Cast:
    """Convert parts of blocks, and say which had the wanted generation before and after.

    Args:
        local: uint8 [blocks, block_bytes], C-contiguous, writable.
        remote: The same with its own number and size of blocks.
        generations: Generations of the remote blocks, uint64 [blocks]; may change at any time.
        reads: In range, with ``casts``.
        wait: Looked at every ``COPY_BATCH_BYTES``.
        vector_bits: Bound on the vector registers that are used.

    Raises:
        DeadlineError, CancelledError: Part of the blocks may have been written.
    """
    pieces = np.ascontiguousarray(reads.casts, dtype=np.int64)
    states = np.full(len(reads), _STALE, dtype=np.uint8)
    sides = tuple(ctypes.byref(_Side(address_of(pool), pool.shape[1])) for pool in (local, remote))
    batch = max(1, COPY_BATCH_BYTES // max(1, reads.bytes_per_block(remote.shape[1])))
    for at in range(0, len(reads), batch):
        wait.record_progress()
        wait.check("converting blocks")
        some = reads.select(slice(at, at + batch))
        ids = [np.ascontiguousarray(x) for x in (some.remote_ids, some.generations, some.local_ids)]
        _cast_blocks(
            *(vector_bits, *sides, address_of(generations), *(address_of(x) for x in ids), len(some)),
            *(address_of(pieces), len(pieces), address_of(states[at : at + batch])),
        )
    return Cast(states == _RIGHT, states == _OVER)


def convert(rows: Bytes, source: str, target: str) -> tuple[Bytes, Valid]:
    """Convert rows of floats, uint8 [rows, bytes].

    Returns:
        The rows in the target's dtype, uint8 [rows, bytes], and bool [rows]: whether a finite number of the row became
        infinite.

    Raises:
        ConfigError: One of the dtypes is no float.
    """
    if not {source, target} <= FLOAT_BYTES.keys():
        raise ConfigError(f"rows of {source} cannot be converted to {target}", field="kv_dtype")
    rows, ids = np.ascontiguousarray(rows), np.arange(len(rows))
    count = rows.shape[1] // FLOAT_BYTES[source]
    made = np.empty((len(rows), count * FLOAT_BYTES[target]), np.uint8)
    casts = np.array([[0, -1, 0, -1, 1, count, CODES[source], CODES[target]]])
    reads = BlockReads(ids, np.zeros(len(rows), np.uint64), ids, np.array([[0, 0, rows.shape[1]]]), casts=casts)
    cast = read_casting(made, rows, reads.generations, reads, Wait(time.monotonic() + _CONVERT_S))
    return made, cast.out_of_range


_number = ctypes.c_uint64
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
        stream: Stream to the peer.
        spans: Addresses and sizes in this process's memory, uint64 [n, 2].
        wait: Deadline and cancel flag.
        hasher: Computes the spans' checksums; ``None``: none are wanted.
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
    place = address_of(spans)
    tick_ms = int(TICK_S * 1000)

    def once(fd: int, state: int, code: int) -> int:
        return int(_recv_spans(fd, place, state, _address(hasher), BATCH_BYTES, tick_ms, code))

    _until_done(once, stream, spans, wait, "receiving blocks", None)


def _address(hasher: PieceHasher | None) -> int | None:
    return None if hasher is None else hasher.address


def _until_done(
    once: Callable[[int, int, int], int], stream: Stream, spans: Spans, wait: Wait, what: str, stall_s: float | None
) -> None:
    """Call with a descriptor, a state and a place for an error number until no bytes are left."""
    state = np.array([0, 0, spans[:, 1].sum(), 0], np.uint64)
    code = ctypes.c_int()
    places = address_of(state), ctypes.addressof(code)
    with stream.in_use():
        fd = stream.sock.fileno()
        while int(state[2]):
            moved = once(fd, *places)
            if code.value == errno.EPIPE:
                raise stream.end_error(what)
            if code.value not in (0, errno.EAGAIN):
                raise stream.end_error(what, OSError(code.value, os.strerror(code.value)))
            if moved:
                wait.record_progress()
            if stall_s is not None and moved:
                wait = Wait(time.monotonic() + stall_s, wait.cancelled)
            elif int(state[2]):
                wait.check(what)
