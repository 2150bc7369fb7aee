"""Types of the block transfer: sources of blocks, reads and their results."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.api.v1 import common_pb2
from baton.errors import InvalidRequestError
from baton.kv_cache.arena import Arena, Spans
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.reshard import Casts, Segments
from baton.rpc.convert import fingerprint_from_pb, fingerprint_to_pb
from baton.types import Epoch, InstanceId

Ids = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]
Valid = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

MAX_BLOCKS_PER_READ = 65_536
"""Blocks in one read request on the wire; longer reads are split."""
MAX_SEGMENTS = 65_536
"""Segments per block in one read request: 128 layers with 256 heads."""
MAX_SPANS_PER_READ = 1 << 18
"""Blocks times segments in one read request, which both ends keep a few words of each for; larger reads are split."""
MAX_STEPS = 1024
"""Steps in one read request; there are at most as many as layers."""
Steps = npt.NDArray[np.int64]
"""int64 [n, 2]: progress of the source from which on the next so many segments are there."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A listening pipe: its kind (``shm``, ``tcp``, ...) and its address as that kind writes it."""

    kind: str
    address: str


@dataclass(frozen=True, slots=True)
class BlockSource:
    """An instance whose blocks can be read, as it described itself.

    Attributes:
        endpoints: In the owner's order.
        num_blocks: Blocks in its arena.
    """

    instance_id: InstanceId
    epoch: Epoch
    endpoints: tuple[Endpoint, ...]
    fingerprint: Fingerprint
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class FetchResult:
    """Result of a fetch.

    Attributes:
        pipe_kind: Kind of pipe the bytes came over; empty if none were asked for.
        num_bytes: Bytes of valid blocks.
        seconds: Wall time from call to return.
        waited_s: How much of it was waiting for the source's computation.
        valid: bool [n], per block asked for: whether its content is what was offered. Others must not be used.
        fallback_reason: Why a kind preferred over ``pipe_kind`` was not used; empty if there was none.
        num_out_of_range: How many blocks are not valid because they have numbers that this side's dtype cannot hold.
    """

    pipe_kind: str
    num_bytes: int
    seconds: float
    valid: Valid
    fallback_reason: str = ""
    waited_s: float = 0.0
    num_out_of_range: int = 0

    @property
    def failure(self) -> str:
        """Why blocks are not valid; empty: all are."""
        if self.num_out_of_range:
            return f"{self.num_out_of_range} blocks have numbers out of this instance's dtype's range"
        invalid = int((~self.valid).sum())
        return f"{invalid} blocks changed, or were damaged, on their way" if invalid else ""


@dataclass(frozen=True, slots=True, eq=False)
class BlockReads:
    """Blocks to copy, [n]: ``remote_ids[i]``, if its generation still is ``generations[i]``, to ``local_ids[i]``.

    Attributes:
        segments: Which bytes of a block go where, the same for every pair; ``None``: whole blocks.
        source_shard: Index of the source's rank whose blocks are meant.
        steps: Which of the segments the source is still computing: all blocks' segments of the first step come first.
            ``None``: everything is there.
        casts: Where the source's KV is of another type: how what is read becomes what is written, the same for every
            pair. ``segments`` are what is read then, in rising order, and their second column says nothing.
    """

    remote_ids: Ids
    generations: Generations
    local_ids: Ids
    segments: Segments | None = None
    source_shard: int = 0
    steps: Steps | None = None
    casts: Casts | None = None

    @classmethod
    def of(cls, remote_ids: npt.ArrayLike, generations: npt.ArrayLike, local_ids: npt.ArrayLike) -> BlockReads:
        """Build from anything array-like.

        Raises:
            InvalidRequestError: Lengths differ, values are not integers, or a local block is named twice.
        """
        remote = integers(remote_ids, "remote_ids")
        local = integers(local_ids, "local_ids")
        gens = integers(generations, "generations").astype(np.uint64)
        for name, array in (("generations", gens), ("local_ids", local)):
            if len(array) != len(remote):
                raise InvalidRequestError(f"{name} has {len(array)} entries for {len(remote)} remote_ids", field=name)
        local = local.astype(np.int64)
        require_different(local)
        return cls(remote.astype(np.int64), gens, local)

    def __len__(self) -> int:
        return len(self.remote_ids)

    def select(self, index: npt.NDArray[np.intp] | slice | Valid) -> BlockReads:
        """Return some of the reads."""
        return BlockReads(
            self.remote_ids[index],
            self.generations[index],
            self.local_ids[index],
            self.segments,
            self.source_shard,
            self.steps,
            self.casts,
        )

    @property
    def blocks_per_request(self) -> int:
        """How many blocks one request may have."""
        return min(MAX_BLOCKS_PER_READ, MAX_SPANS_PER_READ // max(1, self.num_segments))

    @property
    def num_segments(self) -> int:
        """Segments per block."""
        return 1 if self.segments is None else len(self.segments)

    def segments_of(self, block_bytes: int) -> Segments:
        """Return the segments, int64 [m, 3]; ``block_bytes``: of whole blocks."""
        return _whole(block_bytes) if self.segments is None else self.segments

    def segments_by_step(self, block_bytes: int) -> list[tuple[int, Segments]]:
        """Return each step's progress and segments; without steps everything, at 0."""
        segments = self.segments_of(block_bytes)
        if self.steps is None:
            return [(0, segments)]
        edges = np.cumsum(self.steps[:, 1])[:-1]
        return list(zip(self.steps[:, 0].tolist(), np.split(segments, edges), strict=True))

    def bytes_per_block(self, block_bytes: int) -> int:
        """Return how many bytes of a block are copied; ``block_bytes``: of whole blocks."""
        return block_bytes if self.segments is None else int(self.segments[:, 2].sum())

    def check_range(self, num_remote: int, num_local: int) -> None:
        """Refuse ids outside the two arenas.

        Raises:
            InvalidRequestError: Names the side.
        """
        for name, ids, count in (("remote_ids", self.remote_ids, num_remote), ("local_ids", self.local_ids, num_local)):
            require_below(ids, count, name)


@functools.lru_cache(maxsize=64)
def _whole(block_bytes: int) -> Segments:
    segments = np.array([[0, 0, block_bytes]], dtype=np.int64)
    segments.flags.writeable = False
    return segments


def block_spans(ids: Ids, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Spans:
    """Return the same parts of several blocks, block by block.

    Args:
        ids: The blocks, [n].
        starts: First byte of each part within a block, [m].
        sizes: Bytes of each, [m].

    Returns:
        int64 [n * m, 3], as an arena's copies take them.
    """
    parts = np.column_stack((starts, sizes))
    return np.column_stack((np.repeat(ids, len(parts)), np.tile(parts, (len(ids), 1))))


def current(arena: Arena, reads: BlockReads) -> Valid:
    """Return, per read, whether the arena's block still has the generation that was offered."""
    same: Valid = arena.generations[reads.remote_ids] == reads.generations
    return same


def bounds(ids: Ids) -> tuple[int, int]:
    """Return the lowest and the highest of some ids; (0, -1) if there are none."""
    return (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)


def require_below(ids: Ids, count: int, name: str) -> None:
    """Refuse ids outside an arena.

    Raises:
        InvalidRequestError: Names them ``name``.
    """
    lowest, highest = bounds(ids)
    if lowest < 0 or highest >= count:
        raise InvalidRequestError(f"{name} goes from {lowest} to {highest}, the arena has {count} blocks", field=name)


def require_different(local_ids: Ids) -> None:
    """Refuse targets that are named twice.

    Raises:
        InvalidRequestError: One is.
    """
    if len(set(local_ids.tolist())) != len(local_ids):
        raise InvalidRequestError("local_ids names a block twice", field="local_ids")


def integers(values: npt.ArrayLike, name: str) -> npt.NDArray[np.int64] | npt.NDArray[np.uint64]:
    """Return a one-dimensional array of integers.

    Raises:
        InvalidRequestError: It is something else.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(f"{name} must be a list of integers", field=name)
    return array if array.size else array.astype(np.int64)


EPOCH_BYTES = 16
MAX_ENDPOINTS = 16


def source_from_pb(message: common_pb2.KvSource, *, field: str = "source") -> BlockSource:
    """Read a source.

    Raises:
        InvalidRequestError: Epoch or endpoints are malformed; names the field.
    """
    if len(message.epoch) != EPOCH_BYTES:
        raise InvalidRequestError(f"an epoch has {EPOCH_BYTES} bytes, got {len(message.epoch)}", field=f"{field}.epoch")
    if not 1 <= len(message.endpoints) <= MAX_ENDPOINTS:
        raise InvalidRequestError(
            f"a source has 1 to {MAX_ENDPOINTS} endpoints, got {len(message.endpoints)}", field=f"{field}.endpoints"
        )
    return BlockSource(
        instance_id=InstanceId(message.instance_id),
        epoch=Epoch(message.epoch),
        endpoints=tuple(Endpoint(item.kind, item.address) for item in message.endpoints),
        fingerprint=fingerprint_from_pb(message.fingerprint),
        num_blocks=message.num_blocks,
    )


def source_to_pb(source: BlockSource) -> common_pb2.KvSource:
    """Write a source."""
    return common_pb2.KvSource(
        instance_id=source.instance_id,
        epoch=source.epoch,
        endpoints=[common_pb2.KvEndpoint(kind=item.kind, address=item.address) for item in source.endpoints],
        fingerprint=fingerprint_to_pb(source.fingerprint),
        num_blocks=source.num_blocks,
    )
