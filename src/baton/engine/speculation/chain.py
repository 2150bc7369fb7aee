"""Drafting token by token: what drafters with KV of their own have in common.

They draw with the target's parameters and random numbers, so that where both give a token about the same probability
they mostly draw the same one. What they hold is advisory: KV that is missing, or was of tokens that were refused, is
computed again, a bounded number of tokens in each step.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from baton.config import EngineConfig
from baton.engine.device import ComputeDevice, rank_device
from baton.engine.device_memory import free_bytes, new_arena
from baton.engine.executor.base import Executor, load_executor
from baton.engine.runner.input_batch import ForwardBatch
from baton.engine.sampler import SamplerOutput, sample
from baton.engine.sampler_row import SamplerRow
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Proposal
from baton.engine.speculation.rejection import probabilities
from baton.engine.speculation.tree import Branches
from baton.errors import ConfigError
from baton.kv_cache.shards import KVShards, shard_layout
from baton.tokenizer.model_files import tokenizer_digest

CATCH_UP = 512
"""Tokens of prompts, and of what others drafted, that a drafter computes in one step at most."""
MEMORY_SHARE = 0.05
"""Part of the memory left after loading that drafts' KV may take where ``kv_blocks`` does not say."""


@dataclass(slots=True)
class ChainState:
    """What a drafter has computed of a sequence.

    Attributes:
        blocks: The sequence's blocks in the drafter's pool.
        begin: Position of the first token with KV.
        num_computed: Number of tokens from there on with KV, draft tokens included.
        draft: Tokens of the last draft.
    """

    blocks: list[int] = field(default_factory=list)
    begin: int = 0
    num_computed: int = 0
    draft: list[int] = field(default_factory=list)


StateT = TypeVar("StateT", bound=ChainState)


@dataclass(slots=True)
class DraftJob(Generic[StateT]):
    """A sequence that is being drafted for.

    Attributes:
        row: The sampler's row for its next token.
        drawn_from: Distributions that the draft tokens were drawn from, where acceptance needs them.
        branches: Tree that is drafted in place of a chain; ``None``: a chain.
    """

    sequence: Sequence
    state: StateT
    limit: int
    row: SamplerRow
    drawn_from: list[torch.Tensor] = field(default_factory=list)
    branches: Branches | None = None

    def proposal(self) -> Proposal:
        if self.branches is not None:
            return self.branches.proposal()
        return Proposal(self.state.draft, drawn_from=torch.stack(self.drawn_from) if self.drawn_from else None)


Part = tuple[Sequence, StateT, npt.NDArray[np.uint32]]
"""A sequence, its state, and the tokens to compute behind what is computed."""


class ChainDrafter(ABC, Generic[StateT]):
    """A :class:`~baton.engine.speculation.drafter.Drafter` that drafts one token of all sequences after the other.

    Args:
        num_blocks: Number of blocks of the drafter's KV pool.
        block_size: Tokens per block.
        max_len: Longest sequence that it can draft for.
        device: Device that computes the drafter's logits.
    """

    sequential = True
    tells_draws = False
    """Whether proposals have the distributions that their tokens were drawn from."""

    def __init__(self, num_blocks: int, block_size: int, max_len: int, device: ComputeDevice) -> None:
        self._block_size = block_size
        self._max_len = max_len
        self._device = device
        self._free = list(range(num_blocks))
        self._states: OrderedDict[Sequence, StateT] = OrderedDict()

    @abstractmethod
    def _known(self, sequence: Sequence) -> StateT | None:
        """Return what is computed of a sequence, without rejected tokens; ``None``: it cannot be drafted for now.

        Its last token must be among what is missing: the logits behind it are wanted.
        """

    @abstractmethod
    def _forward(self, parts: SequenceOf[Part[StateT]]) -> torch.Tensor:
        """Compute tokens; return the logits [S, vocab] behind the last one of each sequence."""

    @torch.inference_mode()
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        jobs: list[DraftJob[StateT]] = []
        room = CATCH_UP
        asked = {sequence for sequence, _ in wanted}
        for sequence, limit in wanted:
            fits = sequence.num_prompt + sequence.max_output <= self._max_len
            state = self._known(sequence) if fits else None
            slots = sequence.num_tokens + self._slots(limit)
            if state is None or not self._make_room(state, slots - state.begin, asked):
                continue
            state.draft = []
            missing = sequence.num_tokens - state.begin - state.num_computed
            if missing > room:
                if room > 1:
                    self._forward([(sequence, state, self._missing(sequence, state)[: room - 1])])
                    room = 1
                continue
            room -= missing - 1
            jobs.append(DraftJob(sequence, state, limit, sequence.sampler.unguided()))
        self._draft(jobs)
        done = {job.sequence: job for job in jobs}
        return [done[sequence].proposal() if sequence in done else Proposal(()) for sequence, _ in wanted]

    def _slots(self, limit: int) -> int:
        """Return how many slots drafts of so many tokens one after the other take."""
        return limit

    def _missing(self, sequence: Sequence, state: StateT) -> npt.NDArray[np.uint32]:
        """Return the tokens that are not computed yet."""
        return sequence.buffer[state.begin + state.num_computed : sequence.num_tokens]

    def _make_room(self, state: StateT, num_tokens: int, asked: set[Sequence]) -> bool:
        """Give a sequence blocks, if need be those of sequences that are not drafted for now."""
        need = -(-num_tokens // self._block_size) - len(state.blocks)
        if need > len(self._free):
            for other in [each for each in self._states if each not in asked]:
                self.sequence_finished(other)
                if need <= len(self._free):
                    break
        if need > len(self._free):
            return False
        state.blocks += [self._free.pop() for _ in range(need)]
        return True

    def _draft(self, jobs: list[DraftJob[StateT]]) -> None:
        """Draft token by token, all sequences together."""
        tokens = [self._missing(job.sequence, job.state) for job in jobs]
        while jobs:
            parts = [(job.sequence, job.state, new) for job, new in zip(jobs, tokens, strict=True)]
            amend = functools.partial(_note_draws, jobs) if self.tells_draws else None
            rows = [job.row for job in jobs]
            jobs = extend_drafts(jobs, sample(self._forward(parts), rows, amend, on_gpu=self._device.on_gpu))
            tokens = [np.array(job.state.draft[-1:], np.uint32) for job in jobs]

    def sequence_finished(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self._free += state.blocks

    def close(self) -> None:
        for sequence in list(self._states):
            self.sequence_finished(sequence)


def extend_drafts(jobs: SequenceOf[DraftJob[StateT]], sampled: SamplerOutput) -> list[DraftJob[StateT]]:
    """Add the tokens that were chosen to drafts; return the jobs that go on."""
    going = []
    for i, job in enumerate(jobs):
        token = sampled.token_ids[i]
        if i in sampled.bad_rows:
            continue
        job.state.draft.append(token)
        if len(job.state.draft) < job.limit and not job.sequence.ends_with(token):
            job.row = job.row.after(token)
            going.append(job)
    return going


def _note_draws(
    jobs: SequenceOf[DraftJob[StateT]], logits: torch.Tensor, tokens: list[int], bad: tuple[int, ...]
) -> None:
    """Keep what the tokens of sequences that draw were drawn from."""
    for i, job in enumerate(jobs):
        if not job.row.params.greedy and i not in bad:
            job.drawn_from.append(probabilities(logits[i], job.row))


def chain_batch(parts: SequenceOf[Part[StateT]]) -> ForwardBatch:
    """Return the batch that computes the parts' tokens; positions count from where each sequence's context begins."""
    counts = [len(new) for _, _, new in parts]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    contexts = np.array([state.num_computed + count for (_, state, _), count in zip(parts, counts, strict=True)])
    width = max(len(state.blocks) for _, state, _ in parts)
    tables = np.zeros((len(parts), width), np.int32)
    for row, (_, state, _) in enumerate(parts):
        tables[row, : len(state.blocks)] = state.blocks
    begins = [np.arange(end - count, end) for end, count in zip(contexts.tolist(), counts, strict=True)]
    return ForwardBatch(
        token_ids=np.concatenate([new for _, _, new in parts]).astype(np.int64),
        positions=np.concatenate(begins).astype(np.int64),
        query_starts=starts,
        context_lens=contexts.astype(np.int32),
        block_tables=tables,
        logit_rows=(starts[1:] - 1).astype(np.int64),
    )


def draft_blocks(config: EngineConfig, max_len: int, block_bytes: int, device: torch.device) -> int:
    """Return how many blocks a drafter's pool has: as many as the target's, or what a share of the memory holds."""
    longest = -(-max_len // config.block_size)
    useful = config.max_num_seqs * longest
    if config.kv_blocks is not None:
        return min(config.kv_blocks, useful)
    share = int(MEMORY_SHARE * free_bytes(device))
    return max(longest, min(useful, share // block_bytes))


@dataclass(slots=True)
class ModelState(ChainState):
    """What the draft model has computed of a sequence.

    Attributes:
        base: Tokens that the sequence had when it was drafted for: what is computed behind them is of ``draft``.
    """

    base: int = 0


class ModelDrafter(ChainDrafter[ModelState]):
    """A :class:`~baton.engine.speculation.drafter.Drafter` that runs a model.

    Args:
        executor: Executor that has loaded the draft model.
        num_blocks: Number of blocks of the drafter's KV pool.
        devices: Device of each of its ranks.
    """

    name = "draft"

    def __init__(self, executor: Executor, num_blocks: int, devices: SequenceOf[ComputeDevice]) -> None:
        super().__init__(num_blocks, executor.layout.block_size, executor.max_model_len, devices[0])
        self._executor = executor
        layouts = [
            shard_layout(executor.geometry, spec, self._block_size, executor.layout.groups) for spec in executor.shards
        ]
        private = len(layouts) == 1
        arenas = [
            new_arena(device, num_blocks, each.block_bytes, private=private, leader=devices[0])
            for device, each in zip(devices, layouts, strict=True)
        ]
        self._shards = KVShards(arenas)
        executor.bind(self._shards)

    def _known(self, sequence: Sequence) -> ModelState:
        state = self._states.pop(sequence, None) or ModelState()
        self._states[sequence] = state  # used last
        if sequence.num_tokens < state.base:  # rolled back: the common prefix is unknown
            state.num_computed = 0
        came = sequence.buffer[state.base : sequence.num_tokens].tolist()
        right = 0
        while right < min(len(came), len(state.draft)) and came[right] == state.draft[right]:
            right += 1
        # The last token is computed in any case: its logits are wanted.
        state.num_computed = min(state.num_computed, state.base + right, sequence.num_tokens - 1)
        state.base = sequence.num_tokens
        return state

    def _forward(self, parts: SequenceOf[Part[ModelState]]) -> torch.Tensor:
        logits = self._executor.forward(chain_batch(parts)).logits
        for _, state, new in parts:
            state.num_computed += len(new)
        return logits

    def close(self) -> None:
        """Give the memory back, and end the draft model's other processes; harmless if repeated."""
        super().close()
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
    own = dataclasses.replace(
        config,
        model=path,
        device=",".join(config.device.split(",")[: config.speculative_tp]),
        tp=config.speculative_tp,
        pp=1,
        quantization="none",  # the target's flags: the draft's checkpoint may be quantized itself
        quantized_activations="auto",
        max_model_len=None,
        layer_groups=False,
        kv_dtype="auto",
        kv_skip_layers=(),
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
    blocks = draft_blocks(config, draft.max_model_len, draft.layout.block_bytes, draft.device)
    ranks = len(draft.shards)
    return ModelDrafter(draft, blocks, [rank_device(own.device, rank, ranks) for rank in range(ranks)])
