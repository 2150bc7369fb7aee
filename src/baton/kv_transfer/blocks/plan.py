"""What one fetch is made of: which blocks of a sequence, and which bytes of which rank they are on both sides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import InvalidRequestError
from baton.kv_cache.reshard import Casts, ReshardPlan, Segments, ShardCopy, cast_spans, merge_casts, merge_segments
from baton.kv_transfer.types import BlockReads, Generations, Ids, Steps, Valid, integers, require_different


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBlocks:
    """Blocks of one sequence at the source, and the sequence's blocks here; the two may have different sizes.

    Attributes:
        remote_ids: Blocks in the source's arenas, [n].
        generations: The generation each had when it was offered, [n].
        positions: Place of each in the sequence, counted in blocks of the source, [n].
        local_ids: The sequence's blocks here from its first token on, all different, for each layer group, [G, w]; -1:
            none, nothing is fetched for it.
        writable: Which of them may be written, bool [w]; others have their KV already.
        paired: Blocks go one to one, all of them.
        ready: Progress of the source before its first layer, if it is still computing them: layer i is there at
            ``ready + i + 1``. ``None``: everything is.
    """

    remote_ids: Ids
    generations: Generations
    positions: Ids
    local_ids: Ids
    writable: Valid
    ready: int | None = None
    paired: bool = False

    @classmethod
    def pairs(cls, remote_ids: npt.ArrayLike, generations: npt.ArrayLike, local_ids: npt.ArrayLike) -> SequenceBlocks:
        """Blocks one to one, in any order.

        Raises:
            InvalidRequestError: Lengths differ, values are not integers, or a local block is named twice.
        """
        reads = BlockReads.of(remote_ids, generations, local_ids)
        count = len(reads)
        every = np.ones(count, dtype=np.bool_)
        return cls(reads.remote_ids, reads.generations, np.arange(count), reads.local_ids[None], every, paired=True)

    @classmethod
    def of(
        cls,
        offered: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
        local_ids: npt.ArrayLike,
        writable: npt.ArrayLike,
        ready: int | None = None,
    ) -> SequenceBlocks:
        """Build from anything array-like.

        Args:
            offered: Remote ids, generations and positions.
            local_ids: See the class; [w] where there are no layer groups.
            writable: See the class.
            ready: See the class.

        Raises:
            InvalidRequestError: Lengths differ, values are not integers, or a local block is named twice.
        """
        ids = integers(offered[0], "remote_ids")
        gens = integers(offered[1], "generations")
        groups = np.atleast_2d(np.asarray(local_ids))
        places = integers(offered[2], "positions")
        local = integers(groups.reshape(-1), "local_ids")
        free = np.asarray(writable, dtype=np.bool_)
        for name, array, count in (
            ("generations", gens, len(ids)),
            ("positions", places, len(ids)),
            ("writable", free, groups.shape[1]),
        ):
            if len(array) != count:
                raise InvalidRequestError(f"{name} has {len(array)} entries for {count} blocks", field=name)
        local = local.astype(np.int64)
        require_different(local[local >= 0] if len(groups) > 1 else local)
        by_group = local.reshape(groups.shape)
        return cls(ids.astype(np.int64), gens.astype(np.uint64), places.astype(np.int64), by_group, free, ready)

    def __len__(self) -> int:
        return len(self.remote_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One read of a fetch: from one rank of the source to one rank here.

    Attributes:
        reads: Blocks and segments to copy.
        target: Index of this instance's rank.
        blocks: Indexes of the blocks in the fetch, [len(reads)].
    """

    reads: BlockReads
    target: int
    blocks: npt.NDArray[np.intp]


def parts_of(plan: ReshardPlan, wanted: SequenceBlocks, layers: range | None = None) -> Iterator[Part]:
    """Cut a fetch into reads, in the order of the source's memory.

    Args:
        plan: From the source's shape to this one's.
        wanted: The blocks.
        layers: Only these layers of the whole model; ``None``: all.
    """
    if plan.trivial and layers is None:
        yield from _whole(plan, wanted)
        return
    for copy in plan.copies:
        if copy.casts is None:
            yield from _part(plan, copy, wanted, _segments(copy, layers))
            continue
        casts = _casts(copy.casts, copy.layers, layers)
        spans = cast_spans(casts, target=False)
        segments = np.column_stack((spans[:, 0], np.zeros(len(spans), np.int64), spans[:, 1]))
        yield from _part(plan, copy, wanted, segments, casts=casts)


def followed_parts(plan: ReshardPlan, wanted: SequenceBlocks, ready: int, ends: Sequence[int]) -> Iterator[Part]:
    """Cut a fetch of what is still being computed into reads, in the order in which they can be made.

    Args:
        plan: From the source's shape to this one's, which is of the same KV type.
        wanted: The blocks.
        ready: Progress of the source before the first layer.
        ends: Layers after which something is sent, the last one included.
    """
    groups = [range(first, end) for first, end in itertools.pairwise((0, *ends))]
    if len(plan.copies) == 1:
        copy = plan.copies[0]
        segments = [_segments(copy, layers) for layers in groups]
        steps = [(ready + group.stop, len(some)) for group, some in zip(groups, segments, strict=True) if len(some)]
        yield from _part(plan, copy, wanted, np.concatenate(segments), np.array(steps, np.int64))
        return
    for group in groups:
        for copy in plan.copies:
            some = _segments(copy, group)
            yield from _part(plan, copy, wanted, some, np.array([(ready + group.stop, len(some))], np.int64))


def _part(
    plan: ReshardPlan,
    copy: ShardCopy,
    wanted: SequenceBlocks,
    segments: Segments,
    steps: Steps | None = None,
    casts: Casts | None = None,
) -> Iterator[Part]:
    """The read that makes a copy, if there is anything to copy."""
    turn, place = np.divmod(wanted.positions, plan.source_period)
    target = turn * plan.target_period + copy.piece.target_block
    local_ids = wanted.local_ids[copy.group]
    (chosen,) = ((place == copy.piece.source_block) & (target < len(local_ids))).nonzero()
    chosen = chosen[wanted.writable[target[chosen]] & (local_ids[target[chosen]] >= 0)]
    if len(chosen) and len(segments):
        chosen = chosen[wanted.remote_ids[chosen].argsort(kind="stable")]
        local = local_ids[target[chosen]]
        ids = wanted.remote_ids[chosen], wanted.generations[chosen], local
        yield Part(BlockReads(*ids, segments, copy.source.index, steps, casts), copy.target.index, chosen)


def _whole(plan: ReshardPlan, wanted: SequenceBlocks) -> Iterator[Part]:
    """Blocks are the same thing on both sides: they are copied whole, rank by rank."""
    if wanted.paired:
        chosen = wanted.remote_ids.argsort(kind="stable")
    else:
        (chosen,) = (wanted.positions < wanted.local_ids.shape[1]).nonzero()
        chosen = chosen[wanted.writable[wanted.positions[chosen]]]
        chosen = chosen[wanted.remote_ids[chosen].argsort(kind="stable")]
    if len(chosen):
        local = wanted.local_ids[0, wanted.positions[chosen]]
        for copy in plan.copies:
            reads = BlockReads(
                wanted.remote_ids[chosen], wanted.generations[chosen], local, source_shard=copy.source.index
            )
            yield Part(reads, copy.target.index, chosen)


def _segments(copy: ShardCopy, layers: range | None) -> Segments:
    """The bytes of some layers, or of all."""
    if layers is None:
        return merge_segments(copy.segments)
    chosen = (copy.layers >= layers.start) & (copy.layers < layers.stop)
    return np.ascontiguousarray(merge_segments(copy.segments[chosen]))


def _casts(casts: Casts, of_layers: Ids, layers: range | None) -> Casts:
    """The conversions of some layers, or of all."""
    if layers is None:
        return merge_casts(casts)
    return merge_casts(casts[(of_layers >= layers.start) & (of_layers < layers.stop)])
