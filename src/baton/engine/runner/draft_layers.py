"""A drafter's KV as further layers of the KV block, so that it goes wherever the block goes.

Behind the model's layers a block has one with the drafter's keys and values, one with marks, 8 bytes per token, and one
with a single hidden state of the target, that of the block's last computed token, in slices, one per token, each with a
mark of its own: the entry behind that token needs it. A mark says of which token, behind which one and at which
position, what is beside it is: so what was never computed, or came from an instance that does not draft in this way, is
told apart from valid entries. All of it is advisory: an entry that is missing or wrong costs drafts, and changes no
answer.
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
        spec: Attention of the drafter's layer.
        dtype: Name of the dtype of keys and values.
        width: Elements of a hidden state.
        block_size: Tokens per block.

    Attributes:
        draft: As given.
        dtype: As given.
        specs: Attention of all three layers; the ones of marks and states are never used for attention.
        shapes: Shapes of all three layers.
    """

    def __init__(self, draft: str, spec: AttentionSpec, dtype: str, width: int, block_size: int) -> None:
        self.draft = draft
        self.dtype = dtype
        self._width = width
        self._block_size = block_size
        marks = MARK_BYTES // TORCH_DTYPES[dtype].itemsize
        self._slice = -(-width // block_size)
        others = (AttentionSpec(1, 1, size, size, 1.0, latent=True) for size in (marks, self._slice + marks))
        self.specs = (spec, *others)
        self.shapes = tuple(
            LayerShape(each.kv_heads, each.k_dim, 0 if each.latent else each.v_dim) for each in self.specs
        )
        self._pool: LayerPool | None = None
        self._marks = self._states = self._state_marks = torch.empty(0)

    def bind(self, pool: LayerPool, marks: LayerPool, states: LayerPool) -> None:
        """Use these layers of the KV pool."""
        kind, _ = _NUMBERS[TORCH_DTYPES[self.dtype].itemsize]
        self._pool = pool
        self._marks = marks.k[:, 0].view(kind)
        whole = states.k[:, 0]
        self._states = whole[..., : self._slice]
        self._state_marks = whole.view(kind)[..., self._slice :]

    def keep_state(
        self, tokens: npt.NDArray[np.uint32], position: int, table: npt.NDArray[np.int32], state: torch.Tensor
    ) -> None:
        """Put the target's hidden state [width] of a token into its block, in place of an earlier token's."""
        block = int(table[position // self._block_size])
        padded = torch.zeros(self._block_size * self._slice, dtype=self._states.dtype, device=state.device)
        padded[: self._width] = state
        self._states[block] = padded.view(self._block_size, self._slice)
        self._state_marks[block] = self._on_device(self._marks_of_state(tokens, position))

    def state_of(
        self, tokens: npt.NDArray[np.uint32], position: int, table: npt.NDArray[np.int32]
    ) -> torch.Tensor | None:
        """Return the target's hidden state [width] of a token, if its block has it."""
        block = int(table[position // self._block_size])
        matches = self._state_marks[block].cpu().numpy() == self._marks_of_state(tokens, position)
        return self._states[block].reshape(-1)[: self._width].clone() if matches.all() else None

    def num_known(self, tokens: npt.NDArray[np.uint32], table: npt.NDArray[np.int32]) -> int:
        """Return how many of some leading tokens have entries, counted from the last of them back.

        Args:
            tokens: uint32 [n], a sequence from its beginning; the first one never has an entry.
            table: The sequence's blocks in the KV pool.
        """
        if len(tokens) < 2:
            return 0
        positions = np.arange(1, len(tokens))
        stored_marks = self._marks[self._places(positions, table)].cpu().numpy()
        good = (stored_marks == self._marks_of(tokens, positions)).all(axis=1)
        return len(good) if good.all() else int(good[::-1].argmin())

    def copy_to(self, pool: LayerPool, blocks: list[int], positions: Positions, table: npt.NDArray[np.int32]) -> None:
        """Copy entries into a drafter's own pool, from its first slot on.

        Args:
            pool: The drafter's own pool.
            blocks: The sequence's blocks in that pool.
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
            pool: The drafter's own pool.
            blocks: The sequence's blocks in that pool.
            slots: int64 [n], in these blocks.
            tokens: The sequence, as far as it is known.
            positions: int64 [n], of the slots in the sequence; 1 at least.
            table: The sequence's blocks in the KV pool.
        """
        assert self._pool is not None
        to = self._places(positions, table)
        self._copy(pool, self._places(slots, np.array(blocks)), self._pool, to)
        self._marks[to] = self._on_device(self._marks_of(tokens, positions))

    def _copy(
        self, source: LayerPool, by: tuple[torch.Tensor, ...], target: LayerPool, to: tuple[torch.Tensor, ...]
    ) -> None:
        (blocks, offsets) = by
        (into, at) = to
        target.k[into, :, at] = source.k[blocks, :, offsets]
        if not self.specs[0].latent:
            target.v[into, :, at] = source.v[blocks, :, offsets]

    def _places(self, positions: Positions, table: npt.NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where positions lie: blocks and places in them, int64 [n] each."""
        blocks = table[positions // self._block_size].astype(np.int64)
        return self._on_device(blocks), self._on_device(positions % self._block_size)

    def _on_device(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        """An array where the pool is."""
        return torch.from_numpy(array).to(self._marks.device)

    def _marks_of_state(self, tokens: npt.NDArray[np.uint32], position: int) -> npt.NDArray[np.integer]:
        """The marks of a state's slices [block_size, width]; of blocks of another size they are others."""
        own = (np.uint64(position) << _BEHIND) | np.uint64(tokens[position])
        number = np.arange(self._block_size, dtype=np.uint64) + np.uint64(self._block_size << 16)
        _, kind = _NUMBERS[TORCH_DTYPES[self.dtype].itemsize]
        return mix(mix(number) ^ own).view(kind).reshape(self._block_size, -1)

    def _marks_of(self, tokens: npt.NDArray[np.uint32], positions: Positions) -> npt.NDArray[np.integer]:
        """The marks of entries [n, width]."""
        pair = (tokens[positions - 1].astype(np.uint64) << _BEHIND) | tokens[positions]
        marks = mix(mix(positions.astype(np.uint64)) ^ pair)
        _, kind = _NUMBERS[TORCH_DTYPES[self.dtype].itemsize]
        return marks.view(kind).reshape(len(positions), -1)
