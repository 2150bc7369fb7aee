"""What driver and agents tell each other: whose blocks look how, and which of them to move by which method."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.bench.core.agents import Message
from baton.errors import ConfigError
from baton.kv_cache.arena import arena_bytes
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.kv_types import FLOAT_BYTES
from baton.kv_cache.layout import BLOCK_ALIGNMENT, KVLayout, LayerShape
from baton.kv_cache.shards import KVGeometry, shard_layout, shard_specs
from baton.kv_transfer.protocol.frames import BadFrameError

Ids = npt.NDArray[np.int64]
HOST = "host"
"""Where blocks lie that no device has."""
MAX_SOURCES = 64
MAX_BLOCKS = 1 << 22
MODES = ("serial", "chunked", "layer-wise")
MAX_COMPUTE_S = 300.0
_DTYPES = frozenset(FLOAT_BYTES)


@dataclass(frozen=True)
class Shape:
    """An instance's blocks: the model's KV, how it is cut into blocks and divided among ranks.

    Attributes:
        layers: (kv_heads, k_dim, v_dim) of every layer of the model.
        dtype: Of the elements.
        unsplit: Whether the layers' heads are not divided over tensor parallelism.
        block_size: Tokens per block.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        cast: Whether sources and targets have different dtypes: what sources hold is then within every dtype's range.
    """

    layers: tuple[tuple[int, int, int], ...]
    dtype: str
    unsplit: bool
    block_size: int
    tp: int = 1
    pp: int = 1
    cast: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES or not self.layers or min(self.block_size, self.tp, self.pp) < 1:
            raise BadFrameError("a shape that no instance has")
        for heads, k_dim, v_dim in self.layers:
            if heads < 1 or k_dim < 1 or v_dim < 0 or (k_dim | v_dim) * FLOAT_BYTES[self.dtype] % 8:
                raise ConfigError("heads must have dimensions of whole 8-byte words", field="geometry")

    @classmethod
    def of(cls, geometry: KVGeometry, block_size: int, tp: int = 1, pp: int = 1, *, cast: bool = False) -> Shape:
        """Describe an instance that holds a model's KV."""
        layers = tuple((layer.kv_heads, layer.k_dim, layer.v_dim) for layer in geometry.layers)
        return cls(layers, geometry.dtype, bool(geometry.unsplit), block_size, tp, pp, cast)

    @classmethod
    def raw(cls, block_bytes: int) -> Shape:
        """Describe blocks of a size (a multiple of ``BLOCK_ALIGNMENT``) that belong to no model."""
        heads = math.gcd(block_bytes // BLOCK_ALIGNMENT, 1024)
        dim = block_bytes // FLOAT_BYTES["float16"] // 2 // heads
        return cls(((heads, dim, dim),), "float16", False, 1)

    @property
    def geometry(self) -> KVGeometry:
        """The model's KV, undivided."""
        layers = tuple(LayerShape(*layer) for layer in self.layers)
        return KVGeometry(layers, self.dtype, frozenset(range(len(layers))) if self.unsplit else frozenset())

    def layouts(self) -> tuple[KVLayout, ...]:
        """Return the layout of every rank's blocks, by rank index.

        Raises:
            ConfigError: Heads or layers cannot be divided; names ``tp`` or ``pp``.
        """
        return tuple(shard_layout(self.geometry, spec, self.block_size) for spec in shard_specs(self.tp, self.pp))

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the instance's blocks."""
        whole = KVLayout(self.geometry.layers, self.block_size, self.dtype)
        return dataclasses.replace(
            Fingerprint.of(model="bench", model_digest="bench", rope="", layout=whole),
            tp_size=self.tp,
            pp_size=self.pp,
            unsplit_layers=tuple(sorted(self.geometry.unsplit)),
            kv_cast=self.cast,
        )

    def memory(self, num_blocks: int) -> int:
        """Bytes of the arenas of all ranks."""
        return sum(arena_bytes(num_blocks, layout.block_bytes) for layout in self.layouts())

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per token of the whole model (kappa), without padding."""
        elements = sum(heads * (k_dim + v_dim) for heads, k_dim, v_dim in self.layers)
        return elements * FLOAT_BYTES[self.dtype]

    def num_blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return math.ceil(tokens / self.block_size)


def round_up_block(size: int) -> int:
    """Return the smallest size of a raw block that holds ``size`` bytes."""
    return -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


class SourceSpec(Message, frozen=True):
    """A source to open: its number, the run's seed, its blocks, the pipes it offers, and where the blocks lie."""

    index: int
    seed: int
    shape: Shape
    num_blocks: int
    kinds: tuple[str, ...]
    memory: str = HOST

    def __post_init__(self) -> None:
        if not (0 <= self.index < MAX_SOURCES and 0 < self.num_blocks <= MAX_BLOCKS):
            raise BadFrameError(f"a source with number {self.index} and {self.num_blocks} blocks")


class SourceFacts(Message, frozen=True):
    """An open source.

    Attributes:
        index: Its number.
        epoch: Of its arena, in hex.
        num_blocks: In its arena.
        shape: Of its blocks.
        endpoints: (kind, address) of its block servers.
        messages: host:port of its message service.
        bare: host:port of its bare socket.
        refused: (kind, reason) of kinds that it cannot offer.
    """

    index: int
    epoch: str
    num_blocks: int
    shape: Shape
    endpoints: tuple[tuple[str, str], ...]
    messages: str
    bare: str
    refused: tuple[tuple[str, str], ...]


class TargetSpec(Message, frozen=True):
    """A target to open.

    Attributes:
        index: Its number.
        seed: Of the run.
        shape: Of its blocks.
        num_blocks: For each source.
        sources: Whom it reads from.
        memory: Where its blocks lie.
        source_memory: Where the sources' lie, which bare copies begin in.
    """

    index: int
    seed: int
    shape: Shape
    num_blocks: int
    sources: tuple[SourceFacts, ...]
    memory: str = HOST
    source_memory: str = HOST

    def __post_init__(self) -> None:
        if not 0 < len(self.sources) <= MAX_SOURCES or not 0 < self.num_blocks * len(self.sources) <= MAX_BLOCKS:
            raise BadFrameError(f"a target of {len(self.sources)} sources with {self.num_blocks} blocks each")


class RunSpec(Message, frozen=True):
    """One run of a method.

    Attributes:
        method: ``shm``, ``tcp``, ... for pipes; ``memcpy``, ``memcpy-blocks``, ``socket`` for baselines.
        streams: Connections per source.
        blocks: Source blocks to move from each source.
        shuffled: Blocks in random order on both sides, else the first ones in order.
        wipe: Overwrite the target's blocks before.
        verify: Compare every byte afterwards.
    """

    method: str
    streams: int
    blocks: int
    shuffled: bool
    wipe: bool = False
    verify: bool = False


class RunResult(Message, frozen=True):
    """What came of a run.

    Attributes:
        start: ``time.monotonic`` seconds.
        end: The same.
        bytes: That were moved.
        cpu: Seconds of the target's process.
        wrong: Blocks that were not what they should be, if it was to be verified.
    """

    start: float
    end: float
    bytes: int
    cpu: float
    wrong: int | None = None


class OverlapSpec(Message, frozen=True):
    """One transfer under simulated compute.

    Attributes:
        run: The pipe and the blocks.
        mode: One of ``MODES``.
        chunk_blocks: Source blocks that are computed at once.
        compute_s: Seconds that the whole prompt takes to compute.
    """

    run: RunSpec
    mode: str
    chunk_blocks: int
    compute_s: float

    def __post_init__(self) -> None:
        if self.mode not in MODES or self.chunk_blocks < 1 or not 0 < self.compute_s < MAX_COMPUTE_S:
            raise BadFrameError("an overlap study that cannot be run")


class OverlapResult(Message, frozen=True):
    """What came of it: seconds from the end of the computation to the end of the transfer, and the layers computed."""

    exposed: float
    steps: int
    wrong: int | None = None


def chosen(spec: RunSpec, num_blocks: int, seed: int, owner: int) -> Ids:
    """Return which of ``num_blocks`` blocks an owner uses in a run, int64 [blocks], the same wherever it is asked."""
    if not 0 < spec.blocks <= num_blocks:
        raise BadFrameError(f"{spec.blocks} blocks of {num_blocks}")
    if not spec.shuffled:
        return np.arange(spec.blocks, dtype=np.int64)
    return np.random.default_rng((seed, owner)).permutation(num_blocks)[: spec.blocks].astype(np.int64)


def sequence_numbers(num_blocks: int) -> npt.NDArray[np.uint64]:
    """Return the generations that a source gives its blocks, uint64 [num_blocks]."""
    return np.arange(1, num_blocks + 1, dtype=np.uint64)
