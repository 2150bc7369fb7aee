from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support.transport.fake_device import FakeDeviceArena

from baton.errors import InternalError
from baton.kv_cache.arena import Arena, HostArena, whole_blocks
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.shards import KVShards

MakeArena = Callable[[int, int], Arena]


def private_arena(num_blocks: int, block_bytes: int) -> Arena:
    return HostArena(num_blocks, block_bytes, private=True)


every_arena = pytest.mark.parametrize("make", [HostArena, private_arena, FakeDeviceArena])


@every_arena
def test_what_was_copied_into_spans_of_blocks_is_read_back(make: MakeArena) -> None:
    arena = make(6, 96)
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (3, 96), dtype=np.uint8)
    arena.write_from(content.reshape(-1), whole_blocks([4, 0, 2], 96))
    back = np.empty(3 * 96, np.uint8)
    arena.read_into(back, whole_blocks([4, 0, 2], 96))
    assert np.array_equal(back.reshape(3, 96), content)
    parts = np.array([[2, 90, 6], [4, 0, 1], [1, 5, 10], [0, 0, 0]])
    some = np.empty(17, np.uint8)
    arena.read_into(some, parts)
    assert np.array_equal(some, np.concatenate([content[2, 90:], content[0, :1], np.zeros(10, np.uint8)]))
    arena.write_from(some, parts[[2, 0, 1]][:, [0, 1, 2]])
    arena.read_into(some[:10], parts[2:3])
    assert np.array_equal(some[:6], content[2, 90:])
    arena.close()


@every_arena
@pytest.mark.parametrize("span", [[6, 0, 1], [-1, 0, 1], [0, 96, 1], [0, -1, 1], [0, 0, 97], [0, 0, -1], [0, 0, 2]])
def test_spans_beyond_a_block_or_of_another_size_are_refused_before_any_byte_is_copied(
    make: MakeArena, span: list[int]
) -> None:
    arena = make(6, 96)
    spans, buffer = np.array([[1, 0, 1], span]), np.full(2, 7, np.uint8)
    for copy in (arena.read_into, arena.write_from):
        with pytest.raises(InternalError, match="spans"):
            copy(buffer, spans)
    assert buffer.tolist() == [7, 7]
    arena.read_into(buffer[:1], spans[:1])
    assert buffer[0] == 0
    arena.close()


@every_arena
def test_generations_and_progress_are_host_memory_whatever_the_blocks_are(make: MakeArena) -> None:
    arena = make(4, 64)
    pool = BlockPool(arena.num_blocks, arena.generations)
    held = pool.allocate(3)
    assert held is not None
    assert arena.generations.sum() == 3
    pool.release(held)
    arena.progress.advance(5)
    assert arena.progress.wait(5, 0.0) == 5
    shards = KVShards([arena, make(4, 128)])
    assert (shards.primary.epoch, len(arena.epoch)) == (arena.epoch, 16)
    assert make(4, 64).epoch != arena.epoch
    shards.touch()
    shards.close()


def test_device_memory_is_not_mapped_and_every_copy_is_counted() -> None:
    arena = FakeDeviceArena(4, 64)
    assert not arena.mapped
    with pytest.raises(InternalError, match="device memory"):
        _ = arena.blocks
    with pytest.raises(OSError, match="no file descriptor"):
        arena.open_read_only()
    arena.write_from(np.ones(128, np.uint8), whole_blocks([0, 3], 64))
    arena.read_into(np.empty(8, np.uint8), np.array([[3, 8, 8]]))
    assert (arena.copies, arena.copied_bytes) == (3, 136)


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_discarded_blocks_read_as_zeros_and_the_others_stay(private: bool) -> None:
    arena = HostArena(8, 8192, private=private)
    arena.touch()
    arena.blocks[:] = 7
    arena.generations[3] = 5
    arena.discard(2, 4)
    assert [int(block.max()) for block in arena.blocks] == [7, 7, 0, 0, 7, 7, 7, 7]
    assert arena.generations.tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
    arena.discard(0, 8)
    assert arena.blocks.max() == 0
    arena.close()


def test_another_process_can_map_a_shared_arena_and_not_a_private_one() -> None:
    shared = HostArena(2, 4096)
    shared.blocks[1] = 9
    other = HostArena.attach(shared.open_read_only())
    assert other.epoch == shared.epoch
    assert int(other.blocks[1].min()) == 9
    private = HostArena(2, 4096, private=True)
    assert private.fd == -1
    with pytest.raises(OSError, match="No such file"):
        private.open_read_only()
    for arena in (other, shared, private):
        arena.close()


def test_private_memory_is_given_back_at_the_end_whoever_still_refers_to_it() -> None:
    arena = HostArena(64, 64 << 10, private=True)
    arena.blocks[:] = 7
    blocks = arena.blocks
    arena.close()
    assert not blocks.any(), "its pages are the kernel's again"
    arena.close()
