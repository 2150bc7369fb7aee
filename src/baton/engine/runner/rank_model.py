"""One rank's share of a model over its part of the KV pool; for most engines that is all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.config import EngineConfig
from baton.engine.attention.backends import choose_attention, cpu_library
from baton.engine.attention.transformers_hook import Probe, probe
from baton.engine.executor.peers import Peers
from baton.engine.models.fused import FusedDecoder, NotFusableError
from baton.engine.models.generic import GenericDecoder
from baton.engine.models.limits import max_sequence_length
from baton.engine.models.linears import choose_linear, pack_modules, restore_modules
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel, load_model
from baton.engine.models.share import cut
from baton.engine.sched.step_plan import ForwardBatch
from baton.errors import ConfigError, InternalError
from baton.kv_cache.arena import Arena
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVGeometry, ShardSpec, shard_layout
from baton_kernels.linear import PlainLinear
from baton_kernels.paged_attention import CpuPagedAttention, LayerPool, PagedAttention, RaggedBatch

log = logging.getLogger(__name__)

GENERIC, FUSED, PACKED = "generic", "fused", "packed"
"""Ways to run a model: transformers' modules, the fused decoder, the modules with packed linears."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model as it was loaded, and what is known of it before anything is cut.

    Attributes:
        max_len: Longest sequence that is served, in tokens.
        geometry: Its KV.
    """

    model: LoadedModel
    found: Probe
    max_len: int
    geometry: KVGeometry


def load_whole(config: EngineConfig) -> WholeModel:
    """Load a model and find out what its attention is.

    Raises:
        ConfigError: It cannot be loaded or not be served, or ``max_model_len`` is too much.
    """
    model = load_model(config)
    longest = max_sequence_length(model)
    found = probe(model, longest)
    shapes = tuple(LayerShape(spec.kv_heads, spec.k_dim, spec.v_dim) for spec in found.specs.values())
    return WholeModel(model, found, _max_model_len(config, found.max_len or longest), KVGeometry(shapes, model.dtype))


class RankModel:
    """What one process runs.

    Args:
        config: Of the engine.
        whole: The model, which is cut down to this rank's share.
        peers: The other ranks; ``None``: there are none.

    Attributes:
        layout: Of this rank's blocks.
        attention_backend: Name of the attention operator in use.
        linears: Name of the linear layers, should they be packed or fused.

    Raises:
        ConfigError: The model cannot be divided so; names ``tp`` or ``pp``.
    """

    def __init__(self, config: EngineConfig, whole: WholeModel, peers: Peers | None = None) -> None:
        self._config, self._model, self._max_len, self._peers = config, whole.model, whole.max_len, peers
        self.layout: KVLayout = shard_layout(
            whole.geometry, ShardSpec() if peers is None else peers.spec, config.block_size
        )
        self._vocab_size = int(whole.model.text_config.vocab_size)
        self._share = cut(whole.model, whole.found, peers)
        self._library = cpu_library(config, whole.model.device)
        self._attention: PagedAttention = choose_attention(self._library)
        self.attention_backend = self._attention.name
        self.linears, self._make = choose_linear(config, whole.model, self._library)
        self._generic = GenericDecoder(whole.model, self._share, self._attention)
        self._decoder: GenericDecoder | FusedDecoder = self._generic
        self._pools: list[LayerPool] = []
        self._scratch: list[LayerPool] = []
        self._scratch_blocks = 0
        self._arena: Arena | None = None
        self._replaced: dict[str, torch.nn.Module] = {}

    @property
    def packs(self) -> bool:
        """Whether packed linears are faster than torch's here."""
        return self._make is not PlainLinear

    def use(self, way: str) -> str:
        """Run the model in another way from now on.

        Returns:
            An empty text, or why that way is not possible; the one before stays then.
        """
        if way == FUSED:
            return self._fuse()
        restore_modules(self._generic.module, self._replaced)
        self._replaced = {}
        if way == PACKED:
            self._replaced = pack_modules(self._generic.module, self._make)
        self._decoder = self._generic
        return ""

    def _fuse(self) -> str:
        if self._library is None or not isinstance(self._attention, CpuPagedAttention):
            return "no C++ operators"
        try:
            self._decoder = FusedDecoder(
                self._model, self._share, self._max_len, self._library, self._attention, self._make
            )
        except NotFusableError as why:
            return str(why)
        return ""

    def watch_layers(self, on_layer: Callable[[int], None] | None) -> None:
        """Have a function called with a layer's index as soon as all ranks of this stage have written its KV."""
        self._decoder.on_layer = on_layer

    def bind(self, arena: Arena) -> None:
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
        self._use_scratch(0)

    def run(self, batch: ForwardBatch, scratch_blocks: int = 0) -> torch.Tensor:
        """Run this rank's share of one step.

        Args:
            batch: Its arrays must not change until this returns.
            scratch_blocks: Run over zeroed memory of so many blocks instead of the pool; consecutive steps with the
                same number share it.

        Returns:
            On the leader the logits [R, vocab], float32 or model dtype; elsewhere nothing of use.

        Raises:
            InternalError: No arena is bound.
        """
        if scratch_blocks != self._scratch_blocks:
            self._use_scratch(scratch_blocks)
        pools = self._scratch or self._pools
        if not pools:
            raise InternalError("forward before bind")
        plan = self._attention.prepare(
            RaggedBatch(
                positions=batch.positions,
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                block_size=self.layout.block_size,
            )
        )
        tokens, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        with torch.inference_mode():
            logits = self._decoder.forward(tokens, positions, torch.from_numpy(batch.logit_rows), plan, pools)
            if self._peers is None:
                return logits
            return self._peers.hand_in(logits, len(batch.logit_rows), self._vocab_size)

    def _use_scratch(self, blocks: int) -> None:
        self._scratch_blocks = blocks
        memory = torch.zeros(blocks * self.layout.block_bytes, dtype=torch.uint8)
        self._scratch = pool_views(self.layout, memory) if blocks else []


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
