"""From a step's plan to the flat arrays of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.engine.sched.scheduler import StepPlan
from baton.engine.sched.step_plan import ForwardBatch
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of the logits that predict prompt tokens.

    Attributes:
        sequence: Whose.
        rows: Rows of the logits [R, vocab].
        token_ids: The prompt tokens they predict.
    """

    sequence: Sequence
    rows: list[int]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A forward pass and what its logits are for.

    Attributes:
        forward: For the runner.
        sampled: Sequences that get a token from this step.
        sample_rows: Their rows of the logits, parallel to ``sampled``.
        prompt_rows: Rows for prompt log probabilities.
    """

    forward: ForwardBatch
    sampled: list[Sequence]
    sample_rows: list[int]
    prompt_rows: list[PromptRows]


def build_batch(plan: StepPlan, block_size: int) -> StepBatch:
    """Flatten a plan; asks for logits of the rows that are sampled or scored, and no others."""
    count, total = len(plan), sum(plan.values())
    token_ids = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    starts = np.zeros(count + 1, np.int32)
    contexts = np.empty(count, np.int32)
    width = max(-(-(s.num_computed + n) // block_size) for s, n in plan.items())
    tables = np.zeros((count, width), np.int32)
    sampled: list[Sequence] = []
    sample_rows: list[int] = []
    prompt_rows: list[PromptRows] = []
    logit_rows: list[int] = []
    at = 0
    for i, (sequence, new) in enumerate(plan.items()):
        start = sequence.num_computed
        context = start + new
        contexts[i] = context
        if new == 1:
            token_ids[at] = sequence.buffer[start]
            positions[at] = start
        else:
            token_ids[at : at + new] = sequence.buffer[start:context]
            positions[at : at + new] = np.arange(start, context)
        blocks = -(-context // block_size)
        tables[i, :blocks] = sequence.table[:blocks]
        if sequence.group.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            prompt_rows += _add_prompt_rows(logit_rows, sequence, at, new)
        if context == sequence.num_tokens:
            last = at + new - 1
            if not logit_rows or logit_rows[-1] != last:
                logit_rows.append(last)
            sampled.append(sequence)
            sample_rows.append(len(logit_rows) - 1)
        at += new
        starts[i + 1] = at
    forward = ForwardBatch(token_ids, positions, starts, contexts, tables, np.array(logit_rows, np.int64))
    return StepBatch(forward, sampled, sample_rows, prompt_rows)


def _add_prompt_rows(logit_rows: list[int], sequence: Sequence, at: int, new: int) -> list[PromptRows]:
    """Ask for the logits at those new positions whose next token is a prompt token not scored yet."""
    scored = sequence.group.prompt_logprobs or ()
    start = sequence.num_computed
    first = max(start, len(scored) - 1)
    end = min(start + new, sequence.num_prompt - 1)
    if first >= end:
        return []
    rows = range(len(logit_rows), len(logit_rows) + end - first)
    logit_rows.extend(range(at + first - start, at + end - start))
    return [PromptRows(sequence, list(rows), sequence.buffer[first + 1 : end + 1].tolist())]
