"""What a run measures: options checked, sizes worked out, and cut into stages whose agents share their arenas."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.config.pipes import BUILT_IN
from baton.errors import ConfigError, shown
from baton.kv_cache.arena import arena_bytes
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import BLOCK_ALIGNMENT, FLOAT_BYTES, KVLayout, LayerShape
from baton.kv_cache.shards import KVGeometry, shard_layout, shard_specs
from baton.kv_transfer.wire import BadFrameError
from baton_bench.agents import Message
from baton_bench.geometries import model_geometry, named_geometry
from baton_bench.report import build_from, check_positive, check_ranges, numbers, words

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
        dtype: Dtype of the KV elements.
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
        index: Index of the source, from 0.
        epoch: Epoch of its arena, in hex.
        num_blocks: In its arena.
        shape: Shape of its blocks.
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
        index: Index of the target, from 0.
        seed: Seed of the run.
        shape: Shape of its blocks.
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
    """The result of a run.

    Attributes:
        start: ``time.monotonic`` seconds.
        end: The same.
        bytes: That were moved.
        cpu: Seconds of the target's process.
        wrong: Number of wrong blocks; ``None``: not verified.
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
    """Result of an overlap study: seconds from the end of the computation to that of the transfer, and layers."""

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


# Certificates are not for trying.
DEVICE_PIPES = tuple(kind for kind in BUILT_IN if kind not in ("memory", "tls"))
PIPES = tuple(kind for kind in DEVICE_PIPES if kind != "cuda_ipc")
PATTERNS = ("1-1", "N-1", "1-N", "NxM")
MAX_STREAMS = 64
REFERENCE_BLOCK_BYTES = 32 << 10
REFERENCE_BLOCKS = 8192
PAGED_BLOCKS = 4096
SMALL_BYTES = 4096
SMALL_BLOCKS = 1024
MESSAGE_SIZES = (64, 1024, 4096)
_MAX_TOKENS = 1 << 24
INTERPRET = "interpret"
"""Host memory that simulates a device's."""
_INTERPRETED_PART = 512
_RANGES = {
    "block_size": (1, 4096),
    "dst_block_size": (1, 4096),
    "src_tp": (1, 64),
    "src_pp": (1, 64),
    "dst_tp": (1, 64),
    "dst_pp": (1, 64),
    "bytes": (1, 1 << 40),
    "descriptors": (1, MAX_BLOCKS),
    "n": (1, MAX_SOURCES),
    "m": (1, MAX_SOURCES),
    "warmup": (0, 1000),
    "repeat": (1, 10_000),
    "chunk": (1, _MAX_TOKENS),
    "seed": (0, (1 << 63) - 1),
}


@dataclass(frozen=True)
class Ends:
    """Where the blocks of sources and of targets lie: ``host``, ``cuda:0``, ``interpret``."""

    source: str = HOST
    target: str = HOST

    @property
    def on_device(self) -> bool:
        """Whether either is in device memory."""
        return (self.source, self.target) != (HOST, HOST)

    @property
    def label(self) -> str:
        """``host``, or ``cuda:0 to host``."""
        return f"{self.source} to {self.target}" if self.on_device else HOST

    def scaled(self, blocks: int) -> int:
        """Return how many of ``count`` blocks to use: few if Triton's interpreter copies them."""
        return blocks // _INTERPRETED_PART if INTERPRET in (self.source, self.target) else blocks


HOST_ENDS = Ends()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line; see ``baton bench kv --help``.

    Raises:
        ConfigError: Something that cannot work; names the flag.
    """

    model: str = ""
    geometry: str = ""
    isl: str = "4096"
    block_size: int = 16
    dst_block_size: int | None = None
    kv_dtype: str = "bfloat16"
    dst_kv_dtype: str | None = None
    src_tp: int = 1
    src_pp: int = 1
    dst_tp: int = 1
    dst_pp: int = 1
    bytes: int | None = None
    descriptors: int = 1
    pipes: tuple[str, ...] | None = None
    streams: tuple[int, ...] = (1, 4)
    pattern: str = "1-1"
    n: int = 2
    m: int = 2
    warmup: int = 1
    repeat: int = 7
    verify: bool = True
    reference: bool = True
    prefill_tokens_per_s: float | None = None
    overlap: bool = False
    chunk: int = 512
    require_gbps: float | None = None
    connect: str = ""
    token_file: str = ""
    seed: int = 0
    memory: str = HOST

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Options:
        """Build them from parsed flags.

        Raises:
            ConfigError: Names the flag.
        """
        pipes = None if args.pipe is None else words(args.pipe)
        return build_from(cls, args, pipes=pipes, streams=numbers(args.streams, "streams"))

    def __post_init__(self) -> None:
        if sum(bool(x) for x in (self.model, self.geometry, self.bytes)) > 1:
            raise ConfigError("give one of --model, --geometry and --bytes", field="geometry")
        unknown = sorted(set(self.pipes or ()) - set(self.known))
        if unknown or self.pipes == () or len(set(self.pipes or ())) != len(self.pipes or ()):
            raise ConfigError(f"--pipe takes some of {','.join(self.known)}, each once", field="pipe")
        if not self.streams or not all(1 <= count <= MAX_STREAMS for count in self.streams):
            raise ConfigError(f"--streams takes numbers from 1 to {MAX_STREAMS}", field="streams")
        if self.pattern not in PATTERNS:
            raise ConfigError(f"--pattern is one of {', '.join(PATTERNS)}, got {shown(self.pattern)}", field="pattern")
        for name, dtype in (("kv_dtype", self.kv_dtype), ("dst_kv_dtype", self.dst_kv_dtype)):
            if dtype is not None and dtype not in FLOAT_BYTES:
                raise ConfigError(f"--{name.replace('_', '-')} is one of {', '.join(FLOAT_BYTES)}", field=name)
        if self.dst_kv_dtype and self.bytes:
            raise ConfigError("--dst-kv-dtype needs a model or a geometry", field="dst_kv_dtype")
        if self.overlap and (self.bytes or self.pattern != "1-1"):
            raise ConfigError("--overlap needs a model or a geometry, and pattern 1-1", field="overlap")
        check_ranges(self, _RANGES)
        check_positive(self, "prefill_tokens_per_s", "require_gbps")

    @property
    def asked(self) -> tuple[str, ...]:
        """Kinds of pipe to try."""
        return self.known if self.pipes is None else self.pipes

    @property
    def known(self) -> tuple[str, ...]:
        """Kinds of pipe that there are for this memory."""
        return DEVICE_PIPES if parse_memory(self.memory)[0] != HOST else PIPES

    @property
    def ends(self) -> tuple[Ends, ...]:
        """Which memories are measured: host to host; or a device's to a device's, to the host's, and from there."""
        source, target = parse_memory(self.memory)
        if source == HOST:
            return (HOST_ENDS,)
        return Ends(source, target), Ends(source, HOST), Ends(HOST, target)

    @property
    def num_sources(self) -> int:
        return self.n if self.pattern in ("N-1", "NxM") else 1

    @property
    def num_targets(self) -> int:
        return self.m if self.pattern in ("1-N", "NxM") else 1

    @property
    def label(self) -> str:
        """Name of what is moved."""
        return self.model or self.geometry or (f"{self.bytes} bytes" if self.bytes else "llama-8b")

    def kv(self) -> KVGeometry:
        """Return the model's KV.

        Raises:
            ConfigError: Unknown or unreadable.
        """
        if self.model:
            return model_geometry(self.model, self.kv_dtype)
        return named_geometry(self.geometry or "llama-8b", self.kv_dtype)


@dataclass(frozen=True)
class MethodKey:
    """A pipe or baseline, and its connections per source."""

    name: str
    streams: int = 1

    @property
    def label(self) -> str:
        return self.name if self.streams == 1 else f"{self.name} x{self.streams}"


@dataclass(frozen=True)
class Case:
    """A size: source blocks to move per flow, and their order.

    Attributes:
        name: ``kv``, ``raw``, ``contiguous`` or ``paged``.
        tokens: 0 for raw bytes.
        flow_bytes: That one flow moves.
    """

    name: str
    tokens: int
    blocks: int
    shuffled: bool
    flow_bytes: int


@dataclass(frozen=True)
class Stage:
    """Cases that share open sources and targets.

    Attributes:
        name: ``kv``, ``raw`` or ``reference``.
        source: Shape of the sources' blocks.
        target: Shape of the targets' blocks.
        source_blocks: In each source's arena.
        target_blocks: In each target's arena for each source.
        cases: To run in turns.
        ends: Where blocks lie.
    """

    name: str
    source: Shape
    target: Shape
    source_blocks: int
    target_blocks: int
    cases: tuple[Case, ...]
    ends: Ends = HOST_ENDS


def parse_sweep(text: str) -> tuple[int, ...]:
    """Read ``4096``, ``128,1024`` or ``128:131072`` (doubling from the first to at most the second).

    Raises:
        ConfigError: It is none of these.
    """
    out: list[int] = []
    for part in text.split(","):
        result = re.fullmatch(r"(\d{1,8})(?::(\d{1,8}))?", part.strip())
        low, high = (int(result[1]), int(result[2] or result[1])) if result else (0, 0)
        if not 0 < low <= high <= _MAX_TOKENS:
            raise ConfigError(f"--isl takes 4096, 128,1024 or 128:131072; got {shown(text)}", field="isl")
        while low <= high:
            out.append(low)
            low *= 2
    return tuple(dict.fromkeys(out))


def model_stage(options: Options, ends: Ends = HOST_ENDS) -> Stage:
    """Return the main stage: a model's KV at every prompt length, or raw bytes.

    Args:
        options: Options of the command line.
        ends: Where blocks lie.

    Raises:
        ConfigError: Options do not fit together; names the flag.
    """
    if options.bytes is not None:
        size = round_up_block(-(-options.bytes // options.descriptors))
        shape = Shape.raw(size)
        case = Case("raw", 0, options.descriptors, options.descriptors > 1, size * options.descriptors)
        return Stage("raw", shape, shape, options.descriptors, options.descriptors, (case,), ends)
    geometry = options.kv()
    there = dataclasses.replace(geometry, dtype=options.dst_kv_dtype or options.kv_dtype)
    cast = there.dtype != geometry.dtype
    size = options.dst_block_size or options.block_size
    source = Shape.of(geometry, options.block_size, options.src_tp, options.src_pp, cast=cast)
    target = Shape.of(there, size, options.dst_tp, options.dst_pp, cast=cast)
    for shape in (source, target):
        shape.layouts()  # refuses what cannot be divided
    # Whole blocks travel: a prompt is rounded up to the source's, and the target has room for all that they hold.
    sizes = [(tokens, source.num_blocks(tokens)) for tokens in parse_sweep(options.isl)]
    held = source.block_size * source.bytes_per_token
    cases = tuple(Case("kv", tokens, blocks, True, blocks * held) for tokens, blocks in sizes)
    most = max(blocks for _, blocks in sizes)
    return Stage("kv", source, target, most, target.num_blocks(most * source.block_size), cases, ends)


def reference_stage(ends: Ends) -> Stage:
    """Return the stage of the standing comparison: 256 MiB in one run, and 4096 blocks of 32 KiB in random order.

    In memory that stands in for a device's it is a fraction of that: Triton's interpreter copies it.
    """
    shape = Shape.raw(REFERENCE_BLOCK_BYTES)
    size = REFERENCE_BLOCK_BYTES
    whole = ends.scaled(REFERENCE_BLOCKS)
    paged = ends.scaled(PAGED_BLOCKS)
    cases = (Case("contiguous", 0, whole, False, whole * size), Case("paged", 0, paged, True, paged * size))
    return Stage("reference", shape, shape, whole, whole, cases, ends)


def small_stage(ends: Ends) -> Stage:
    """Return the stage of single blocks of 4 KiB and of small messages."""
    shape = Shape.raw(SMALL_BYTES)
    count = ends.scaled(SMALL_BLOCKS)
    return Stage("small", shape, shape, count, count, (), ends)


def pipe_methods(options: Options) -> tuple[MethodKey, ...]:
    """Return the pipes to measure; TCP with every number of streams."""
    keys: list[MethodKey] = []
    for kind in options.asked:
        keys += [MethodKey(kind, count) for count in options.streams] if kind == "tcp" else [MethodKey(kind)]
    return tuple(keys)


def baseline_methods(options: Options, stage: str) -> tuple[MethodKey, ...]:
    """Return what the machine can do without Baton: memory copies, and sockets for pipes that use them.

    The reference stage also has TCP without its checksums, so that their cost is seen.
    """
    keys = [MethodKey("memcpy"), MethodKey("memcpy-blocks")]
    if set(options.asked) - {"shm"}:
        keys += [MethodKey("socket", count) for count in options.streams]
    if stage == "reference" and "tcp" in options.asked:
        keys += [MethodKey("tcp-unchecked", count) for count in options.streams]
    return tuple(keys)


def parse_memory(text: str) -> tuple[str, str]:
    """Read ``--memory``: the sources' memory and the targets', which is the same if one is named.

    Raises:
        ConfigError: It is neither ``host`` nor a device, or two.
    """
    names = tuple("cuda:0" if name == "cuda" else name for name in text.split(","))
    right = all(re.fullmatch(r"interpret|cuda:\d{1,3}", name) for name in names) and len(names) in (1, 2)
    if names != (HOST,) and not right:
        raise ConfigError(
            f"--memory is host, cuda, cuda:1, cuda:0,cuda:1 (sources, targets) or interpret; got {shown(text)}",
            field="memory",
        )
    return names[0], names[-1]
