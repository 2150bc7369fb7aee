"""A drafter's KV as further layers of the KV block, so that it goes wherever the block goes.

Behind the model's layers a block has one with the drafter's keys and values and one with marks, 8 bytes per token. A
mark says of which token, behind which one and at which position, the entry beside it is: so an entry that was never
computed, or came from somebody who does not draft in this way, is told from one that counts. All of it is advisory:
an entry that is missing or wrong costs drafts, and changes no answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.models.loader import TORCH_DTYPES
from baton.kv_cache.layout import LayerShape
from baton_kernels.paged_attention import AttentionSpec, LayerPool
from baton_kernels.random_numbers import mix

MARK_BYTES = 8
_NUMBERS = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}
_BEHIND = np.uint64(32)

Positions = npt.NDArray[np.int64]


class DraftLayers:
    """The layers of one drafter.

    Args:
        draft: The drafter's name and what else decides its KV beside the model.
        spec: Attention of its layer.
        dtype: Of its keys and values, by name.
        block_size: Tokens per block.

    Attributes:
        draft: As given.
        dtype: As given.
        specs: Attention of both layers; nobody attends over marks.
        shapes: Of both layers.
    """

    def __init__(self, draft: str, spec: AttentionSpec, dtype: str, block_size: int) -> None:
        self.draft, self.dtype, self._block_size = draft, dtype, block_size
        width = MARK_BYTES // TORCH_DTYPES[dtype].itemsize
        marks = AttentionSpec(1, 1, width, width, 1.0, latent=True)
        self.specs = (spec, marks)
        self.shapes = tuple(
            LayerShape(each.kv_heads, each.k_dim, 0 if each.latent else each.v_dim) for each in self.specs
        )
        self._pool: LayerPool | None = None
        self._marks: torch.Tensor = torch.empty(0)

    def bind(self, pool: LayerPool, marks: LayerPool) -> None:
        """Use these layers of the KV pool."""
        kind, _ = _NUMBERS[TORCH_DTYPES[self.dtype].itemsize]
        self._pool, self._marks = pool, marks.k[:, 0].view(kind)

    @property
    def bound(self) -> bool:
        """Whether there is a pool."""
        return self._pool is not None

    def num_known(self, tokens: npt.NDArray[np.uint32], table: npt.NDArray[np.int32]) -> int:
        """Return how many of some leading tokens have entries, counted from the last of them back.

        Args:
            tokens: uint32 [n], a sequence from its beginning; the first one never has an entry.
            table: Its blocks.
        """
        if len(tokens) < 2:
            return 0
        positions = np.arange(1, len(tokens))
        found = self._marks[self._places(positions, table)].numpy()
        good = (found == self._marks_of(tokens, positions)).all(axis=1)
        return len(good) if good.all() else int(good[::-1].argmin())

    def copy_to(self, pool: LayerPool, blocks: list[int], positions: Positions, table: npt.NDArray[np.int32]) -> None:
        """Copy entries into a drafter's own pool, from its first slot on.

        Args:
            pool: The drafter's.
            blocks: Of that pool.
            positions: int64 [n], in the sequence.
            table: The sequence's blocks in the KV pool.
        """
        assert self._pool is not None
        slots = np.arange(len(positions))
        self._copy(self._pool, self._places(positions, table), pool, self._places(slots, np.array(blocks)))

    def copy_from(
        self,
        pool: LayerPool,
        blocks: list[int],
        slots: Positions,
        tokens: npt.NDArray[np.uint32],
        positions: Positions,
        table: npt.NDArray[np.int32],
    ) -> None:
        """Copy entries out of a drafter's own pool, and mark them.

        Args:
            pool: The drafter's.
            blocks: Of that pool.
            slots: int64 [n], in these blocks.
            tokens: The sequence, as far as it is known.
            positions: int64 [n], of the slots in the sequence; 1 at least.
            table: The sequence's blocks in the KV pool.
        """
        assert self._pool is not None
        to = self._places(positions, table)
        self._copy(pool, self._places(slots, np.array(blocks)), self._pool, to)
        self._marks[to] = torch.from_numpy(self._marks_of(tokens, positions))

    def _copy(
        self, source: LayerPool, by: tuple[torch.Tensor, ...], target: LayerPool, to: tuple[torch.Tensor, ...]
    ) -> None:
        (blocks, offsets), (into, at) = by, to
        target.k[into, :, at] = source.k[blocks, :, offsets]
        if not self.specs[0].latent:
            target.v[into, :, at] = source.v[blocks, :, offsets]

    def _places(self, positions: Positions, table: npt.NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where positions lie: blocks and places in them, int64 [n] each."""
        blocks = table[positions // self._block_size].astype(np.int64)
        return torch.from_numpy(blocks), torch.from_numpy(positions % self._block_size)

    def _marks_of(self, tokens: npt.NDArray[np.uint32], positions: Positions) -> npt.NDArray[np.integer]:
        """The marks of entries [n, width]."""
        pair = (tokens[positions - 1].astype(np.uint64) << _BEHIND) | tokens[positions]
        marks = mix(mix(positions.astype(np.uint64)) ^ pair)
        _, kind = _NUMBERS[TORCH_DTYPES[self.dtype].itemsize]
        return marks.view(kind).reshape(len(positions), -1)
