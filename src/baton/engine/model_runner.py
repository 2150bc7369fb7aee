"""Runs a transformers model over Baton's paged KV pool, one ragged batch per step."""

from __future__ import annotations

import logging

import numpy as np
import torch

from baton.config import EngineConfig
from baton.engine.attention import Probe, probe
from baton.engine.backends import choose_attention, cpu_library
from baton.engine.batch import ForwardBatch
from baton.engine.checkpoint import model_digest, rope_digest
from baton.engine.fusion import FusedDecoder, NotFusableError
from baton.engine.generic import GenericDecoder
from baton.engine.limits import max_sequence_length
from baton.engine.linears import MakeLinear, choose_linear, pack_modules, restore_modules
from baton.engine.loader import TORCH_DTYPES, LoadedModel, load_model
from baton.engine.selfcheck import SLACK, TOLERANCE, SelfCheck
from baton.errors import ConfigError, InternalError
from baton.kv.arena import KVArena
from baton.kv.fingerprint import Fingerprint
from baton.kv.layout import KVLayout, LayerShape
from baton_kernels.cpu import CpuLibrary
from baton_kernels.linear import PlainLinear
from baton_kernels.paged_attention import CpuPagedAttention, LayerPool, PagedAttention, RaggedBatch

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
        description: Which path, attention and linears run the model, for people.

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
        self._attention: PagedAttention = choose_attention(library)
        self.attention_backend = self._attention.name
        self._pools: list[LayerPool] = []
        self._arena: KVArena | None = None
        self._decoder: GenericDecoder | FusedDecoder
        self._choose_decoder(model, found, library)

    def _choose_decoder(self, model: LoadedModel, found: Probe, library: CpuLibrary | None) -> None:
        """Check transformers' own modules over the paged pool, then use the fastest path that is as exact."""
        check = SelfCheck(model, self.layout.block_size)
        self._pools = self._temporary_pools(check.num_blocks)
        generic = self._decoder = GenericDecoder(model, found, self._attention)
        error = check.error(self.forward)
        if not error < TOLERANCE[model.dtype]:
            raise ConfigError(
                f"{model.architecture} cannot be served: over a paged KV cache its logits differ from its own "
                f"(relative error {error:.2g})",
                field="model",
            )
        allowed = 2 * error + SLACK[model.dtype]
        linears, make = choose_linear(self.config, model, library)
        path = "transformers' modules"
        if self.config.packed_linears and self._fuse(model, library, make, check, allowed):
            path = "fused decoder"
        elif make is not PlainLinear and not self._pack(generic, make, check, allowed):
            linears = "torch"
        self._pools = []
        log.info("%s: %s, attention %s, linears %s", model.architecture, path, self.attention_backend, linears)
        self.description = f"{path}, attention {self.attention_backend}, linears {linears}"

    def _fuse(
        self, model: LoadedModel, library: CpuLibrary | None, make: MakeLinear, check: SelfCheck, allowed: float
    ) -> bool:
        """Switch to the fused decoder if the model has its shape and the results agree."""
        if library is None or not isinstance(self._attention, CpuPagedAttention):
            return False
        generic = self._decoder
        try:
            self._decoder = FusedDecoder(model, self._specs, self.max_model_len, library, self._attention, make)
        except NotFusableError as why:
            log.debug("%s: not fused: %s", model.architecture, why)
            return False
        error = check.error(self.forward)
        if error <= allowed:
            return True
        log.warning("%s: fused decoder is off, its logits differ (relative error %.2g)", model.architecture, error)
        self._decoder = generic
        return False

    def _pack(self, generic: GenericDecoder, make: MakeLinear, check: SelfCheck, allowed: float) -> bool:
        """Replace the modules' linear layers by packed ones if the results agree."""
        replaced = pack_modules(generic.module, make)
        try:
            error = check.error(self.forward)
        except (AttributeError, TypeError, RuntimeError) as failure:
            log.warning("packed linears are off: a module needs its weight as it is (%s)", failure)
        else:
            if error <= allowed:
                return True
            log.warning("packed linears are off: the logits differ (relative error %.2g)", error)
        restore_modules(generic.module, replaced)
        return False

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
            return self._decoder.forward(tokens, positions, torch.from_numpy(batch.logit_rows), plan, self._pools)


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
