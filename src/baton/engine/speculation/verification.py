"""Chooses a step's tokens, of sequences with draft tokens as many as are right.

Every row of a draft gets the token that the engine would have sampled at that position by itself: with penalties, bias,
masks and filters as they are after the tokens before it, and with the random numbers of its own position. A draft token
is kept while it is that token; in a tree, that child is which equals the token sampled after its parent. So the tokens
of a sequence do not depend on who drafts, and on whether anybody does: acceptance by equality, in place of that by
``min(1, p / q)`` (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023), which
keeps the distribution but not the sequence, and is there for those who want it
(:mod:`~baton.engine.speculation.rejection`).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.grammar.constraint import StepMasks
from baton.engine.runner.input_batch import ForwardOutput, KVMoves, StepBatch
from baton.engine.sampler import QueuedSample, SamplerOutput, gpu_sampler, queue_sample, sample
from baton.engine.sampler_row import SamplerRow, mask_rows
from baton.engine.sequence import Sequence
from baton.engine.speculation.rejection import DrawnDraft, keep_or_replace
from baton.engine.speculation.speculator import DrawnFrom
from baton.engine.speculation.tree import right_path
from baton.errors import InternalError
from baton.types import TokenLogprob
from baton_kernels.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that a step chose for one sequence.

    Attributes:
        token_ids: The sequence's next tokens, at least one; empty if there is an error.
        logprobs: Parallel to them, if asked for.
        num_drafted: Number of draft tokens that were verified.
        path: Indices of the accepted draft tokens, which are the first of ``token_ids``.
        error: Why there is no token; empty: there is.
        bad_logits: Whether the reason is that its logits are not finite, and its KV not worth keeping.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    num_drafted: int = 0
    path: tuple[int, ...] = ()
    error: str = ""
    bad_logits: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    """A sequence's rows of the logits, one more than its draft tokens, and the sampler's rows for them."""

    sequence: Sequence
    draft: list[int]
    rows: list[int]
    samplers: list[SamplerRow]
    parents: tuple[int, ...] = ()


class StepSampling:
    """The choice of one step's tokens. Masks are computed while the forward pass runs, or when they are missed.

    Args:
        batch: Batch of the step.
        masks: Computes masks; ``None``: no sequence is under a grammar.
        drawn_from: What drafts were drawn from, as far as they were, for acceptance by rejection; ``None``: by
            equality.
    """

    def __init__(self, batch: StepBatch, masks: StepMasks | None, drawn_from: DrawnFrom | None = None) -> None:
        self._drawn_from = drawn_from
        self._on_gpu = False
        self._wanted = [
            _Rows(sequence, [], [row], [_next_row(sequence)])
            for sequence, row in zip(batch.sampled, batch.sample_rows, strict=True)
        ]
        for rows in batch.draft_rows:
            samplers = _along(rows.sequence.sampler, rows.token_ids, rows.parents)
            self._wanted.append(_Rows(rows.sequence, rows.token_ids, rows.rows, samplers, rows.parents))
        self._samplers = [sampler for each in self._wanted for sampler in each.samplers]
        self._masks = masks
        self._guided = list[SamplerRow]()
        if masks is not None:
            for each in self._wanted:
                # Acceptance by rejection needs to know what could have been drawn.
                late = masks.come_late and not (drawn_from is not None and each.draft)
                for row in each.samplers:
                    row.mask = None
                    if row.constraint is not None and not (late and row.tries_first):
                        self._guided.append(row)
        self._pending: Future[list[TokenMask]] | None = None
        self._queued: QueuedSample | None = None
        if masks is not None and self._guided:
            self._pending = masks.begin(mask_rows(self._guided))

    def end_masks(self) -> None:
        """Wait for the masks; to be called once, whatever became of the forward pass."""
        if self._pending is not None and self._masks is not None:
            for row, mask in zip(self._guided, self._masks.end(self._pending), strict=True):
                row.mask = mask

    def choose(self, output: ForwardOutput) -> None:
        """Choose tokens; on a GPU that is queued, and nothing is waited for.

        Args:
            output: Result of the forward pass; its logits may be changed.
        """
        if not self._wanted:
            return
        logits = output.logits
        staging = output.staging
        rows = [row for each in self._wanted for row in each.rows]
        self._on_gpu = staging is not None
        amend = self._reject if self._drawn_from is not None and any(each.draft for each in self._wanted) else None
        wanted = logits if rows == list(range(len(logits))) else logits[rows]
        operator = gpu_sampler(logits.device) if staging is not None and amend is None else None
        if staging is not None and operator is not None:
            self._queued = queue_sample(wanted, self._samplers, operator, staging)
            return
        sampled = sample(wanted, self._samplers, amend, on_gpu=staging is not None, late=self._masks)
        self._queued = QueuedSample(torch.tensor(sampled.token_ids), lambda: sampled)

    @property
    def token_ids(self) -> torch.Tensor:
        """What was chosen of each row, int64 where the logits are; of bad rows any number.

        Raises:
            InternalError: Nothing was chosen.
        """
        if self._queued is None:
            raise InternalError("no tokens were chosen")
        return self._queued.token_ids

    def chosen(self) -> list[Chosen]:
        """Wait for the tokens; returns what each sequence gets that is to have one."""
        if self._queued is None:
            return []
        sampled = self._queued.read()
        bad = set(sampled.bad_rows)
        chosen = []
        at = 0
        for each in self._wanted:
            chosen.append(_verified(each, sampled, bad, at))
            at += len(each.rows)
        return chosen

    def _reject(self, logits: torch.Tensor, tokens: list[int], bad: tuple[int, ...]) -> None:
        """Choose the tokens of sequences that have a draft, and draw, by rejection."""
        assert self._drawn_from is not None
        begins = list[int]()
        drafts = list[DrawnDraft]()
        at = 0
        for each in self._wanted:
            begin = at
            at = at + len(each.rows)
            if not each.draft or each.samplers[0].params.greedy:
                continue
            wrong = (i for i, row in enumerate(each.samplers) if row.error or begin + i in bad)
            count = next(wrong, len(each.rows))  # behind a row that is wrong nothing can be said
            if count:
                drawn_from = self._drawn_from.get(each.sequence)
                rows = logits[begin : begin + count]
                drafts.append(DrawnDraft(rows, each.samplers[:count], each.draft[: count - 1], drawn_from))
                begins.append(begin)
        for begin, kept in zip(begins, keep_or_replace(drafts, on_gpu=self._on_gpu), strict=True):
            tokens[begin : begin + len(kept)] = kept


def _next_row(sequence: Sequence) -> SamplerRow:
    """Return the row of the token after those that steps on their way choose."""
    count = sequence.num_expected
    return sequence.sampler.later(count) if count else sequence.sampler


def accepted_moves(sampled: list[Chosen], block_size: int) -> KVMoves | None:
    """Return where the KV of accepted tokens of trees has to go to: one behind the other; ``None``: it lies so."""
    moved = [chosen for chosen in sampled if chosen.path and chosen.path[-1] >= len(chosen.path)]
    if not moved:
        return None
    sources: list[npt.NDArray[np.int64]] = []
    targets: list[npt.NDArray[np.int64]] = []
    for chosen in moved:
        sequence = chosen.sequence
        path = np.array(chosen.path)
        tables = [sequence.table, *(window.table for window in sequence.windows)]
        for slots, collected in ((path, sources), (np.arange(len(path)), targets)):
            blocks, places = np.divmod(sequence.num_tokens + slots, block_size)
            collected.append(np.array([table[blocks].astype(np.int64) * block_size + places for table in tables]))
    return KVMoves(np.concatenate(sources, axis=1), np.concatenate(targets, axis=1))


def _along(sampler: SamplerRow, draft: list[int], parents: tuple[int, ...]) -> list[SamplerRow]:
    """Return a sequence's row, and those behind each token of a draft."""
    rows = [sampler]
    for i, token in enumerate(draft):
        rows.append(rows[parents[i] + 1 if parents else i].after(token))
    return rows


def _verified(rows: _Rows, sampled: SamplerOutput, bad: set[int], at: int) -> Chosen:
    """Keep the draft while it is what was sampled; ``at`` is the first of the sequence's rows."""
    sequence = rows.sequence
    draft = rows.draft
    if error := rows.samplers[0].error:
        return Chosen(sequence, [], error=error)
    if at in bad:
        return Chosen(sequence, [], error="the model's logits are not finite", bad_logits=True)
    path = right_path(draft, rows.parents, sampled.token_ids[at : at + len(rows.rows)])
    visited = [at, *(at + 1 + node for node in path)]
    # A row that is wrong ends the draft before it: should it be wrong by itself too, the next step says so.
    wrong = (i for i, row in enumerate(visited) if i and (row in bad or rows.samplers[row - at].error))
    visited = visited[: next(wrong, len(visited))]
    tokens = [sampled.token_ids[row] for row in visited]
    logprobs = None
    if sampled.logprobs is not None:
        logprobs = [each for row in visited if (each := sampled.logprobs[row]) is not None]
    return Chosen(sequence, tokens, logprobs or None, len(draft), tuple(path[: len(visited)]))
