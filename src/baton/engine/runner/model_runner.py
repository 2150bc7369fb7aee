"""Runs one rank's share of a model over its part of the KV pool; for most engines that is all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton.allocator import return_free_memory
from baton.config import EngineConfig
from baton.engine.attention import BUILT_IN, AttentionContext, choose_attention, cpu_operators
from baton.engine.communicator import Communicator
from baton.engine.device import HostStaging
from baton.engine.device_memory import arena_memory
from baton.engine.models.attention_hook import probe, use_latents
from baton.engine.models.fused import FusedDecoder, NotFusableError
from baton.engine.models.generic import GenericDecoder, choose_linear, pack_modules, restore_modules
from baton.engine.models.kv_storage import HeadScales, check_backend, checkpoint_scales, kv_type
from baton.engine.models.layer_operators import CpuOperators, GpuOperators, LayerOperators
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel, load_model
from baton.engine.models.parallel import divide, require_no_states
from baton.engine.models.quirks import FUSED_FAMILIES, max_sequence_length
from baton.engine.models.recurrent import RecurrentLayers, StateArena, find_recurrent_modules
from baton.engine.quantization.modules import describe, quantized_layers, reloadable_weights
from baton.engine.runner.decode_graphs import DecodeGraphs, StepCapture, TableShape
from baton.engine.runner.draft_layers import DraftLayers
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput, IntArray, KVMoves, with_chosen
from baton.errors import ConfigError, InternalError
from baton.kv_cache.arena import Arena
from baton.kv_cache.layout import KVLayout, LayerGroup, LayerShape, group_layers, layer_types
from baton.kv_cache.shards import KVGeometry, layer_range, shard_heads, shard_layout
from baton_kernels.linear import PlainLinear
from baton_kernels.paged_attention import (
    AttentionSpec,
    ChunkedAttention,
    CpuPagedAttention,
    LayerPool,
    PagedAttention,
    RaggedBatch,
    RotatingAttention,
)

log = logging.getLogger(__name__)


POOL_DTYPES = {**TORCH_DTYPES, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
"""Of the elements of K and V in the pool."""


class ExecutionPath(enum.StrEnum):
    """How a model is run: transformers' modules, the fused decoder, the modules with packed linears and experts."""

    GENERIC = "generic"
    FUSED = "fused"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model as it was loaded, and what is known of it before anything is cut.

    Attributes:
        specs: Attention of each layer by the id of its module, in the order of the forward.
        max_len: Longest sequence that is served, in tokens.
        geometry: Shapes of the model's KV.
        groups: Layer groups, where layers with a sliding window have blocks of their own; empty: one group.
        scales: Per layer, the checkpoint's scales of its KV, where they are used.
        recurrent: The model's recurrent layers; ``None``: it has none.
    """

    model: LoadedModel
    specs: dict[int, AttentionSpec]
    max_len: int
    geometry: KVGeometry
    groups: tuple[LayerGroup, ...]
    scales: list[HeadScales | None]
    recurrent: RecurrentLayers | None = None


def load_whole(config: EngineConfig, *, hold: bool = True, rank: int = 0) -> WholeModel:
    """Load a model and find out what its attention is.

    Args:
        config: Configuration of the engine.
        hold: Whether all quantized weights are held in memory: not for ranks that keep a part.
        rank: Index of this rank in the instance.

    Raises:
        ConfigError: It cannot be loaded or not be served, or ``max_model_len`` is too much.
    """
    model = load_model(config, in_memory=hold, rank=rank)
    modules = find_recurrent_modules(model.module)
    recurrent = RecurrentLayers(modules) if modules else None
    longest = max_sequence_length(model.architecture, model.text_config, is_recurrent=bool(modules))
    specs, longest = probe(model, longest, recurrent)
    if recurrent is not None:
        check_recurrent(config, model, recurrent, specs)
    specs = use_latents(model, specs) or {id(model.module): NO_ATTENTION}
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {longest} tokens this model serves",
            field="max_model_len",
        )
    for spec in specs.values():
        if spec.chunk % config.block_size:
            raise ConfigError(
                f"block_size {config.block_size} does not divide the {spec.chunk} tokens of the chunks within which "
                f"{model.architecture} attends",
                field="block_size",
            )
    shapes = tuple(LayerShape(spec.kv_heads, spec.k_dim, 0 if spec.latent else spec.v_dim) for spec in specs.values())
    latents = frozenset(index for index, spec in enumerate(specs.values()) if spec.latent)
    may_group = config.layer_groups and config.pp == 1 and config.attention_backend in {"auto", *BUILT_IN}
    may_group = may_group and recurrent is None and not any(spec.chunk for spec in specs.values())
    every = list(specs.values())
    kind = kv_type(config, model, every)
    types = layer_types(kind, len(every))
    may_group = may_group and len(set(types)) == 1  # places in a group's blocks are of one size
    groups = group_layers([spec.window for spec in every], shapes) if may_group else ()
    scales = checkpoint_scales(model.files, every, types)
    geometry = KVGeometry(shapes, kind, latents)
    return WholeModel(model, specs, config.max_model_len or longest, geometry, groups, scales, recurrent)


NO_ATTENTION = AttentionSpec(num_heads=1, kv_heads=1, k_dim=16, v_dim=16, scale=1.0)
"""Stands for a layer in the pool of a model that has no attention: blocks count its tokens."""


def check_recurrent(
    config: EngineConfig, model: LoadedModel, recurrent: RecurrentLayers, specs: dict[int, AttentionSpec]
) -> None:
    """Refuse what cannot be computed with recurrent layers.

    Raises:
        ConfigError: The model keeps other states, or the configuration asks for what is not possible with states.
    """
    why = recurrent.why_not_served(specs)
    if why:
        raise ConfigError(f"{model.architecture} cannot be served: {why}", field="model")
    require_no_states(model, config.tp, config.pp)
    if config.speculative != "none":
        why = f"speculative must be none: drafts would change the recurrent states of {model.architecture}"
        raise ConfigError(why, field="speculative")


class ModelRunner:
    """What one process runs of a model.

    Args:
        config: Configuration of the engine.
        whole: The model, which is cut down to this rank's share.
        communicator: To the other ranks, if there are any.

    Attributes:
        layout: Layout of this rank's blocks.
        attention_backend: Name of the attention operator in use.
        attention_is_foreign: Whether another package brought it.
        linears: Name of the linear layers, should they be packed or fused.

    Raises:
        ConfigError: The model cannot be divided so, or there is no such attention; names the field.
    """

    def __init__(self, config: EngineConfig, whole: WholeModel, communicator: Communicator) -> None:
        self._max_len = whole.max_len
        self._communicator = communicator
        self.layout: KVLayout = shard_layout(whole.geometry, communicator.spec, config.block_size, whole.groups)
        self._stored = self.layout
        self._plain: KVLayout = dataclasses.replace(self.layout, dtype=whole.model.dtype)
        self._scales = _scales_of(whole, communicator)
        self._vocab_size = int(whole.model.text_config.vocab_size)
        self._share = divide(whole.model, whole.specs, communicator)
        for held in reloadable_weights(whole.model.module):
            held.load()
        device = whole.model.compute
        self._model = model = dataclasses.replace(whole.model, device=device.memory)
        library = cpu_operators(config, on_gpu=device.on_gpu)
        numbers = TORCH_DTYPES[whole.model.dtype]
        specs = tuple(self._share.specs.values())
        context = AttentionContext(device.memory, library, device.on_gpu, numbers, specs)
        self._attention: PagedAttention = choose_attention(config.attention_backend, context)
        types = [POOL_DTYPES[kind] for kind in layer_types(self.layout.dtype, len(self.layout.layers))]
        stores = getattr(self._attention, "stores", frozenset[torch.dtype]())
        check_backend(self._attention.name, stores, types, TORCH_DTYPES[whole.model.dtype])
        if any(spec.chunk for spec in self._share.specs.values()):
            self._attention = ChunkedAttention(self._attention, self._share.specs.values())
        self.attention_backend = self._attention.name
        self.attention_is_foreign = config.attention_backend not in {"auto", *BUILT_IN}
        self._quantized = quantized_layers(whole.model.module)
        self.linears, make = choose_linear(config, model, library)
        self._operators: LayerOperators = GpuOperators() if device.on_gpu else CpuOperators(library, make)
        self._on_gpu = device.on_gpu
        self._staging = HostStaging(device)
        self._returned = self._staging if device.on_gpu else None
        self._generic = GenericDecoder(model, self._share, self._attention)
        self._decoder: GenericDecoder | FusedDecoder = self._generic
        self._pools: list[LayerPool] = []
        self._scratch: list[LayerPool] = []
        self._scratch_kind = (0, False)
        self._arena: Arena | None = None
        self._replaced: dict[str, torch.nn.Module] = {}
        self._packed_linears = config.packed_linears
        self._draft: DraftLayers | None = None
        self._recurrent = whole.recurrent
        self._max_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._states: StateArena | None = None
        self._scratch_states: StateArena | None = None
        if whole.recurrent is not None:
            whole.recurrent.attach()
        self._step_capture = StepCapture(config, model, self._attention, self._staging, communicator)
        self._graphs: DecodeGraphs | None = None
        self._captured_with = 0

    def describe_quantized(self, *, packs: bool) -> str:
        """Return what quantized weights there are, for people, and what multiplies by them; empty: there are none.

        Args:
            packs: Whether operators were made of them.
        """
        return describe(self._quantized, (self._operators.quantized if packs else "") or "torch")

    @property
    def model(self) -> LoadedModel:
        """The model as it was loaded."""
        return self._model

    @property
    def packs(self) -> bool:
        """Whether some of the modules' linears or experts have faster operators here."""
        if self._operators.linear is not PlainLinear:
            return True
        if self._operators.quantized and self._packed_linears and reloadable_weights(self._generic.module):
            return True
        return any(map(self._operators.takes_experts, self._generic.module.modules()))

    @property
    def may_fuse(self) -> bool:
        """Whether the model's type and the operators are those of the fused decoder."""
        return self._model.text_config.model_type in FUSED_FAMILIES and self._rotating is not None

    @property
    def _rotating(self) -> RotatingAttention | None:
        """The attention that the fused decoder runs over, if both are of one kind."""
        attention = self._attention
        if self._on_gpu:
            return attention if isinstance(attention, RotatingAttention) else None
        return attention if isinstance(attention, CpuPagedAttention) else None

    def use(self, path: ExecutionPath) -> str:
        """Run the model on another path from now on.

        Returns:
            An empty text, or why that path is not possible; the one before stays then.
        """
        self._return_memory()
        why = ""
        if path is ExecutionPath.FUSED:
            why = self._fuse()
        else:
            self._decoder = self._generic  # or its weights would be in memory twice
            restore_modules(self._generic.module, self._replaced)
            self._replaced = {}
            if path is ExecutionPath.PACKED:
                self._replaced = pack_modules(self._generic.module, self._operators)
        self._return_memory()
        return why

    def _return_memory(self) -> None:
        """Have nothing in memory that was freed, and no plain weights that operators have copies of."""
        if self._model.mapped_files is not None:
            self._model.mapped_files.drop_pages()
        return_free_memory()

    def _fuse(self) -> str:
        if (attention := self._rotating) is None:
            return "no operators that rotate on their way"
        try:
            self._decoder = FusedDecoder(self._model, self._share, self._max_len, self._operators, attention)
        except NotFusableError as why:
            return str(why)
        return ""

    def watch_layers(self, on_layer: Callable[[int], None] | None) -> None:
        """Have a function called with a layer's index as soon as all ranks of this stage have written its KV."""
        self._decoder.on_layer = on_layer

    def add_draft_layers(self, layers: DraftLayers, geometry: KVGeometry) -> KVLayout:
        """Have blocks hold a drafter's layers behind the model's, before there is a pool.

        Args:
            layers: The drafter's layers.
            geometry: Shapes of all layers' KV, the drafter's included.

        Returns:
            The new layout.
        """
        self._draft = layers
        self.layout = shard_layout(geometry, self._communicator.spec, self.layout.block_size)
        return self.layout

    def bind(self, arena: Arena) -> str:
        """Use an arena of ``layout`` as the KV pool, and capture decode steps over it.

        Args:
            arena: The pool, of which nothing is in use yet.

        Returns:
            What was captured, for people; empty: nothing was to be.

        Raises:
            ConfigError: The arena's blocks have another size, or steps cannot be captured whose sizes were named.
        """
        if arena.block_bytes != self.layout.block_bytes:
            raise ConfigError(
                f"arena has blocks of {arena.block_bytes} bytes, the model needs {self.layout.block_bytes}",
                field="kv_blocks",
            )
        self._arena = arena
        own = () if self._draft is None else self._draft.specs
        specs = [*self._share.specs.values(), *own]
        scales = [*self._scales, *(None for _ in own)]
        self._pools = pool_views(self.layout, arena_memory(arena), specs, scales)
        if self._draft is not None:
            self._draft.bind(*self._pools[-len(own) :])
            del self._pools[-len(own) :]
        self._use_scratch(0, stored=False)
        self._scratch_states = None
        if self._recurrent is not None:
            self._states = StateArena(self._recurrent.shapes, self._max_seqs, self._model.device)
            return ""
        if not self._step_capture.sizes:
            return ""
        self._graphs, captured = self._step_capture.capture(self._decoder, self._pools, self._table_shape)
        self._captured_with = self._communicator.generation
        return captured

    def graph_bytes(self) -> int:
        """Measure what captured decode steps will take on the device, over scratch memory."""
        if not self._step_capture.sizes or self._recurrent is not None:
            return 0
        self._use_scratch(1, stored=False)
        try:
            return self._step_capture.measure(self._decoder, self._scratch, self._table_shape)
        finally:
            self._use_scratch(0, stored=False)

    @property
    def _table_shape(self) -> TableShape:
        size = self.layout.block_size
        return TableShape(size, self.layout.num_groups, -(-self._max_len // size))

    def _replay(self, graphs: DecodeGraphs, batch: ForwardBatch) -> ForwardOutput:
        logits = graphs.run(batch, self._tables(batch))
        logits = self._communicator.gather_logits(logits, len(batch.logit_rows), self._vocab_size)
        if (on_layer := self._decoder.on_layer) is not None:
            for layer in range(len(self._pools)):  # readers of a layer wait for what is queued
                on_layer(layer)
        return ForwardOutput(logits, (), self._returned)

    def run(
        self, batch: ForwardBatch, scratch_blocks: int = 0, offset: int = 0, *, stored: bool = False
    ) -> ForwardOutput:
        """Run this rank's share of one step.

        Args:
            batch: Its arrays must not change until this returns.
            scratch_blocks: Run over zeroed memory of so many blocks instead of the pool; consecutive steps with the
                same number share it.
            offset: Added to the positions that transformers' modules get, not to those in the pool: for the self-check.
            stored: Whether that memory keeps KV as the pool does, and not in the model's dtype.

        Returns:
            On the leader the output of the batch's R rows; elsewhere nothing of use.

        Raises:
            InternalError: No arena is bound.
        """
        if (scratch_blocks, stored) != self._scratch_kind:
            self._use_scratch(scratch_blocks, stored=stored)
        pools = self._scratch or self._pools
        if not pools:
            raise InternalError("forward before bind")
        if self._graphs is not None and self._captured_with != self._communicator.generation:
            log.warning("ranks have reconnected: captured steps are run eagerly from now on")
            self._graphs = None
        if self._graphs is not None and not scratch_blocks and self._graphs.can_run(batch):
            return self._replay(self._graphs, batch)
        plan = self._attention.prepare(
            RaggedBatch(
                positions=batch.positions,
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                block_tables=self._tables(batch),
                block_size=self.layout.block_size,
                groups=self.layout.num_groups,
                trees=batch.trees,
            )
        )
        positions = batch.positions + offset if offset else batch.positions
        tokens, places, rows = self._staging.upload(batch.token_ids, positions, batch.logit_rows)
        with torch.inference_mode(), self._with_states(batch, scratch=bool(scratch_blocks)):
            tokens = with_chosen(tokens, batch.chosen)
            logits, hidden = self._decoder.forward(tokens, places, rows, plan, pools, batch.hidden_of)
            logits = self._communicator.gather_logits(logits, len(rows), self._vocab_size)
        return ForwardOutput(logits, hidden, self._returned)

    def _with_states(self, batch: ForwardBatch, *, scratch: bool) -> contextlib.AbstractContextManager[None]:
        """Compute with the recurrent states of a batch's slots, in the pool's arena or in one of scratch memory."""
        if self._recurrent is None:
            return contextlib.nullcontext()
        if batch.state_slots is None:
            raise InternalError("a step of a recurrent model without state slots")
        arena = self._scratch_states if scratch else self._states
        most = int(batch.state_slots.max())
        if scratch and (arena is None or arena.num_slots <= most):
            arena = self._scratch_states = StateArena(self._recurrent.shapes, most + 1, self._model.device)
        if arena is None:
            raise InternalError("forward before bind")
        return self._step_with_states(batch, batch.state_slots, arena)

    @contextlib.contextmanager
    def _step_with_states(self, batch: ForwardBatch, slots: IntArray, arena: StateArena) -> Iterator[None]:
        if self._recurrent is None:
            raise InternalError("states of a model that has none")
        for copy in batch.state_loads:
            arena.restore(copy.slot, self._pool_bytes[list(copy.block_ids)].view(-1), copy.num_tokens)
        with self._recurrent.step(batch.query_starts, batch.context_lens, slots, arena):
            yield
        for copy in batch.state_saves:
            data = arena.snapshot(copy.slot)
            memory = self._pool_bytes
            data = F.pad(data, (0, len(copy.block_ids) * memory.shape[1] - len(data)))
            memory[list(copy.block_ids)] = data.view(-1, memory.shape[1])

    @property
    def _pool_bytes(self) -> torch.Tensor:
        """Bytes of the pool, uint8 [num_blocks, block_bytes]."""
        if self._arena is None:
            raise InternalError("forward before bind")
        size = self.layout.block_bytes
        memory = arena_memory(self._arena)
        return memory[: len(memory) // size * size].view(-1, size)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states; 0: the model has none."""
        return 0 if self._recurrent is None else self._recurrent.nbytes

    @property
    def why_no_trees(self) -> str:
        """Why tokens of a step may not be nodes of trees; empty: they may."""
        if isinstance(self._attention, ChunkedAttention):
            return f"{self._model.architecture} has layers that attend within chunks, at whose borders trees are cut"
        if not getattr(self._attention, "trees", False):
            return f"attention backend {self.attention_backend} takes no trees of tokens"
        return ""

    def move_kv(self, moves: KVMoves) -> None:
        """Move KV within the bound pool, all layers of this rank."""
        places = [
            tuple(torch.from_numpy(part).to(self._model.device) for part in divmod(slots, self.layout.block_size))
            for slots in (moves.sources, moves.targets)
        ]
        for pool in self._pools:
            (from_block, from_place), (to_block, to_place) = (
                (block[pool.group], place[pool.group]) for block, place in places
            )
            for part in _kept_per_token(pool):
                part[to_block, :, to_place] = part[from_block, :, from_place]

    def _tables(self, batch: ForwardBatch) -> npt.NDArray[np.int32]:
        """A batch's block tables, one for each layer group."""
        groups = self.layout.num_groups
        if batch.groups == groups:
            return batch.block_tables
        return np.concatenate([batch.block_tables * groups + group for group in range(groups)], axis=1, dtype=np.int32)

    def _use_scratch(self, blocks: int, *, stored: bool) -> None:
        self._scratch_kind = blocks, stored
        layout = self._stored if stored else self._plain
        size = blocks * layout.num_groups * layout.block_bytes
        memory = torch.zeros(size, dtype=torch.uint8, device=self._model.device)
        scales = self._scales if stored else [None] * len(layout.layers)
        self._scratch = pool_views(layout, memory, self._share.specs.values(), scales) if blocks else []


def _kept_per_token(pool: LayerPool) -> list[torch.Tensor]:
    """What a layer's pool has of each token, each [blocks, heads, block_size, ...]."""
    parts = [pool.k] if pool.is_latent else [pool.k, pool.v]
    if pool.k_scales is not None and pool.v_scales is not None and pool.k_scales.dim() == 3:
        parts += [pool.k_scales, pool.v_scales]
    # Bytes: not every operation knows 8-bit floats.
    return [part.view(torch.uint8) if part.element_size() == 1 else part for part in parts]


def _scales_of(whole: WholeModel, communicator: Communicator) -> list[HeadScales | None]:
    """The checkpoint's scales of a rank's layers and heads, where attention reads them."""
    spec = communicator.spec
    scales = list[HeadScales | None]()
    device = whole.model.compute.memory
    for layer in layer_range(len(whole.scales), spec.pp_size, spec.pp_rank):
        pair = whole.scales[layer]
        heads = list(shard_heads(whole.geometry, spec, layer))
        scales.append(None if pair is None else (pair[0][heads].to(device), pair[1][heads].to(device)))
    return scales


def pool_views(
    layout: KVLayout, memory: torch.Tensor, specs: Iterable[AttentionSpec], scales: Sequence[HeadScales | None]
) -> list[LayerPool]:
    """Return each layer's K and V as strided views over a pool.

    Args:
        layout: The order of the bytes.
        memory: uint8 [num_blocks * block_bytes].
        specs: Attention of each layer.
        scales: Per layer, the checkpoint's scales of its heads.

    Returns:
        Per layer k [num_blocks, kv_heads, block_size, k_dim] and v likewise; v of a latent is a view of its k. Scales
        in the block are views too.
    """
    memory = memory.reshape(-1)
    blocks = len(memory) // layout.block_bytes

    def view(dtype: torch.dtype, at: int, *inner: int) -> torch.Tensor:
        """Elements [blocks, *inner] that lie one behind the other from byte ``at`` of each block on."""
        flat = memory.view(dtype)
        unit = flat.element_size()
        strides = [layout.block_bytes // unit, *(math.prod(inner[i + 1 :]) for i in range(len(inner)))]
        return torch.as_strided(flat, (blocks, *inner), strides, at // unit)

    pools = []
    for index, (shape, spec) in enumerate(zip(layout.layers, specs, strict=True)):
        place = layout.places[index]
        rows = (shape.kv_heads, layout.block_size)
        dtype = POOL_DTYPES[place.dtype]
        k = view(dtype, place.k, *rows, shape.k_dim)
        v = k[..., : spec.v_dim] if spec.latent else view(dtype, place.v, *rows, shape.v_dim)
        beside: tuple[torch.Tensor | None, torch.Tensor | None]
        if place.k_scales >= 0:
            beside = view(torch.bfloat16, place.k_scales, *rows), view(torch.bfloat16, place.v_scales, *rows)
        else:
            beside = scales[index] or (None, None)
        pools.append(LayerPool(k, v, layout.group_of[index], *beside))
    return pools
