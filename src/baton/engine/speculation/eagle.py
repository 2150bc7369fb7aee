"""Drafting by a head of one layer from the target's hidden states, with KV of its own: ``eagle`` and ``eagle3``.

Of tokens whose KV came from the prefix cache or from another instance there are no hidden states. The head's KV of them
is in their blocks where it was computed by one that drafts in the same way; drafts go on without it else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.config import EngineConfig
from baton.engine.attention import AttentionContext, choose_attention, cpu_operators
from baton.engine.communicator import Communicator
from baton.engine.device import ComputeDevice, HostStaging
from baton.engine.executor.base import Executor
from baton.engine.models.attention_hook import probe, use_latents
from baton.engine.models.generic import GenericDecoder, PackedModule, choose_linear, pack_modules
from baton.engine.models.layer_operators import CpuOperators, GpuOperators
from baton.engine.models.loader import LoadedModel
from baton.engine.models.next_token import load_next_token
from baton.engine.models.parallel import divide
from baton.engine.runner.draft_layers import DraftLayers
from baton.engine.runner.model_runner import pool_views
from baton.engine.sequence import Sequence
from baton.engine.speculation.chain import ChainDrafter, ChainState, DraftJob, Part, chain_batch, draft_blocks
from baton.engine.speculation.heads import FINAL, EagleHead, HeadFiles, target_of
from baton.engine.speculation.tree import MAX_NODES, Branches, grow_trees
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import shard_specs
from baton_kernels.linear import PlainLinear
from baton_kernels.paged_attention import (
    AttentionSpec,
    LayerPool,
    PagedAttention,
    RaggedBatch,
    TokenTrees,
    ancestor_masks,
)


class HiddenHead(Protocol):
    """A layer that goes on where the target's hidden states end.

    Attributes:
        hidden_of: Hidden states of the target that it reads.
        width: Elements of a slot's hidden state.
        spec: Shape of the head's attention.
        attention: Attention operator.
        dtype: Name of the dtype of the head's KV.
    """

    hidden_of: tuple[int, ...]
    width: int
    spec: AttentionSpec
    attention: PagedAttention
    dtype: str

    def join(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what slots take of the target's hidden states, each [T, width] -> [T, width]."""

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, plan: Any, pool: LayerPool
    ) -> torch.Tensor:
        """Compute slots: tokens and positions int64 [T], hidden [T, width] -> their hidden states [T, width]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits float32 [R, vocab] of hidden states [R, width]."""


@dataclass(slots=True)
class EagleState(ChainState):
    """What the head has computed of a sequence; slot ``begin + i`` stands for that token of the sequence.

    Attributes:
        sure: Slots computed from the target's hidden states; those behind them are of drafts.
        rows: What the slots behind them take of the target's hidden states, [n, width].
        own: The head's hidden state of the slot computed last, [1, width].
        kept: Slots that are in the sequence's own blocks too.
        guessed: Position of the token whose slot took zeros, as the state before it is unknown; -1: none.
    """

    sure: int = 0
    kept: int = 0
    guessed: int = -1
    rows: torch.Tensor | None = None
    own: torch.Tensor | None = None


@dataclass(slots=True)
class _Level:
    """A tree that goes on.

    Attributes:
        hidden: The head's hidden states of the root and of the tree's tokens that are computed, [1 + n, width].
        computed: n.
    """

    state: EagleState
    branches: Branches
    hidden: torch.Tensor
    computed: int = 0


class EagleDrafter(ChainDrafter[EagleState]):
    """A :class:`~baton.engine.speculation.drafter.Drafter` that runs a head over the target's hidden states.

    Args:
        name: Name of the method.
        head: The head: EAGLE's, or another that works like it.
        config: Configuration of the engine.
        max_len: Longest sequence of the target.
        device: Device of the target and the head.

    Attributes:
        layers: The head's KV as layers of the KV pool's blocks; ``None``: those have none.
        context: Tokens of sequences whose KV was computed elsewhere: of how many the head's came with it ("known"), and
            of how many it did not ("lacking").
    """

    def __init__(self, name: str, head: HiddenHead, config: EngineConfig, max_len: int, device: ComputeDevice) -> None:
        spec = head.spec
        size = config.block_size
        shape = LayerShape(spec.kv_heads, spec.k_dim, 0 if spec.latent else spec.v_dim)
        layout = KVLayout((shape,), size, head.dtype)
        blocks = draft_blocks(config, max_len, layout.block_bytes, device.memory)
        super().__init__(blocks, size, max_len, device)
        self.name = name
        self.hidden_of = head.hidden_of
        self._head = head
        self._width = config.speculative_width
        self._attention = head.attention
        self._staging = HostStaging(device)
        memory = torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8, device=device.memory)
        (self._pool,) = pool_views(layout, memory, [spec], [None])
        self.layers: DraftLayers | None = None
        self.context: Counter[str] = Counter()

    def observe(self, rows: SequenceOf[tuple[Sequence, int, int]], hidden: tuple[torch.Tensor, ...]) -> None:
        joined = self._head.join(hidden)
        at = 0
        asked = {sequence for sequence, _, _ in rows}
        for sequence, start, count in rows:
            new = joined[at : at + count]
            at = at + count
            state = self._states.get(sequence)
            if state is None:
                state = self._states[sequence] = EagleState()
            first = start + 1
            end = state.begin + state.sure
            known = 0 if state.rows is None else len(state.rows)
            if state.begin <= first <= end + known and (state.sure or known):
                state.sure = min(state.sure, first - state.begin)
                state.kept = min(state.kept, state.sure)
                kept = first - state.begin - state.sure
                state.rows = new.clone() if not kept or state.rows is None else torch.cat([state.rows[:kept], new])
            else:  # tokens in between were computed elsewhere
                state.begin = first
                state.sure = 0
                state.kept = 0
                state.rows = new.clone()
                self._bring(sequence, state, start, asked)
        if self.layers is not None:
            self._compute_prompts(rows, asked)

    def _bring(self, sequence: Sequence, state: EagleState, start: int, asked: set[Sequence]) -> None:
        """Take what the sequence's blocks have of the tokens before ``start``, which were computed elsewhere."""
        count = 0 if self.layers is None else self.layers.num_known(sequence.buffer[:start], sequence.table)
        if count and not self._make_room(state, count, asked):
            count = 0
        self.context["known"] += count
        self.context["lacking"] += max(0, start - 1 - count)
        if self.layers is None or state.rows is None or not start:
            return
        before = self.layers.state_of(sequence.buffer, start - 1, sequence.table)
        if before is None and not count:
            return
        if count:
            self.layers.copy_to(self._pool, state.blocks, np.arange(start - count, start), sequence.table)
        state.begin = start - count
        state.sure = count
        state.kept = count
        state.guessed = start if before is None else -1
        before = torch.zeros_like(state.rows[0]) if before is None else before.to(state.rows.dtype)
        state.rows = torch.cat([before[None], state.rows])

    def _compute_prompts(self, rows: SequenceOf[tuple[Sequence, int, int]], asked: set[Sequence]) -> None:
        """Compute prompts as the target does, whether or not drafts will be wanted here: others may take the blocks."""
        parts: list[Part[EagleState]] = []
        for sequence, start, _ in rows:
            state = self._states[sequence]
            begin = state.begin + state.sure
            count = 0 if state.rows is None else min(len(state.rows), sequence.num_tokens - begin)
            if start < sequence.num_prompt and count > 0 and self._make_room(state, state.sure + count, asked):
                state.num_computed = state.sure
                state.own = None
                parts.append((sequence, state, sequence.buffer[begin : begin + count]))
        if parts:
            self._compute(parts)
        for sequence, state, _ in parts:
            if state.rows is not None and len(state.rows):  # of the last token: what follows it is not known yet
                self._keep_state(sequence, state, state.begin + state.sure, state.rows[0])

    def _keep_state(self, sequence: Sequence, state: EagleState, slot: int, row: torch.Tensor) -> None:
        """Put what a slot takes of the token before it into that token's block."""
        if self.layers is not None and slot not in (0, state.guessed):
            self.layers.keep_state(sequence.buffer, slot - 1, sequence.table, row)

    def _store_in_layers(self, sequence: Sequence, state: EagleState) -> None:
        """Put what is computed from the target's hidden states into the sequence's blocks, as far as it has some."""
        end = min(state.sure, len(sequence.block_ids) * self._block_size - state.begin)
        if self.layers is not None and end > state.kept:
            slots = np.arange(state.kept, end)
            of = (self._pool, state.blocks, slots)
            self.layers.copy_from(*of, sequence.buffer, slots + state.begin, sequence.table)
            state.kept = end

    def _known(self, sequence: Sequence) -> EagleState | None:
        state = self._states.get(sequence)
        if state is None:
            return None
        self._states.move_to_end(sequence)  # used last
        state.num_computed = state.sure
        state.own = None
        missing = sequence.num_tokens - state.begin - state.sure
        known = 0 if state.rows is None else len(state.rows)
        return state if 1 <= missing <= known else None

    def _forward(self, parts: SequenceOf[Part[EagleState]]) -> torch.Tensor:
        return self._head.logits(self._compute(parts))

    def _compute(self, parts: SequenceOf[Part[EagleState]]) -> torch.Tensor:
        """Compute slots; return the hidden states [S, width] of the last one of each sequence."""
        hidden = []
        for _, state, new in parts:
            if state.own is not None:
                hidden.append(state.own)
                continue
            assert state.rows is not None  # ``_known`` looked
            hidden.append(state.rows[: len(new)])
        chain = chain_batch(parts)
        batch = RaggedBatch(
            positions=chain.positions,
            query_starts=chain.query_starts,
            context_lens=chain.context_lens,
            block_tables=chain.block_tables,
            block_size=self._block_size,
        )
        states = self._run(batch, chain.token_ids, torch.cat(hidden))
        last = states[self._staging.upload(chain.logit_rows)[0]]
        for i, (sequence, state, new) in enumerate(parts):
            if state.own is None and state.rows is not None:
                first = state.begin + state.sure
                for slot in range(-(-first // self._block_size) * self._block_size, first + len(new), self._block_size):
                    self._keep_state(sequence, state, slot, state.rows[slot - first])
                state.sure += len(new)
                state.rows = state.rows[len(new) :]
                self._store_in_layers(sequence, state)
            state.num_computed += len(new)
            # What is computed of a long prompt in several steps goes on from the target's states.
            if state.begin + state.num_computed >= sequence.num_tokens:
                state.own = last[i : i + 1]
        return last

    def _run(self, batch: RaggedBatch, tokens: npt.NDArray[np.int64], hidden: torch.Tensor) -> torch.Tensor:
        """Compute slots: tokens [T], hidden states [T, width] that go with them -> those of the head [T, width]."""
        plan = self._attention.prepare(batch)
        on_device, positions = self._staging.upload(tokens, batch.positions)
        return self._head.forward(on_device, hidden, positions, plan, self._pool)

    # Trees

    def _slots(self, limit: int) -> int:
        return min(limit * self._width, MAX_NODES) if self._width > 1 else limit

    def _draft(self, jobs: list[DraftJob[EagleState]]) -> None:
        """Draft level by level, all sequences together, if trees are asked for."""
        if self._width == 1 or not jobs:
            super()._draft(jobs)
            return
        parts = [(job.sequence, job.state, self._missing(job.sequence, job.state)) for job in jobs]
        logits = self._forward(parts)
        levels: list[_Level] = []
        for job in jobs:
            job.branches = Branches(job.sequence, job.row, job.limit, self._width)
            assert job.state.own is not None  # the last token was computed
            levels.append(_Level(job.state, job.branches, job.state.own))
        while levels:
            going = grow_trees([level.branches for level in levels], logits, self._width)
            levels = list(compress(levels, going))
            if levels:
                logits = self._forward_levels(levels)

    def _forward_levels(self, levels: list[_Level]) -> torch.Tensor:
        """Compute the tokens that go on; return the logits [n, vocab] behind them, sequence by sequence."""
        starts = [0]
        contexts = []
        roots = []
        tokens = list[int]()
        positions = list[int]()
        ancestors = list[int]()
        hidden = list[torch.Tensor]()
        tables = np.zeros((len(levels), max(len(level.state.blocks) for level in levels)), np.int32)
        for row, level in enumerate(levels):
            branches = level.branches
            state = level.state
            masks = ancestor_masks(branches.parents)
            # Tokens of a level that end the sequence are computed too: a tree's slots have no gaps.
            new = range(level.computed, len(branches.tokens))
            root = state.num_computed - 1
            tokens += [branches.tokens[node] for node in new]
            ancestors += [masks[node + 1] for node in new]
            positions += [root + masks[node + 1].bit_count() - 1 for node in new]
            hidden += [level.hidden[branches.parents[node] + 1] for node in new]
            tables[row, : len(state.blocks)] = state.blocks
            starts.append(len(tokens))
            contexts.append(state.num_computed + len(branches.tokens))
            roots.append(root)
        batch = RaggedBatch(
            positions=np.array(positions, np.int64),
            query_starts=np.array(starts, np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=tables,
            block_size=self._block_size,
            trees=TokenTrees(np.array(ancestors, np.uint64), np.array(roots, np.int32)),
        )
        out = self._run(batch, np.array(tokens, np.int64), torch.stack(hidden))
        wanted = []
        for level, first, end in zip(levels, starts[:-1], starts[1:], strict=True):
            wanted += [first + node - level.computed for node in level.branches.level]
            level.hidden = torch.cat([level.hidden, out[first:end]])
            level.computed = len(level.branches.tokens)
        return self._head.logits(out[wanted])


def draft_attention(config: EngineConfig, target: LoadedModel) -> PagedAttention:
    """Return the attention that heads use, where their target is."""
    on_gpu = target.compute.on_gpu
    return choose_attention("auto", AttentionContext(target.device, cpu_operators(config, on_gpu=on_gpu), on_gpu))


def load_eagle(config: EngineConfig, executor: Executor) -> EagleDrafter:
    """Load ``speculative_model``, a head for this target.

    Raises:
        ConfigError: It is missing, damaged or for another model (names ``speculative_model``), or the target is
            divided (names ``speculative``).
    """
    model = target_of(config, executor)
    files = HeadFiles(config, model.device)
    head = EagleHead(files, model, draft_attention(config, model), third=config.speculative == "eagle3")
    drafter = EagleDrafter(config.speculative, head, config, executor.max_model_len, model.compute)
    drafter.layers = layers_in_blocks(executor, f"{drafter.name}:{files.digest}", head, config.block_size)
    return drafter


def layers_in_blocks(executor: Executor, draft: str, head: HiddenHead, block_size: int) -> DraftLayers | None:
    """Have the target's blocks keep a head's KV, as they can unless they hold groups of layers.

    Args:
        executor: Has loaded the target, and has no pool yet.
        draft: Names the head, and what decides its numbers beside the model.
        head: The head.
        block_size: Tokens per block.
    """
    layers = DraftLayers(draft, head.spec, head.dtype, head.width, block_size)
    keeper: Any = executor  # one of a single process, as ``target_of`` looked
    return layers if keeper.add_draft_layers(layers) else None


class NextTokenHead:
    """The layer, run by transformers' modules with Baton's attention, linears and experts.

    Args:
        config: Configuration of the engine.
        target: The target model.
        max_len: Longest sequence of the target.
        attention: Attention operator of the layer.

    Attributes:
        hidden_of: Layers of the target model whose hidden states the head reads.
        width: Elements of one.
        spec: Shape of the layer's attention.
        attention: As given.
        dtype: The target's, by name.

    Raises:
        ConfigError: The checkpoint has no such layer (names ``speculative``), or a damaged one (names ``model``).
    """

    hidden_of: tuple[int, ...] = (FINAL,)

    def __init__(self, config: EngineConfig, target: LoadedModel, max_len: int, attention: PagedAttention) -> None:
        self._layer = load_next_token(config, target)
        model = self._layer.model
        specs, _ = probe(model, max_len)
        self._share = divide(model, use_latents(model, specs), Communicator(shard_specs(1, 1)[0]))
        (self.spec,) = self._share.specs.values()
        self.dtype = model.dtype
        self.attention = attention
        self.width = int(target.text_config.hidden_size)
        self._decoder = GenericDecoder(model, self._share, attention)
        on_gpu = target.compute.on_gpu
        library = cpu_operators(config, on_gpu=on_gpu)
        _, make = choose_linear(config, model, library)
        pack_modules(model.module, GpuOperators() if on_gpu else CpuOperators(library, make))
        self._embedding = target.module.get_input_embeddings()
        self._head: Any = target.module.get_output_embeddings()
        if type(self._head) is nn.Linear and make is not PlainLinear:
            self._head = PackedModule(make(self._head.weight, self._head.bias))

    def join(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return hidden[0]

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, plan: Any, pool: LayerPool
    ) -> torch.Tensor:
        self._layer.set_inputs(self._embedding(tokens), hidden)
        rows = torch.arange(len(tokens), device=tokens.device)
        states, _ = self._decoder.forward(tokens, positions, rows, plan, [pool])
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits.float()


def load_mtp(config: EngineConfig, executor: Executor) -> EagleDrafter:
    """Load the next-token layer of the model's own checkpoint.

    Raises:
        ConfigError: As :class:`NextTokenHead`, or the target is divided (names ``speculative``).
    """
    target = target_of(config, executor)
    head = NextTokenHead(config, target, executor.max_model_len, draft_attention(config, target))
    drafter = EagleDrafter("mtp", head, config, executor.max_model_len, target.compute)
    drafter.layers = layers_in_blocks(executor, "mtp", head, config.block_size)
    return drafter
