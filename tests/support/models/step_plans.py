"""Feeds a decoding sequence tokens that are known, several in a step, as a verifier of draft tokens does."""

from __future__ import annotations

import numpy as np
import torch

from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest
from baton.engine.runner.input_batch import build_batch
from baton.engine.scheduler import StepPlan
from baton.types import RequestId, SamplingParams


def feed_drafts(core: EngineCore, prompt: list[int], known: list[int], widths: list[int]) -> torch.Tensor:
    """Prefill a prompt, then compute the tokens known to follow it, ``widths`` of them per step.

    Each step has one token of the sequence's own and the others as draft tokens, which are then accepted.

    Returns:
        The logits that predict each token of ``known[1:]``, and the one after it, as float32 [len(known), vocab].
    """
    assert sum(widths) == len(known)
    core.add_request(EngineRequest(RequestId("known"), prompt, SamplingParams(temperature=0.0, max_tokens=100)))
    (sequence,) = core._groups[RequestId("known")].sequences
    while sequence.num_output == 0:
        core.step()
    assert sequence.tokens[-1] == known[0]
    block_size, rows, at = core.executor.layout.block_size, [], 0
    for width in widths:
        draft = tuple(known[at + 1 : at + width])
        need = -(-(sequence.num_tokens + len(draft)) // block_size) - len(sequence.block_ids)
        sequence.append_blocks(core._pool.allocate(need * core.executor.layout.num_groups) or ())
        plan = StepPlan({sequence: 1}, {sequence: draft} if draft else {})
        assert (len(plan), plan.num_tokens) == (1, width)
        batch = build_batch(plan, block_size)
        with torch.inference_mode():
            logits = core.executor.forward(batch.forward).logits.float()
        if draft:
            (found,) = batch.draft_rows
            assert (found.sequence, found.token_ids, batch.sampled) == (sequence, list(draft), [])
            rows.append(logits[found.rows])
        else:
            assert batch.sampled == [sequence]
            rows.append(logits[batch.sample_rows])
        at += width
        for token in known[at - width + 1 : at + 1]:  # accepted, and the one after them
            sequence.append_token(token)
        sequence.advance(width)
    return torch.cat(rows)


def kv_of(core: EngineCore, request_id: str, num_tokens: int) -> np.ndarray:
    """Return the KV bytes of a sequence's first tokens, block for block, whole blocks only."""
    (sequence,) = core._groups[RequestId(request_id)].sequences
    count = num_tokens // core.executor.layout.block_size
    return core.arena.blocks[sequence.block_ids[:count]].copy()
