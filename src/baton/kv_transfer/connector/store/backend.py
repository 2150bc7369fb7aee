"""What a store connector needs of a store: one node, several of them, Redis, files or host memory."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from baton.config.secrets import shown_url
from baton.config.stores import StoreAddress
from baton.errors import ConfigError
from baton.kv_transfer.blocks import BlockSource
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import BlockHash, BlockId, Tenant

_MAY_BE_ZERO = frozenset({"hot_loads_per_s", "redis_ttl_s"})


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """How much goes on at once with a store, and for how long. Times in seconds.

    Attributes:
        min_load_tokens: Smallest number of missing tokens for which the store is asked.
        call_timeout_s: Time limit of a call that moves no bytes.
        load_timeout_s: Time limit of one request's load.
        stall_s: Time after which a load from a key-value service ends for which nothing has come. One load that failed
            after so long is enough for the store to be left alone.
        save_timeout_s: Time limit of one save; also the longest time for which a finished request's blocks are kept
            for the store.
        max_loads: Loads at once; requests beyond it are computed.
        max_saves: Requests whose blocks are being saved at once; those beyond it are not saved.
        max_puts: Save calls at once.
        blocks_per_call: Largest number of blocks in one call.
        failures: Number of failures in a row after which the store, or a node of it, is not used for ``cooldown_s``.

    Raises:
        ConfigError: A number is not positive; names the field.
    """

    min_load_tokens: int = 1
    call_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    stall_s: float = 3.0
    save_timeout_s: float = 10.0
    max_loads: int = 64
    max_saves: int = 256
    max_puts: int = 4
    blocks_per_call: int = 1024
    failures: int = 3
    cooldown_s: float = 5.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in _MAY_BE_ZERO else None
            if isinstance(value, (int, float)) and value <= 0 and value != least:
                raise ConfigError(f"{item.name} must be positive, got {value}", field=item.name)


@dataclass(frozen=True)
class StoreOptions(StoreLimits):
    """Which store is used, and how; see :class:`StoreLimits`.

    Attributes:
        address: Address of the store, as :class:`StoreAddress` reads it.
        token: Shared token of the services, if they use one.
        tls: Certificates of the services, if they use TLS.
        replication: Number of nodes that get each block, if there are several.
        previous_s: Seconds for which a load also looks where blocks were placed before nodes joined or left.
        hot_loads_per_s: Loads of a segment per second from which on it gets another replica; 0: never.
        discovery: URL of the Redis in which nodes register, and the prefix of their keys.
        redis_ttl_s: Seconds for which Redis keeps a block after its last use; 0: for ever.
        kv_dtype: KV type of the stored blocks; ``auto``: the instance's.

    Raises:
        ConfigError: A number is not positive, or nodes are to be discovered without a Redis; names the field.
    """

    address: str = field(repr=False)
    token: Token | None = field(default=None, repr=False)
    tls: Tls | None = field(default=None, repr=False)
    replication: int = 1
    previous_s: float = 300.0
    hot_loads_per_s: float = 20.0
    discovery: tuple[str, str] = ("", "")
    redis_ttl_s: float = 3600.0
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if StoreAddress.parse(self.address).discover and not self.discovery[0]:
            raise ConfigError("kvstore: nodes are discovered through a Redis: redis is missing", field="redis")
        super().__post_init__()

    @property
    def shown_address(self) -> str:
        """The address without secrets, for traces and logs."""
        return shown_url(self.address) if "://" in self.address else self.address


@dataclass
class StoreUse:
    """Counts of what a connector did since its start, for metrics. Written in the event loop unless noted otherwise."""

    loads: int = 0
    """Loads that ended, successful or not."""
    load_hits: int = 0
    """Loads that brought at least one block."""
    load_failures: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    saves: int = 0
    """Save calls that the store answered."""
    save_failures: int = 0
    saved_blocks: int = 0
    """Blocks that the store held after a save, new or not."""
    followed_blocks: int = 0
    """Blocks that the store copied while they were computed."""
    saved_bytes: int = 0
    """Bytes that the store pulled."""
    skipped_loads: int = 0
    """Requests that were not looked up: too many loads ran, or the store was not in use (engine's thread)."""
    skipped_saves: int = 0
    """Calls of ``blocks_computed`` without a save, for the same reasons (engine's thread)."""
    times_left_alone: int = 0
    """How often failures in a row made the connector stop using the store for a while."""
    nodes: int = 0
    """Known nodes; 0 if there is only one, or none."""
    nodes_resting: int = 0
    """Nodes that are not used for a while because they did not answer."""
    node_failures: int = 0
    """Failed calls to one of several nodes, and failed fetches from it."""
    refused_nodes: int = 0
    """Registrations of nodes in Redis that were not accepted, summed over all reads."""
    failovers: int = 0
    """Segments that came from another node than the first one asked."""
    copied_blocks: int = 0
    """Blocks that this client had one node copy from another."""
    skipped_copies: int = 0
    """Copies of a segment that were left out or failed."""


@dataclass(frozen=True, slots=True)
class ChainPart:
    """A run of blocks of one chain. The blocks before it may decide where a cluster places it.

    Attributes:
        hashes: Hashes of the chain from its first block on, at least to the part's end.
        start: Index of the part's first block in the chain.
        stop: Index after the part's last block.
        tenant: Tenant that owns the blocks; ``None``: no tenant.
        traceparent: W3C trace context of the request that loads the blocks; empty: not traced.
    """

    hashes: Sequence[BlockHash]
    start: int
    stop: int
    tenant: Tenant | None = None
    traceparent: str = ""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def wanted(self) -> Sequence[BlockHash]:
        """Hashes of the part's own blocks."""
        return self.hashes[self.start : self.stop]


@dataclass
class LoadProgress:
    """What a load has brought so far; also valid if the load fails."""

    num_blocks: int = 0
    """Leading blocks that are valid."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Time spent in fetches."""
    pipe: str = ""
    """Kind of pipe that moved the blocks, for traces."""
    source: str = ""
    """Name of the store or its node, for traces."""
    failures: list[str] = field(default_factory=list)
    """Errors that did not end the load."""


@dataclass(frozen=True, slots=True, eq=False)
class SaveCall:
    """Blocks that a store is to keep.

    Attributes:
        source: Pool that holds the blocks: this instance's own.
        part: Hashes of the blocks, at most ``blocks_per_call``.
        block_ids: Blocks of the pool, parallel to the part.
        generations: Generations of the blocks, parallel to the part; a block whose generation changes is not stored.
        deadline: Time limit, in seconds of ``time.monotonic()``.
        ready: Progress of the pool before the step that computes the blocks: layer ``i`` is complete at
            ``ready + i + 1``. ``None``: the blocks are complete. Only for backends whose ``follows`` is true.
    """

    source: BlockSource
    part: ChainPart
    block_ids: Sequence[BlockId]
    generations: Sequence[int]
    deadline: float
    ready: int | None = None


class SaveResult(NamedTuple):
    """Result of a save.

    Attributes:
        num_blocks: Number of the call's blocks that the store holds now; of blocks that were being computed: on all
            nodes that should have them.
        num_bytes: Number of bytes that moved.
    """

    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadCall:
    """Blocks to be copied from a store into this instance's pool.

    Attributes:
        part: Hashes of the blocks.
        block_ids: Blocks of the pool to fill, parallel to the part.
        deadline: Time limit, in seconds of ``time.monotonic()``.
        cancelled: Ends the copying when set.
        progress: Filled as blocks arrive, also if the call then fails.
    """

    part: ChainPart
    block_ids: Sequence[BlockId]
    deadline: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: LoadProgress = field(default_factory=LoadProgress)


class StoreBackend(ABC):
    """A store of KV blocks under their hashes. All coroutines run in one event loop.

    Attributes:
        name: Name of the store for logs and errors, without secrets.
        follows: Whether :meth:`save` accepts blocks that are still being computed.
    """

    name: str
    follows: ClassVar[bool] = False

    @abstractmethod
    async def save(self, call: SaveCall) -> SaveResult:
        """Store blocks; those that the store holds already are not moved.

        Blocks that are still being computed are copied layer by layer, or declined: then the result does not count
        them. If their step fails, their generations have to be raised before the pool's progress goes on, so that
        what was copied is not stored.

        Raises:
            BatonError: The store refused or was not reached.
        """

    @abstractmethod
    async def load(self, call: LoadCall) -> None:
        """Copy the longest prefix that the store holds. On return no pipe writes into the blocks any more.

        Raises:
            BatonError: The load failed, other than by the store not holding more. If only one of several nodes
                failed, ``progress.failures`` says so instead.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all connections. No call may be running."""

    def count_leading(self, part: ChainPart) -> int | None:
        """Return how many leading blocks the store holds, if that is known without asking; else ``None``.

        May be called in any thread; the answer is a snapshot.
        """
        return None


def num_leading(valid: npt.NDArray[np.bool_]) -> int:
    """Return the number of leading entries that are true."""
    return len(valid) if valid.all() else int(valid.argmin())
