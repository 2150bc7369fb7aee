"""A real model small enough for unit tests: two attention layers over the paged pool, in plain torch.

It reads and writes KV through block tables as the real runner does, and the KV of its second layer depends on all
earlier tokens, so a wrong block, a stale one or a wrong position changes its tokens. Everything is computed in
float64 over a float32 pool: the result does not depend on how a prompt is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from baton.engine.executor.base import ExecutorLostError
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput, InputBuffers, KVMoves, with_chosen
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVGeometry, KVShards, ShardSpec

LAYERS = 2
HEADS = 2
DIM = 8
WIDTH = HEADS * DIM


class ToyRunner:
    """Implements :class:`baton.engine.executor.base.Executor`.

    Attributes:
        num_tokens: Tokens computed so far.
        num_logit_rows: Rows of logits computed so far.
        num_moved: Tokens whose KV was moved so far.
        fail_next: Raised by the next forward pass instead of running it.
        poisoned: Token ids after which the logits are NaN.
    """

    attention_backend = description = "toy"
    why_no_trees = ""
    takes_chosen = True
    quality = None
    device = torch.device("cpu")

    def __init__(
        self, *, block_size: int = 4, vocab_size: int = 64, max_model_len: int = 256, eos: int = 1, seed: int = 0
    ) -> None:
        self.layout = KVLayout((LayerShape(HEADS, DIM, DIM),) * LAYERS, block_size, "float32")
        self.geometry = KVGeometry(self.layout.layers, self.layout.dtype)
        self.shards = (ShardSpec(),)
        self.input_buffers: InputBuffers | None = None
        self.on_layer: Callable[[int], None] | None = None
        self.fingerprint = Fingerprint.of(model="toy", model_digest=f"toy-{seed}", rope="", layout=self.layout)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset({eos})
        self.num_tokens = 0
        self.num_logit_rows = self.num_moved = 0
        self.fail_next: Exception | None = None
        self.poisoned: frozenset[int] = frozenset()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self._embedding = weight(vocab_size, WIDTH)
        self._positions = weight(max_model_len, WIDTH) * 0.5
        self._qkv = [weight(WIDTH, 3 * WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
        self._out = [weight(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
        self._head = weight(WIDTH, vocab_size)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def make_arena(self, num_blocks: int) -> KVShards:
        """Make an arena of this model's layout and bind it."""
        shards = KVShards([HostArena(num_blocks, self.layout.block_bytes)])
        self.bind(shards)
        return shards

    def load(self) -> None:
        """The weights are there."""

    def graph_bytes(self) -> int:
        return 0

    def trial_run(self, num_tokens: int) -> None:
        """It takes no memory worth measuring."""

    def watch(self, on_lost: Callable[[ExecutorLostError], None]) -> None:
        """There is no other process that could be lost."""

    def close(self) -> None:
        """There is no other process to end."""

    def bind(self, shards: KVShards) -> None:
        """Use an arena of ``layout`` as the KV pool."""
        pool = torch.from_numpy(shards.primary.blocks.view(np.float32))
        size = self.layout.block_size
        self._keys, self._values = [], []
        for layer in range(LAYERS):
            k, v = (at // 4 for at in (self.layout.places[layer].k, self.layout.places[layer].v))
            length = HEADS * size * DIM
            self._keys.append(pool[:, k : k + length].view(-1, HEADS, size, DIM))
            self._values.append(pool[:, v : v + length].view(-1, HEADS, size, DIM))

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one step: write the new tokens' KV into the pool and return float32 logits [R, vocab]."""
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.num_tokens += len(batch.token_ids)
        self.num_logit_rows += len(batch.logit_rows)
        tokens = with_chosen(torch.from_numpy(batch.token_ids), batch.chosen)
        positions = torch.from_numpy(batch.positions)
        counts = np.diff(batch.query_starts)
        tables = torch.from_numpy(np.repeat(batch.block_tables.astype(np.int64), counts, axis=0))
        size = self.layout.block_size
        ends = np.repeat(batch.context_lens - batch.query_starts[1:], counts)
        slots = torch.from_numpy((ends + np.arange(len(tokens))).astype(np.int64))
        blocks, slots = tables[torch.arange(len(tokens)), slots // size], slots % size
        hidden = self._embedding[tokens] + self._positions[positions]
        for layer in range(LAYERS):
            query, key, value = (torch.tanh(hidden) @ self._qkv[layer]).split(WIDTH, dim=-1)
            self._keys[layer][blocks, :, slots] = key.float().reshape(-1, HEADS, DIM)
            self._values[layer][blocks, :, slots] = value.float().reshape(-1, HEADS, DIM)
            mixed = self._attend(layer, query, batch)
            if self.on_layer is not None:
                self.on_layer(layer)
            hidden = hidden + mixed @ self._out[layer]
        logits = (torch.tanh(hidden) @ self._head).float()
        for token in self.poisoned:
            logits[tokens == token] = float("nan")
        rows = torch.from_numpy(batch.logit_rows)
        return ForwardOutput(logits[rows], (hidden,) if batch.hidden_of == (-1,) else ())

    def _attend(self, layer: int, query: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = torch.empty_like(query)
        for i, context in enumerate(batch.context_lens.tolist()):
            start, end = int(batch.query_starts[i]), int(batch.query_starts[i + 1])
            blocks = torch.from_numpy(batch.block_tables[i, : self.layout.num_blocks_for(context)].astype(np.int64))
            keys = self._keys[layer][blocks].transpose(0, 1).flatten(1, 2)[:, :context].double()
            values = self._values[layer][blocks].transpose(0, 1).flatten(1, 2)[:, :context].double()
            heads = query[start:end].reshape(-1, HEADS, DIM).transpose(0, 1)
            scores = heads @ keys.transpose(1, 2)
            allowed = torch.arange(context)[None] <= torch.arange(context - (end - start), context)[:, None]
            trees = batch.trees
            for row in range(start, end):
                if trees is not None and (branch := trees.branch(row, i)):
                    allowed[row - start, branch[0] :] = False
                    allowed[row - start, branch] = True
            weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
            out[start:end] = (weights @ values).transpose(0, 1).flatten(1)
        return out

    def move_kv(self, moves: KVMoves) -> None:
        """Move KV within the pool."""
        self.num_moved += moves.sources.shape[1]
        size = self.layout.block_size
        (from_block, from_place), (to_block, to_place) = (
            (torch.from_numpy(part) for part in divmod(slots[0], size)) for slots in (moves.sources, moves.targets)
        )
        for pool in (*self._keys, *self._values):
            pool[to_block, :, to_place] = pool[from_block, :, from_place]

    def reference_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return float32 logits [len(token_ids), vocab] of a whole sequence, computed at once in a pool of its own."""
        other = ToyRunner.__new__(ToyRunner)
        other.__dict__.update(self.__dict__)
        count, blocks = len(token_ids), self.layout.num_blocks_for(len(token_ids))
        arena = other.make_arena(blocks)
        output = other.forward(
            ForwardBatch(
                token_ids=np.array(token_ids, np.int64),
                positions=np.arange(count),
                query_starts=np.array([0, count], np.int32),
                context_lens=np.array([count], np.int32),
                block_tables=np.arange(blocks, dtype=np.int32)[None],
                logit_rows=np.arange(count),
            )
        )
        arena.close()
        return output.logits

    def greedy(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Return what greedy generation must give, computed token by token from the start without any cache."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_tokens:
            tokens.append(int(self.reference_logits(tokens)[-1].argmax()))
            if tokens[-1] in self.eos_token_ids and not ignore_eos:
                break
        return tokens[len(prompt) :]
