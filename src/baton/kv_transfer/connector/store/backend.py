"""What a connector needs of a store, whatever stands behind it: one node, several of them, or Redis."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from baton.config.secrets import shown_url
from baton.config.stores import StoreAddress
from baton.errors import ConfigError
from baton.kv_transfer.blocks import BlockSource
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import BlockHash, BlockId, Tenant

_MAY_BE_ZERO = frozenset({"hot_loads_per_s", "redis_ttl_s"})


@dataclass(frozen=True)
class StoreOptions:
    """How a store is used. Times in seconds.

    Attributes:
        address: Where the store is, as :class:`StoreAddress` reads it.
        token: Shared token, if the services use one.
        tls: Certificates, if they use some.
        min_load_tokens: Missing tokens from which asking the store pays.
        call_timeout_s: Time the store has for an answer that moves no bytes.
        load_timeout_s: Time one request's load may take.
        save_timeout_s: Time one Put may take, and longest time that an ended request's blocks are held for the store.
        max_loads: Loads at once; requests beyond it are computed.
        max_saves: Requests whose blocks are being saved at once; those beyond it are not saved.
        max_puts: Puts at once.
        blocks_per_call: Blocks in one call.
        failures: Failures in a row after which the store, or a node of it, is left alone for ``cooldown_s``.
        replication: Nodes that get each block, where there are several.
        previous_s: Time for which a read also looks where blocks lay before nodes came or went.
        hot_loads_per_s: Loads of a segment per second from which on it gets another replica; 0: never.
        discovery: URL of the Redis in which nodes register, and the prefix of their keys.
        redis_ttl_s: Life of a block in Redis after its last use; 0: for ever.
        kv_dtype: KV type of what it keeps; ``auto``: the instance's.

    Raises:
        ConfigError: Names the field.
    """

    address: str = field(repr=False)
    token: Token | None = field(default=None, repr=False)
    tls: Tls | None = field(default=None, repr=False)
    min_load_tokens: int = 1
    call_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    save_timeout_s: float = 10.0
    max_loads: int = 64
    max_saves: int = 256
    max_puts: int = 4
    blocks_per_call: int = 1024
    failures: int = 3
    cooldown_s: float = 5.0
    replication: int = 1
    previous_s: float = 300.0
    hot_loads_per_s: float = 20.0
    discovery: tuple[str, str] = ("", "")
    redis_ttl_s: float = 3600.0
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if StoreAddress.parse(self.address).discover and not self.discovery[0]:
            raise ConfigError("kvstore: nodes are discovered through a Redis: redis is missing", field="redis")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in _MAY_BE_ZERO else None
            if isinstance(value, (int, float)) and value <= 0 and value != least:
                raise ConfigError(f"{item.name} must be positive, got {value}", field=item.name)

    @property
    def shown_address(self) -> str:
        """The address as traces and logs may show it."""
        return shown_url(self.address) if "://" in self.address else self.address


@dataclass(frozen=True)
class LocalOptions(StoreOptions):
    """How a store is used that needs no address: ``address`` is only its name, in traces and logs."""

    def __post_init__(self) -> None:
        pass

    @property
    def shown_address(self) -> str:
        """The name."""
        return self.address


@dataclass
class StoreUse:
    """What a connector did since its start, for metrics. Written in the loop's thread unless it says otherwise."""

    loads: int = 0
    """Loads that ended, whatever with."""
    load_hits: int = 0
    """Loads that brought at least one block."""
    load_failures: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    saves: int = 0
    """Puts that the store answered."""
    save_failures: int = 0
    saved_blocks: int = 0
    """Blocks that the store held after a Put, new or not."""
    followed_blocks: int = 0
    """Those that it copied while they were computed."""
    saved_bytes: int = 0
    """Bytes that the store pulled."""
    skipped_loads: int = 0
    """Requests that were not looked for, because too many were or the store was left alone (engine's thread)."""
    skipped_saves: int = 0
    """Calls of ``blocks_computed`` that were not followed by a save, for the same reasons (engine's thread)."""
    times_left_alone: int = 0
    """How often failures in a row made the connector leave the store alone."""
    nodes: int = 0
    """Nodes that are known; 0 where there is only one, or none."""
    nodes_resting: int = 0
    """Those that are left alone, because they did not answer."""
    node_failures: int = 0
    """Calls to one of several nodes, and fetches from it, that failed."""
    refused_nodes: int = 0
    """Registrations of nodes in Redis that were passed over, at each look."""
    failovers: int = 0
    """Segments that came from another node than the one asked first."""
    copied_blocks: int = 0
    """Blocks that this client had one node copy from another."""
    skipped_copies: int = 0
    """Copies of a segment that were left out or failed."""


@dataclass(frozen=True, slots=True)
class ChainPart:
    """A run of blocks of one chain. What stands before it may decide where it lies.

    Attributes:
        hashes: The chain from its first block on, at least to the part's end.
        start: The part's first block.
        stop: The block after its last one.
        tenant: Whose blocks these are; ``None``: none.
        traceparent: W3C trace context of the request that loads them; empty: it is not traced.
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
        """The part's own hashes."""
        return self.hashes[self.start : self.stop]


@dataclass
class LoadProgress:
    """What a load has brought so far; true also when the load fails."""

    num_blocks: int = 0
    """Leading blocks that are valid."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Time in fetches."""
    pipe: str = ""
    source: str = ""
    failures: list[str] = field(default_factory=list)
    """What went wrong on the way without ending the load."""


class StoreBackend(Protocol):
    """A store as its clients see it. All methods run in one event loop."""

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Let the store take blocks; those it has are not moved.

        Args:
            source: This instance's pool.
            part: Which blocks, at most ``blocks_per_call``.
            block_ids: Parallel to the part.
            generations: Parallel to the part; a block that changes meanwhile is not stored.
            deadline: ``time.monotonic()`` seconds.

        Returns:
            Blocks that the store holds now, and bytes that moved.

        Raises:
            BatonError: The store refused or was not reached.
        """

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix of a part that the store holds. On return no pipe writes into the blocks any more.

        Args:
            part: Which blocks.
            block_ids: Blocks to fill, parallel to the part.
            progress: Filled as blocks come, also if the call then fails.
            deadline: ``time.monotonic()`` seconds.
            cancelled: Ends a fetch.

        Raises:
            BatonError: It fell short for another reason than that the store does not hold more. Where only one of
                several nodes failed, ``progress.failures`` says so instead.
        """

    async def close(self) -> None:
        """Close every connection. Nothing may be running."""


@runtime_checkable
class FollowingBackend(StoreBackend, Protocol):
    """A store that can also take blocks while they are computed."""

    follows: ClassVar[bool]

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
        ready: int | None = None,
    ) -> tuple[int, int]:
        """Let the store take blocks, layer by layer as a step of the source computes them if ``ready`` says so.

        It may decline, and then says that it does not hold them. If the step fails the blocks' generations have to be
        raised before the progress goes on: what was copied is not stored then.

        Args:
            source: This instance's pool.
            part: Which blocks, at most ``blocks_per_call``.
            block_ids: Parallel to the part.
            generations: Parallel to the part.
            deadline: ``time.monotonic()`` seconds.
            ready: The pool's progress before the step's first layer: layer ``i`` is there at ``ready + i + 1``.
                ``None``: they are complete.

        Returns:
            Blocks that the store holds now (of those that are being computed: everywhere where they should be), and
            bytes that moved.

        Raises:
            BatonError: The store refused or was not reached.
        """
