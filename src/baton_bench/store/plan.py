"""Options of ``baton bench store``, sizes derived from them, and the orders of its clients."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError, shown
from baton.kv_cache.layout import DTYPE_BYTES
from baton.kv_transfer.types import Bytes
from baton.types import BlockHash
from baton_bench.agents import Message
from baton_bench.geometries import model_geometry, named_geometry
from baton_bench.kv.plan import Shape
from baton_bench.report import build_from, check_positive, check_ranges, numbers, words

TIERS = ("shm", "tcp", "disk")
"""Memory over the shared-memory pipe, memory over TCP, disk (over shared memory)."""
OPS = ("put", "get", "contains")
MAX_CLIENTS = 64
MAX_BLOCKS = 1024
"""In a request."""
REDIS_BYTES = 1 << 30
DISK_MEMORY = 8
"""Chains that the memory of a store on disk has room for, at least; at most a quarter of them all."""
_RANGES = {
    "block_size": (1, 4096),
    "request_bytes": (1, 1 << 30),
    "total_bytes": (1 << 20, 1 << 40),
    "disk_readers": (1, 64),
    "warmup": (0, 100),
    "repeat": (1, 1000),
    "seconds": (0.01, 60),
    "seed": (0, (1 << 31) - 1),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line; see ``baton bench store --help``.

    Raises:
        ConfigError: Something that cannot work; names the flag.
    """

    geometries: tuple[str, ...] = ("llama-8b", "llama-1b", "baton-tiny")
    model: str = ""
    block_size: int = 16
    kv_dtype: str = "bfloat16"
    tiers: tuple[str, ...] = TIERS
    ops: tuple[str, ...] = OPS
    clients: tuple[int, ...] = (1, 4, 16)
    hits: tuple[int, ...] = (100, 50)
    request_bytes: int = 32 << 20
    total_bytes: int = 1 << 30
    dir: str = "/var/tmp"
    disk_readers: int = 4
    redis: bool = True
    warmup: int = 1
    repeat: int = 5
    seconds: float = 0.4
    seed: int = 0
    require_dram: float | None = None
    require_disk: float | None = None
    require_redis: float | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Options:
        """Build them from parsed flags.

        Raises:
            ConfigError: Names the flag.
        """
        return build_from(
            cls,
            args,
            geometries=words(args.geometry),
            tiers=words(args.tier),
            ops=words(args.op),
            clients=numbers(args.clients, "clients"),
            hits=numbers(args.hits, "hits"),
        )

    def __post_init__(self) -> None:
        for name, values, known in (("tier", self.tiers, TIERS), ("op", self.ops, OPS)):
            if not values or set(values) - set(known) or len(set(values)) != len(values):
                raise ConfigError(f"--{name} takes some of {','.join(known)}, each once", field=name)
        for name, counts, least, most in (("clients", self.clients, 1, MAX_CLIENTS), ("hits", self.hits, 0, 100)):
            if not counts or not all(least <= count <= most for count in counts):
                raise ConfigError(f"--{name} takes numbers from {least} to {most}", field=name)
        if self.kv_dtype not in DTYPE_BYTES:
            raise ConfigError(f"--kv-dtype is one of {', '.join(DTYPE_BYTES)}", field="kv_dtype")
        check_ranges(self, _RANGES)
        check_positive(self, "require_dram", "require_disk", "require_redis")


@dataclass(frozen=True)
class Plan:
    """One geometry's run.

    Attributes:
        name: Name of the model.
        shape: Shape of its blocks.
        block_bytes: Bytes of a block.
        blocks: In a request: a chain.
        chains: That the stores hold.
        redis_chains: That Redis holds.
        disk_memory_chains: That a store on disk has memory for.
    """

    name: str
    shape: Shape
    block_bytes: int
    blocks: int
    chains: int
    redis_chains: int
    disk_memory_chains: int

    @property
    def chain_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def memory(self, options: Options) -> int:
        """Bytes that all processes together take."""
        clients = 2 * max(options.clients)
        dram = 2 * self.chains if {"shm", "tcp"} & set(options.tiers) else 0
        disk = 2 * self.disk_memory_chains if "disk" in options.tiers else 0
        redis = 2 * self.redis_chains if options.redis else 0
        return (clients + dram + disk + redis) * self.chain_bytes + (1 << 29)


def make_plans(options: Options) -> list[Plan]:
    """Return what to measure, one plan per geometry.

    Raises:
        ConfigError: An unknown geometry, or blocks that do not fit a request.
    """
    names = (options.model,) if options.model else options.geometries
    plans = []
    for name in names:
        kv = model_geometry(name, options.kv_dtype) if options.model else named_geometry(name, options.kv_dtype)
        shape = Shape.of(kv, options.block_size)
        size = shape.fingerprint().block_bytes
        blocks = min(MAX_BLOCKS, options.request_bytes // size)
        if not blocks:
            raise ConfigError(
                f"a block of {shown(name)} has {size} bytes, --request-bytes is {options.request_bytes}",
                field="request_bytes",
            )
        most = max(options.clients)
        chains = max(most, 2 * DISK_MEMORY, options.total_bytes // (blocks * size))
        redis_chains = min(chains, max(1, REDIS_BYTES // (blocks * size)))
        plans.append(Plan(name, shape, size, blocks, chains, redis_chains, max(DISK_MEMORY, chains // 4)))
    return plans


MAX_SAMPLES = 4000
"""Requests in one turn of one client: their times go over the control line in one message."""
_ODD = 0x9E3779B97F4A7C15
Words = npt.NDArray[np.uint64]


class Addresses(Message, frozen=True):
    """Where things are; empty or 0: not there.

    Attributes:
        dram: gRPC address of the store in memory that is read.
        dram_put: Address of the memory store that is written.
        disk: Address of the disk store that is read.
        disk_put: Address of the disk store that is written.
        disk_path: Folder of the files of ``disk``.
        redis: Port of a redis-server on 127.0.0.1.
    """

    dram: str = ""
    dram_put: str = ""
    disk: str = ""
    disk_put: str = ""
    disk_path: str = ""
    redis: int = 0


class OpenSpec(Message, frozen=True):
    """A client's part.

    Attributes:
        index: Index of the client, from 0.
        seed: Seed of names and bytes.
        plan: Blocks to move.
        readers: Threads of plain reads.
        where: The servers.
    """

    index: int
    seed: int
    plan: Plan
    readers: int
    where: Addresses


class TurnSpec(Message, frozen=True):
    """One turn: requests one after the other for some time.

    Attributes:
        method: ``shm``, ``tcp``, ``disk`` or a baseline.
        op: ``get``, ``put`` or ``contains``.
        clients: That take part, this one among them.
        hit_percent: Percent of the requests whose chain is stored; of other chains no block is.
        first: Place of the first chain. All clients together go through the chains in turn, over and over.
        start: ``time.monotonic()`` at which all begin.
        seconds: After which no request begins.
    """

    method: str
    op: str
    clients: int
    hit_percent: int
    first: int
    start: float
    seconds: float


class TurnResult(Message, frozen=True):
    """The result of a turn.

    Attributes:
        start: ``time.monotonic()`` at which the first request began.
        end: At which the last one ended.
        blocks: Blocks loaded, put or found.
        hits: Requests whose chain is stored.
        cpu: Seconds of the client's process.
        seconds: Seconds of each request.
    """

    start: float
    end: float
    blocks: int
    hits: int
    cpu: float
    seconds: list[float]


class VerifyResult(Message, frozen=True):
    """How many blocks were compared, and how many of them were wrong."""

    wrong: int
    checked: int


def chain_names(seed: int, chain: int, blocks: int) -> list[BlockHash]:
    """Return the names of a chain's blocks."""
    return [BlockHash(hashlib.sha256(b"%d/%d/%d" % (seed, chain, i)).digest()) for i in range(blocks)]


class Pattern:
    """The contents of blocks: 8-byte words that count up from one derived from the name.

    Args:
        block_bytes: A multiple of 8.
    """

    def __init__(self, block_bytes: int) -> None:
        self._ramp: Words = np.arange(block_bytes // 8, dtype=np.uint64) * np.uint64(_ODD)

    def fill(self, names: list[BlockHash], out: Bytes) -> None:
        """Write blocks, uint8 [blocks, block_bytes]."""
        for name, block in zip(names, out, strict=True):
            np.add(self._ramp, _base(name), out=block.view(np.uint64))

    def wrong(self, names: list[BlockHash], blocks: Bytes) -> int:
        """Return the number of wrong blocks; every byte is compared."""
        return sum(
            not np.array_equal(block.view(np.uint64), self._ramp + _base(name))
            for name, block in zip(names, blocks, strict=True)
        )


def _base(name: BlockHash) -> np.uint64:
    return np.uint64(int.from_bytes(name[:8], "little"))
