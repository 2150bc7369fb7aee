"""What a fetch of blocks that are the same thing on both sides is cut into: one block alone is one block of many."""

from __future__ import annotations

import numpy as np
import pytest

from baton.errors import InvalidRequestError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import SequenceBlocks
from baton.kv_transfer.blocks.plan import parts_of
from baton.kv_transfer.types import bounds, require_below

PRINT = Fingerprint.of(model="m", model_digest="d", rope="r", layout=KVLayout((LayerShape(1, 8, 8),), 4, "float32"))
LOCAL = np.array([30, 31, 32])
WRITABLE = [True, False, True]


def copies(*positions: int) -> list[tuple[int, int, int, int]]:
    """Remote id, generation, local id and place in the fetch of everything that is to be read."""
    places = np.array(positions)
    blocks = SequenceBlocks.of((10 - places, 100 + places, places), LOCAL, WRITABLE)
    out: list[tuple[int, int, int, int]] = []
    for part in parts_of(PRINT.plan_from(PRINT), blocks):
        reads = part.reads
        columns = (reads.remote_ids, reads.generations, reads.local_ids, part.blocks)
        out += zip(*(column.tolist() for column in columns), strict=True)
    return out


def test_every_writable_block_in_the_order_of_the_sources_memory() -> None:
    assert copies(0, 1, 2, 3) == [(8, 102, 32, 2), (10, 100, 30, 0)]


@pytest.mark.parametrize("place", range(4))
def test_one_block_is_as_one_of_many(place: int) -> None:
    alone = copies(place)
    assert [(*each[:3], place) for each in alone] == [each for each in copies(0, 1, 2, 3) if each[3] == place]


@pytest.mark.parametrize("count", [0, 1, 64, 65, 500])
def test_bounds_of_few_and_of_many(count: int) -> None:
    ids = np.random.default_rng(count).permutation(count) + 7
    assert bounds(ids) == ((7, 6 + count) if count else (0, -1))
    require_below(ids, 7 + count, "ids")
    if count:
        with pytest.raises(InvalidRequestError, match=f"from 7 to {6 + count}"):
            require_below(ids, 6 + count, "ids")
        with pytest.raises(InvalidRequestError, match="from -1 to"):
            require_below(ids - 8, 7 + count, "ids")
