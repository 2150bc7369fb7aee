"""Runs a transformers model over Baton's paged KV pool, one ragged batch per step."""

from __future__ import annotations

import inspect
import logging
import weakref
from typing import Any

import numpy as np
import torch

from baton.config import EngineConfig
from baton.engine.attention import AttentionName, probe
from baton.engine.backends import choose_attention, cpu_library
from baton.engine.batch import ForwardBatch
from baton.engine.checkpoint import model_digest, rope_digest
from baton.engine.limits import max_sequence_length
from baton.engine.loader import TORCH_DTYPES, LoadedModel, load_model
from baton.engine.selfcheck import check_batches, compare, eager_logits
from baton.errors import ConfigError, InternalError
from baton.kv.arena import KVArena
from baton.kv.fingerprint import Fingerprint
from baton.kv.layout import KVLayout, LayerShape
from baton_kernels.paged_attention import LayerPool, PagedAttention, RaggedBatch

log = logging.getLogger(__name__)


class ModelRunner:
    """A model bound to a KV pool; implements :class:`baton.engine.batch.Runner`.

    Attributes:
        layout: Geometry of the KV blocks, as the model's layers need it.
        fingerprint: Identity of this model's KV.
        vocab_size: Columns of the logits.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Tokens that end a sequence.
        attention_backend: Name of the attention operator in use.

    Raises:
        ConfigError: The model cannot be loaded or not be served; see :func:`baton.engine.loader.load_model`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        model = load_model(config)
        self.device, self.dtype = model.device, TORCH_DTYPES[model.dtype]
        longest = max_sequence_length(model)
        found = probe(model, longest)
        self.max_model_len = _max_model_len(config, found.max_len or longest)
        self._specs = list(found.specs.values())
        self._layer_of = {module: index for index, module in enumerate(found.specs)}
        shapes = tuple(LayerShape(spec.kv_heads, spec.k_dim, spec.v_dim) for spec in self._specs)
        self.layout = KVLayout(shapes, config.block_size, model.dtype)
        self.fingerprint = Fingerprint.of(
            model=config.model_name,
            model_digest=model_digest(model.folder, model.files),
            rope=rope_digest(model.text_config.to_dict()),
            layout=self.layout,
        )
        self.vocab_size = int(model.text_config.vocab_size)
        self.eos_token_ids = model.eos_token_ids
        self.architecture = model.architecture
        library = cpu_library(config, model.device)
        self._backend: PagedAttention = choose_attention(library)
        self.attention_backend = self._backend.name
        self._pools: list[LayerPool] = []
        self._plan: Any = None
        self._arena: KVArena | None = None
        self._module = model.module
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model.module).forward).parameters
        expected = eager_logits(model)
        self._take_over()
        self._check(model, expected)

    def _take_over(self) -> None:
        """Make the module call this runner's attention; a weak reference, so that a dropped runner frees its model."""
        this = weakref.ref(self)

        def attention(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, None]:
            runner = this()
            if runner is None:
                raise InternalError("the runner of this model is gone")
            return runner._attend(module, query, key, value), None

        self._name = AttentionName(attention)
        self._module.set_attn_implementation(self._name.name)

    def _check(self, model: LoadedModel, expected: list[torch.Tensor]) -> None:
        _, blocks = check_batches(self.layout.block_size, self.vocab_size)
        self._pools = self._temporary_pools(blocks)
        compare(model, expected, self.forward, self.layout.block_size)
        self._pools = []

    def trial_run(self, num_tokens: int) -> None:
        """Run one prompt of ``num_tokens`` tokens over memory of its own, for its time and memory."""
        blocks = self.layout.num_blocks_for(num_tokens)
        pools, self._pools = self._pools, self._temporary_pools(blocks)
        try:
            self.forward(
                ForwardBatch(
                    token_ids=np.arange(num_tokens) % self.vocab_size,
                    positions=np.arange(num_tokens),
                    query_starts=np.array([0, num_tokens], dtype=np.int32),
                    context_lens=np.array([num_tokens], dtype=np.int32),
                    block_tables=np.arange(blocks, dtype=np.int32)[None],
                    logit_rows=np.array([num_tokens - 1]),
                )
            )
        finally:
            self._pools = pools

    def _temporary_pools(self, blocks: int) -> list[LayerPool]:
        return pool_views(self.layout, torch.zeros(blocks * self.layout.block_bytes, dtype=torch.uint8))

    def bind(self, arena: KVArena) -> None:
        """Use an arena of ``layout`` as the KV pool.

        Raises:
            ConfigError: The arena's blocks have another size.
        """
        if arena.block_bytes != self.layout.block_bytes:
            raise ConfigError(
                f"arena has blocks of {arena.block_bytes} bytes, the model needs {self.layout.block_bytes}",
                field="kv_blocks",
            )
        self._arena = arena
        self._pools = pool_views(self.layout, torch.from_numpy(arena.blocks.reshape(-1)))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step: write the new tokens' KV into the pool and return logits [R, vocab], float32 or model dtype.

        Args:
            batch: Its arrays must not change until this returns.

        Raises:
            InternalError: No arena is bound.
        """
        if not self._pools:
            raise InternalError("forward before bind")
        self._plan = self._backend.prepare(
            RaggedBatch(
                positions=batch.positions,
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                block_size=self.layout.block_size,
            )
        )
        try:
            with torch.inference_mode():
                return self._logits(batch)
        finally:
            self._plan = None

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        tokens = torch.from_numpy(batch.token_ids)[None].to(self.device)
        positions = torch.from_numpy(batch.positions)[None].to(self.device)
        rows = torch.from_numpy(batch.logit_rows).to(self.device)
        options = {"logits_to_keep": rows} if self._keeps_logits else {}
        output = self._module(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True, **options)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[rows]

    def _attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer: query [1, heads, T, dim], key and value likewise -> [1, T, heads, v_dim]."""
        layer = self._layer_of[id(module)]
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._backend.run(self._plan, self._specs[layer], self._pools[layer], q, k, v)[None]


def pool_views(layout: KVLayout, memory: torch.Tensor) -> list[LayerPool]:
    """Return each layer's K and V as strided views over a pool.

    Args:
        layout: The order of the bytes.
        memory: uint8 [num_blocks * block_bytes].

    Returns:
        Per layer k [num_blocks, kv_heads, block_size, k_dim] and v likewise.
    """
    flat = memory.view(TORCH_DTYPES[layout.dtype])
    blocks = len(flat) // layout.block_elements

    def view(heads: int, dim: int, offset: int) -> torch.Tensor:
        shape = (blocks, heads, layout.block_size, dim)
        strides = (layout.block_elements, layout.block_size * dim, dim, 1)
        return torch.as_strided(flat, shape, strides, offset)

    return [
        LayerPool(
            view(shape.kv_heads, shape.k_dim, layout.layer_offsets[index]),
            view(shape.kv_heads, shape.v_dim, layout.v_offset(index)),
        )
        for index, shape in enumerate(layout.layers)
    ]


def _max_model_len(config: EngineConfig, longest: int) -> int:
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {longest} tokens this model serves",
            field="max_model_len",
        )
    return config.max_model_len
