"""A smaller model with the same tokenizer drafts, with a KV pool of its own.

It draws with the target's parameters and random numbers, so that where both models give a token about the same
probability they mostly draw the same one. What it holds is advisory: KV that is missing, or was of tokens that were
refused, is computed again from the sequence's tokens, a bounded number in each step.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch

from baton.config import EngineConfig
from baton.engine.executor.base import Executor, load_executor
from baton.engine.runner.input_batch import ForwardBatch
from baton.engine.sample.sampler import SamplerRow, sample
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Proposal
from baton.errors import ConfigError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.shards import KVShards, shard_layout
from baton.tokenizer.model_files import tokenizer_digest

CATCH_UP = 512
"""Tokens of prompts, and of what others drafted, that the draft model computes in one step at most."""
MEMORY_SHARE = 0.05
"""Part of the memory left after loading that the draft model's KV may take where ``kv_blocks`` does not say."""


@dataclass(slots=True)
class _State:
    """What the draft model has computed of a sequence.

    Attributes:
        blocks: Of the draft model's pool.
        num_computed: Leading tokens whose KV is there; those behind ``base`` are of ``draft``.
        base: Tokens that the sequence had when it was drafted for.
        draft: What was drafted then.
    """

    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    base: int = 0
    draft: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """A sequence that is being drafted for; ``row``: the sampler's row for its next token."""

    sequence: Sequence
    state: _State
    limit: int
    row: SamplerRow


class ModelDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` that runs a model.

    Args:
        executor: Has loaded the draft model.
        num_blocks: Of its KV pool.
    """

    name = "draft"
    sequential = True

    def __init__(self, executor: Executor, num_blocks: int) -> None:
        self._executor = executor
        self._block_size = executor.layout.block_size
        layouts = [
            shard_layout(executor.geometry, spec, self._block_size, executor.layout.groups) for spec in executor.shards
        ]
        private = len(layouts) == 1
        self._shards = KVShards([HostArena(num_blocks, each.block_bytes, private=private) for each in layouts])
        executor.bind(self._shards)
        self._free = list(range(num_blocks))
        self._states: OrderedDict[Sequence, _State] = OrderedDict()

    @torch.inference_mode()
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return what the draft model would go on with; see the protocol."""
        jobs, room = [], CATCH_UP
        asked = {sequence for sequence, _ in wanted}
        for sequence, limit in wanted:
            state = self._state(sequence)
            if state is None or not self._make_room(state, sequence.num_tokens + limit, asked):
                continue
            missing = sequence.num_tokens - state.num_computed
            if missing > room:
                if room > 1:
                    self._forward([(sequence, state, sequence.buffer[state.num_computed :][: room - 1])])
                    room = 1
                continue
            room -= missing - 1
            jobs.append(_Job(sequence, state, limit, sequence.sampler.unguided()))
        self._draft(jobs)
        drafts = {job.sequence: job.state.draft for job in jobs}
        return [Proposal(drafts.get(sequence, ())) for sequence, _ in wanted]

    def _state(self, sequence: Sequence) -> _State | None:
        """Return what is known of a sequence, without what was refused; ``None``: it is too long for the model."""
        if sequence.num_prompt + sequence.max_output > self._executor.max_model_len:
            return None
        state = self._states.pop(sequence, None) or _State()
        self._states[sequence] = state  # used last
        if sequence.num_tokens < state.base:  # rolled back: nobody knows how far it is the same
            state.num_computed = 0
        came = sequence.buffer[state.base : sequence.num_tokens].tolist()
        right = 0
        while right < min(len(came), len(state.draft)) and came[right] == state.draft[right]:
            right += 1
        # The last token is computed in any case: its logits are wanted.
        state.num_computed = min(state.num_computed, state.base + right, sequence.num_tokens - 1)
        state.base, state.draft = sequence.num_tokens, []
        return state

    def _make_room(self, state: _State, num_tokens: int, asked: set[Sequence]) -> bool:
        """Give a sequence blocks, if need be those of sequences that are not drafted for now."""
        need = -(-num_tokens // self._block_size) - len(state.blocks)
        if need > len(self._free):
            for other in [each for each in self._states if each not in asked]:
                self.ended(other)
                if need <= len(self._free):
                    break
        if need > len(self._free):
            return False
        state.blocks += [self._free.pop() for _ in range(need)]
        return True

    def _draft(self, jobs: list[_Job]) -> None:
        """Draft token by token, all sequences together."""
        tokens = [job.sequence.buffer[job.state.num_computed : job.sequence.num_tokens] for job in jobs]
        while jobs:
            parts = [(job.sequence, job.state, new) for job, new in zip(jobs, tokens, strict=True)]
            found = sample(self._forward(parts), [job.row for job in jobs])
            going, tokens = [], []
            for i, job in enumerate(jobs):
                token = found.token_ids[i]
                if i in found.bad_rows:
                    continue
                job.state.draft.append(token)
                if len(job.state.draft) < job.limit and not job.sequence.ends_with(token):
                    job.row = job.row.after(token)
                    going.append(job)
                    tokens.append(np.array([token], np.uint32))
            jobs = going

    def _forward(self, parts: list[tuple[Sequence, _State, np.ndarray]]) -> torch.Tensor:
        """Compute tokens behind what is computed; returns the logits behind the last one of each sequence."""
        counts = [len(new) for _, _, new in parts]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        contexts = np.array([state.num_computed + count for (_, state, _), count in zip(parts, counts, strict=True)])
        width = max(len(state.blocks) for _, state, _ in parts)
        tables = np.zeros((len(parts), width), np.int32)
        for row, (_, state, _) in enumerate(parts):
            tables[row, : len(state.blocks)] = state.blocks
        begins = [np.arange(end - count, end) for end, count in zip(contexts.tolist(), counts, strict=True)]
        batch = ForwardBatch(
            token_ids=np.concatenate([new for _, _, new in parts]).astype(np.int64),
            positions=np.concatenate(begins).astype(np.int64),
            query_starts=starts,
            context_lens=contexts.astype(np.int32),
            block_tables=tables,
            logit_rows=(starts[1:] - 1).astype(np.int64),
        )
        logits = self._executor.forward(batch).logits
        for (_, state, _), count in zip(parts, counts, strict=True):
            state.num_computed += count
        return logits

    def ended(self, sequence: Sequence) -> None:
        """Give its blocks back."""
        state = self._states.pop(sequence, None)
        if state is not None:
            self._free += state.blocks

    def close(self) -> None:
        """Give the memory back, and end the draft model's other processes; harmless if repeated."""
        self._states.clear()
        self._executor.close()
        self._shards.close()


def load_draft_model(config: EngineConfig, executor: Executor) -> ModelDrafter:
    """Load ``speculative_model`` beside a target model.

    Raises:
        ConfigError: It is missing, cannot be loaded, or has another tokenizer or vocabulary; names
            ``speculative_model``.
    """
    path = config.speculative_model
    if not path:
        raise ConfigError("speculative draft needs --speculative-model", field="speculative_model")
    if not config.device.startswith("cpu"):
        raise ConfigError(f"speculative draft works on device cpu only, got {config.device}", field="speculative")
    own = dataclasses.replace(
        config,
        model=path,
        tp=config.speculative_tp,
        pp=1,
        max_model_len=None,
        layer_groups=False,
        executor="auto",
        speculative="none",
        speculative_model="",
        speculative_tp=1,
        speculative_tokens=None,
    )
    try:
        if tokenizer_digest(path) != tokenizer_digest(config.model):
            raise ConfigError("it has another tokenizer", field="speculative_model")
        draft = load_executor(own)
    except ConfigError as error:
        raise ConfigError(f"speculative_model {path!r}: {error.message}", field="speculative_model") from error
    if draft.vocab_size != executor.vocab_size:
        draft.close()
        raise ConfigError(
            f"speculative_model {path!r} has a vocabulary of {draft.vocab_size}, the model of {executor.vocab_size}",
            field="speculative_model",
        )
    return ModelDrafter(draft, _num_blocks(config, draft))


def _num_blocks(config: EngineConfig, draft: Executor) -> int:
    """Blocks of the draft model's pool: as many as the target has, or what a share of the memory holds."""
    useful = config.max_num_seqs * draft.layout.num_blocks_for(draft.max_model_len)
    if config.kv_blocks is not None:
        return min(config.kv_blocks, useful)
    share = int(MEMORY_SHARE * psutil.virtual_memory().available)
    return max(draft.layout.num_blocks_for(draft.max_model_len), min(useful, share // draft.layout.block_bytes))
