"""From a step's plan to the flat arrays of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.device import HostStaging
from baton.engine.scheduler import StateCopy, StepPlan
from baton.engine.sequence import Sequence
from baton_kernels.paged_attention import TokenTrees, ancestor_masks

LongArray = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Tokens that a launched step chooses, not read by the host yet.

    Attributes:
        token_ids: int64 [R], where the logits are; below 0: none could be chosen.
        rows: Row of each sequence that continues with one of these tokens.
    """

    token_ids: torch.Tensor
    rows: Mapping[Sequence, int]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch of S sequences with T tokens in all; prompt chunks and decodes mix freely.

    Attributes:
        token_ids: int64 [T], the sequences' new tokens one after the other; below 0, -1 - r stands for ``chosen[r]``.
        positions: int64 [T], each token's position in its sequence; in a tree of drafts by depth.
        query_starts: int32 [S + 1], where each sequence's new tokens begin; the last entry is T.
        context_lens: int32 [S], tokens of each sequence with this step's included.
        block_tables: int32 [S, G * W], block ids from the first token on, rows padded with 0; a table per layer group,
            one after the other.
        logit_rows: int64 [R], indices into the T tokens whose logits are wanted, ascending.
        hidden_of: Hidden states of all T tokens to return: the input of a layer, by its index, or -1: the states after
            the final norm.
        groups: G. One table for a model with G layer groups: its block b stands for blocks b * G to b * G + G - 1.
        trees: Tokens that are nodes of trees; ``None``: none are.
        state_slots: int32 [S], slot of each sequence's recurrent states; ``None``: the model has none.
        state_loads: Snapshots that slots get before the step.
        state_saves: Snapshots that are taken of slots after it.
        chosen: int64, on the device, tokens that the step before chooses; below 0: any token will do, as the
            result is discarded. ``None``: the host knows all tokens.
    """

    token_ids: LongArray
    positions: LongArray
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    logit_rows: LongArray
    hidden_of: tuple[int, ...] = ()
    groups: int = 1
    trees: TokenTrees | None = None
    state_slots: IntArray | None = None
    state_loads: tuple[StateCopy, ...] = ()
    state_saves: tuple[StateCopy, ...] = ()
    chosen: torch.Tensor | None = None


def with_chosen(token_ids: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    """Return a batch's tokens with those put in that the step before chose; nothing is read by the host.

    Args:
        token_ids: int64 [T], see :class:`ForwardBatch`.
        chosen: Tokens of the previous step, see :class:`ForwardBatch`.
    """
    if chosen is None:
        return token_ids
    rows = (-1 - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, chosen[rows].clamp_(min=0), token_ids)


@dataclass(frozen=True, slots=True)
class KVMoves:
    """Copies of KV between slots of the pool; a slot is block * block_size + offset in the block.

    Attributes:
        sources: int64 [G, M], slots of each layer group's blocks.
        targets: int64 [G, M], destination slots; all sources are read before any target is written.
    """

    sources: LongArray
    targets: LongArray


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass computed, for the R rows that were asked for.

    Attributes:
        logits: [R, vocab], float32 or model dtype.
        hidden: The hidden states that were asked for, each [T, width], model dtype; empty if another process has some
            of them (the last of several pipeline stages).
        staging: Takes numbers to the logits' device and back, where operators of GPUs are to take them on: on a GPU, or
            in Triton's interpreter; ``None``: elsewhere.
    """

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    staging: HostStaging | None = None


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of the logits of one sequence, and the tokens that they predict.

    Attributes:
        sequence: The sequence.
        rows: Rows of the logits [R, vocab].
        token_ids: The tokens they predict, parallel to ``rows``.
        parents: Index of each draft token's parent, see :class:`~baton.engine.scheduler.StepPlan`; empty: a chain.
    """

    sequence: Sequence
    rows: list[int]
    token_ids: list[int]
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A forward pass and what its logits are for.

    Attributes:
        forward: Arrays for the executor.
        sampled: Sequences that get a token from this step.
        sample_rows: Their rows of the logits, parallel to ``sampled``.
        prompt_rows: Rows for prompt log probabilities.
        draft_rows: Rows that verify draft tokens; there is one row more than draft tokens, that of the last one, which
            predicts the token after it.
    """

    forward: ForwardBatch
    sampled: list[Sequence]
    sample_rows: list[int]
    prompt_rows: list[LogitRows]
    draft_rows: list[LogitRows]


StepArrays = tuple[LongArray, LongArray, IntArray, IntArray, IntArray]
"""The first five arrays of a :class:`ForwardBatch`."""


class InputBuffers:
    """Arrays at fixed addresses, one set per bucket of sizes: what a captured graph of a step reads.

    A step's arrays are the beginnings of its bucket's; a bucket is the next power of two of each size.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int, int], StepArrays] = {}

    def arrays(self, tokens: int, sequences: int, width: int) -> StepArrays:
        """Return views for T tokens and S sequences, which are valid until the same bucket is requested again.

        Block tables are zeroed, and as wide as the bucket's, which is at least ``width``.
        """
        bucket = (_bucket(tokens), _bucket(sequences), _bucket(width))
        arrays = self._arrays.get(bucket)
        if arrays is None:
            arrays = self._arrays[bucket] = _new_arrays(*bucket)
        token_ids, positions, starts, contexts, tables = arrays
        tables[:sequences] = 0
        return token_ids[:tokens], positions[:tokens], starts[: sequences + 1], contexts[:sequences], tables[:sequences]


def _bucket(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _new_arrays(tokens: int, sequences: int, width: int) -> StepArrays:
    return (
        np.empty(tokens, np.int64),
        np.empty(tokens, np.int64),
        np.zeros(sequences + 1, np.int32),
        np.empty(sequences, np.int32),
        np.zeros((sequences, width), np.int32),
    )


def build_batch(
    plan: StepPlan,
    block_size: int,
    buffers: InputBuffers | None = None,
    hidden_of: tuple[int, ...] = (),
    chosen: ChosenTokens | None = None,
) -> StepBatch:
    """Flatten a plan; asks for logits of the rows that are sampled, scored or verified, and no others.

    Args:
        plan: Plan with at least one sequence.
        block_size: Tokens per block.
        buffers: Provides the arrays; default: new ones.
        hidden_of: Hidden states to return, see :class:`ForwardBatch`.
        chosen: Tokens of the step before, if that is on its way.
    """
    counts = plan.counts
    drafts = plan.drafts
    trees = plan.trees
    width = max(-(-(s.num_launched + n + len(drafts.get(s, ()))) // block_size) for s, n in counts.items())
    groups = 1 + max(len(sequence.windows) for sequence in counts)
    new_arrays = _new_arrays if buffers is None else buffers.arrays
    token_ids, positions, starts, contexts, tables = new_arrays(plan.num_tokens, len(counts), width * groups)
    width = tables.shape[1] // groups
    sampled: list[Sequence] = []
    sample_rows: list[int] = []
    prompt_rows: list[LogitRows] = []
    draft_rows: list[LogitRows] = []
    logit_rows: list[int] = []
    ancestors = np.zeros(plan.num_tokens, np.uint64) if trees else None
    slots = [sequence.state_slot for sequence in counts]
    at = 0
    for i, (sequence, own) in enumerate(counts.items()):
        start = sequence.num_launched
        draft = drafts.get(sequence, ())
        new = own + len(draft)
        contexts[i] = context = start + new
        if new == 1:
            if chosen is not None and start == sequence.num_tokens:
                token_ids[at] = -1 - chosen.rows[sequence]
            else:
                token_ids[at] = sequence.buffer[start]
            positions[at] = start
        else:
            token_ids[at : at + own] = sequence.buffer[start : start + own]
            token_ids[at + own : at + new] = draft
            positions[at : at + new] = np.arange(start, context)
        if ancestors is not None and sequence in trees:
            # What has a tree has one token of its own: its root.
            masks = ancestor_masks(trees[sequence])
            ancestors[at : at + new] = masks
            positions[at : at + new] = [start + mask.bit_count() - 1 for mask in masks]
        blocks = -(-context // block_size)
        tables[i, :blocks] = sequence.table[:blocks]
        for table in sequence.windows:
            tables[i, table.group * width : table.group * width + blocks] = table.table[:blocks]
        if sequence.group.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            prompt_rows += _add_prompt_rows(logit_rows, sequence, at, own)
        if start + own == sequence.num_tokens + sequence.num_expected:
            last = at + own - 1
            if not logit_rows or logit_rows[-1] != last:
                logit_rows.append(last)
            row = len(logit_rows) - 1
            if draft:
                logit_rows.extend(range(last + 1, at + new))
                rows = list(range(row, len(logit_rows)))
                draft_rows.append(LogitRows(sequence, rows, list(draft), trees.get(sequence, ())))
            else:
                sampled.append(sequence)
                sample_rows.append(row)
        at += new
        starts[i + 1] = at
    forward = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=starts,
        context_lens=contexts,
        block_tables=tables,
        logit_rows=np.array(logit_rows, np.int64),
        hidden_of=hidden_of,
        groups=groups,
        trees=None if ancestors is None else TokenTrees(ancestors, contexts - np.diff(starts)),
        state_slots=None if slots[0] < 0 else np.array(slots, np.int32),
        state_loads=tuple(plan.state_loads),
        state_saves=tuple(copy for _, copy in plan.state_saves),
        chosen=None if chosen is None else chosen.token_ids,
    )
    return StepBatch(forward, sampled, sample_rows, prompt_rows, draft_rows)


def _add_prompt_rows(logit_rows: list[int], sequence: Sequence, at: int, new: int) -> list[LogitRows]:
    """Ask for the logits at those new positions whose next token is a prompt token not scored yet."""
    scored = sequence.group.prompt_logprobs or ()
    start = sequence.num_launched
    first = max(start, len(scored) - 1)
    end = min(start + new, sequence.num_prompt - 1)
    if first >= end:
        return []
    rows = range(len(logit_rows), len(logit_rows) + end - first)
    logit_rows.extend(range(at + first - start, at + end - start))
    return [LogitRows(sequence, list(rows), sequence.buffer[first + 1 : end + 1].tolist())]
