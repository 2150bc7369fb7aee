"""Blocks that the disk has no room for are read once more, for the tier behind it."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence

from baton.types import BlockHash
from baton_kvstore.tiers.disk.format import PAGE, Kind, Record, digest_of, pages
from baton_kvstore.tiers.disk.index import DiskCounters, Location
from baton_kvstore.tiers.tier import Offer

log = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20


def hand_over(kind: Kind, leaving: Sequence[tuple[Record, Location]], offer: Offer, counters: DiskCounters) -> None:
    """Offer the blocks of a segment that is about to be dropped, in batches; damaged ones are left out.

    Args:
        kind: What they are.
        leaving: Their records and places, whose segment stays open meanwhile.
        offer: Takes them.
        counters: Of the disk.
    """
    wanted = offer.wanted([record.block_hash for record, _ in leaving])
    left = [(record, place) for record, place in leaving if record.block_hash in wanted]
    step, size = max(1, _BATCH_BYTES // kind.block_bytes), pages(kind.block_bytes)
    for at in range(0, len(left), step):
        batch = left[at : at + step]
        memory = memoryview(mmap.mmap(-1, max(PAGE, len(batch) * size)))  # aligned, and free when nobody needs it
        hashes: list[BlockHash] = []
        views: list[memoryview] = []
        for i, (record, place) in enumerate(batch):
            view = memory[i * size : i * size + kind.block_bytes]
            try:
                place.segment.read(place.offset + PAGE, [view])
            except OSError as error:
                counters.read_errors += 1
                log.error("a block that leaves the disk cannot be read: %s", error)
                continue
            if digest_of(view) != record.digest:
                counters.checksum_failures += 1
                continue
            hashes.append(record.block_hash)
            views.append(view)
        if hashes:
            offer.take(hashes, views)
