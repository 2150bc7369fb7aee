from __future__ import annotations

import pytest

from baton.kv_cache.arena import KVArena


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_discarded_blocks_read_as_zeros_and_the_others_stay(private: bool) -> None:
    arena = KVArena(8, 8192, private=private)
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
    shared = KVArena(2, 4096)
    shared.blocks[1] = 9
    other = KVArena.attach(shared.open_read_only())
    assert other.epoch == shared.epoch
    assert int(other.blocks[1].min()) == 9
    private = KVArena(2, 4096, private=True)
    assert private.fd == -1
    with pytest.raises(OSError, match="No such file"):
        private.open_read_only()
    for arena in (other, shared, private):
        arena.close()
