"""``eagle`` and ``eagle3``: a head of one layer drafts from the target's hidden states, with KV of its own.

The head's context begins where hidden states were first seen: of tokens whose KV came from the prefix cache or from
another instance there are none, and drafts go on without these.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from baton.config import EngineConfig
from baton.engine.attention import AttentionContext, choose_attention, cpu_operators
from baton.engine.executor.base import Executor
from baton.engine.sequence import Sequence
from baton.engine.speculation.chain import ChainDrafter, ChainState, Part, chain_batch, draft_blocks
from baton.engine.speculation.eagle_head import EagleHead
from baton.engine.speculation.head_weights import HeadFiles, target_of
from baton_kernels.paged_attention import LayerPool, RaggedBatch


@dataclass(slots=True)
class EagleState(ChainState):
    """What the head has computed of a sequence; slot ``begin + i`` stands for that token of the sequence.

    Attributes:
        sure: Slots computed from the target's hidden states; those behind them are of drafts.
        rows: What the slots behind them take of the target's hidden states, [n, width].
        own: The head's hidden state of the slot computed last, [1, width].
    """

    sure: int = 0
    rows: torch.Tensor | None = None
    own: torch.Tensor | None = None


class EagleDrafter(ChainDrafter[EagleState]):
    """A :class:`~baton.engine.speculation.drafter.Drafter` that runs an EAGLE head.

    Args:
        name: The method.
        head: The head.
        config: Of the engine.
        max_len: Longest sequence of the target.
    """

    def __init__(self, name: str, head: EagleHead, config: EngineConfig, max_len: int) -> None:
        spec, size = head.spec, config.block_size
        element = torch.empty(0, dtype=head.dtype).element_size()
        block_bytes = 2 * spec.kv_heads * size * spec.k_dim * element
        blocks = draft_blocks(config, max_len, block_bytes)
        super().__init__(blocks, size, max_len)
        self.name, self.hidden_of = name, head.hidden_of
        self._head = head
        device = torch.device(config.device)
        self._attention = choose_attention("auto", AttentionContext(device, cpu_operators(config, device)))
        memory = torch.zeros(blocks, 2, spec.kv_heads, size, spec.k_dim, dtype=head.dtype)
        self._pool = LayerPool(memory[:, 0], memory[:, 1])

    def observe(self, rows: SequenceOf[tuple[Sequence, int, int]], hidden: tuple[torch.Tensor, ...]) -> None:
        """Keep what later slots take of hidden states; see the protocol."""
        joined, at = self._head.join(hidden), 0
        for sequence, start, count in rows:
            new, at = joined[at : at + count], at + count
            state = self._states.get(sequence)
            if state is None:
                state = self._states[sequence] = EagleState()
            first, end = start + 1, state.begin + state.sure
            known = 0 if state.rows is None else len(state.rows)
            if state.begin <= first <= end + known and (state.sure or known):
                state.sure = min(state.sure, first - state.begin)
                kept = first - state.begin - state.sure
                state.rows = new.clone() if not kept or state.rows is None else torch.cat([state.rows[:kept], new])
            else:  # tokens in between were computed elsewhere
                state.begin, state.sure, state.rows = first, 0, new.clone()

    def _known(self, sequence: Sequence) -> EagleState | None:
        state = self._states.get(sequence)
        if state is None:
            return None
        self._states.move_to_end(sequence)  # used last
        state.num_computed, state.own = state.sure, None
        missing = sequence.num_tokens - state.begin - state.sure
        known = 0 if state.rows is None else len(state.rows)
        return state if 1 <= missing <= known else None

    def _forward(self, parts: SequenceOf[Part[EagleState]]) -> torch.Tensor:
        hidden = []
        for _, state, new in parts:
            if state.own is not None:
                hidden.append(state.own)
                continue
            assert state.rows is not None  # ``_known`` looked
            hidden.append(state.rows[: len(new)])
        batch = chain_batch(parts)
        plan = self._attention.prepare(
            RaggedBatch(
                positions=batch.positions,
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                block_size=self._block_size,
            )
        )
        tokens, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        out = self._head.forward(tokens, torch.cat(hidden), positions, self._attention, plan, self._pool)
        last = out[torch.from_numpy(batch.logit_rows)]
        for i, (sequence, state, new) in enumerate(parts):
            if state.own is None and state.rows is not None:
                state.sure += len(new)
                state.rows = state.rows[len(new) :]
            state.num_computed += len(new)
            # What is computed of a long prompt in several steps goes on from the target's states.
            if state.begin + state.num_computed >= sequence.num_tokens:
                state.own = last[i : i + 1]
        return self._head.logits(last)


def load_eagle(config: EngineConfig, executor: Executor) -> EagleDrafter:
    """Load ``speculative_model``, a head for this target.

    Raises:
        ConfigError: It is missing, damaged or for another model (names ``speculative_model``), or the target is
            divided (names ``speculative``).
    """
    model = target_of(config, executor)
    head = EagleHead(HeadFiles(config), model, third=config.speculative == "eagle3")
    return EagleDrafter(config.speculative, head, config, executor.max_model_len)
