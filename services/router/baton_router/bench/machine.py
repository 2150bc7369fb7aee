"""Simulated instances: how long things take there, and what stays in their caches.

What the router sees of them is real: an :class:`~baton_router.registry.instance.Instance` with its load book, and KV
events through its feed into the index.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from baton.api.v1 import events_pb2
from baton.errors import ConfigError
from baton.hashing import HASH_SCHEME
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Epoch, InstanceId, Role
from baton_router.bench.trace import BLOCK_TOKENS
from baton_router.indexer.event_applier import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance, InstanceInfo, Status

_EPOCH = Epoch(b"replay".ljust(16))


@dataclass(frozen=True)
class Hardware:
    """How fast simulated instances are.

    Attributes:
        prefill_tokens_per_s: Prompt tokens that a prefill instance computes.
        local_prefill_tokens_per_s: Prompt tokens that a decode instance computes beside its other work.
        gb_per_s: What a pair's pipe carries.
        kv_bytes_per_token: What it has to.
        itl_ms: Between two tokens of a sequence that runs alone.
        itl_per_sequence_ms: What each other sequence on the instance adds.
        cache_blocks: Blocks of 512 tokens that an instance keeps; 0: all.

    Raises:
        ConfigError: A number is out of range; names the field.
    """

    prefill_tokens_per_s: float = 8000.0
    local_prefill_tokens_per_s: float = 6000.0
    gb_per_s: float = 12.5
    kv_bytes_per_token: int = 131_072
    itl_ms: float = 15.0
    itl_per_sequence_ms: float = 0.3
    cache_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "local_prefill_tokens_per_s", "gb_per_s", "kv_bytes_per_token", "itl_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}", field=name)
        for name in ("itl_per_sequence_ms", "cache_blocks"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}", field=name)

    def prefill_s(self, role: Role, tokens: int) -> float:
        """Return how long an instance computes."""
        speed = self.prefill_tokens_per_s if role is Role.PREFILL else self.local_prefill_tokens_per_s
        return 0.004 + tokens / speed

    def transfer_s(self, tokens: int) -> float:
        """Return how long the KV of so many tokens travels."""
        return 0.001 + tokens * self.kv_bytes_per_token / (1e9 * self.gb_per_s)


class _NoChannel:
    """Leads nowhere: simulated instances are never called."""

    def _no_method(self, *_: object, **__: object) -> None:
        return None

    unary_unary = unary_stream = stream_stream = _no_method


class SimulatedInstance:
    """One instance: a queue of prompts, served one after the other, and a cache that forgets the least recently used.

    Args:
        name: Its name and address.
        role: Prefill or decode.
        index: Where its events go.
        now: Virtual time, in seconds.
        hardware: How fast it is.
    """

    def __init__(self, name: str, role: Role, index: PrefixIndex, now: Callable[[], float], hardware: Hardware) -> None:
        self.role = role
        self.hardware = hardware
        self.queue: deque[Any] = deque()
        self.decoding = 0
        self.num_requests = 0
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self._cache: OrderedDict[BlockHash, None] = OrderedDict()
        self._sequence = 0
        events = EventApplier(index, now=now)
        self.instance = Instance(name, role, cast(grpc.aio.Channel, _NoChannel()), events)
        self.instance.load.now = now
        self.instance.info = _info(name, role, hardware)
        self.instance.status = Status.READY
        self._send([], [], snapshot=True)

    def held(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks it has."""
        cache = self._cache
        return next((at for at, item in enumerate(hashes) if item not in cache), len(hashes))

    def store(self, hashes: Sequence[BlockHash]) -> None:
        """Keep blocks, forget others if there are too many, and tell the router."""
        cache, new = self._cache, []
        for item in hashes:
            if item in cache:
                cache.move_to_end(item)
            else:
                cache[item] = None
                new.append(item)
        gone = []
        while self.hardware.cache_blocks and len(cache) > self.hardware.cache_blocks:
            gone.append(cache.popitem(last=False)[0])
        self._send(new, gone)

    def _send(self, new: Sequence[BlockHash], gone: Sequence[BlockHash], *, snapshot: bool = False) -> None:
        batch = events_pb2.KvEventBatch(epoch=_EPOCH, sequence=self._sequence + 1, snapshot=snapshot)
        if new:
            batch.events.add(stored=events_pb2.KvBlocksStored(block_hashes=new, tier="device"))
        if gone:
            batch.events.add(removed=events_pb2.KvBlocksRemoved(block_hashes=gone, tier="device"))
        if batch.events or snapshot:
            self._sequence += 1
            self.instance.events.apply(batch)


def _info(name: str, role: Role, hardware: Hardware) -> InstanceInfo:
    fingerprint = Fingerprint(
        model="replay",
        model_digest="0" * 64,
        kv_dtype="bfloat16",
        block_size=BLOCK_TOKENS,
        layer_shapes=(),
        block_bytes=BLOCK_TOKENS * hardware.kv_bytes_per_token,
        hash_scheme=HASH_SCHEME,
    )
    return InstanceInfo(
        instance_id=InstanceId(name),
        role=role,
        epoch=_EPOCH,
        fingerprint=fingerprint,
        num_blocks=2**31,
        max_model_len=2**31,
        model_name="replay",
        model_path="",
        vocab_size=2**32,
        eos_token_ids=frozenset(),
    )
