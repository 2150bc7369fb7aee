"""An instance as the router sees it, without a process behind it: books of its load, and KV events on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import grpc.aio

from baton.api.v1 import events_pb2
from baton.bench.core.traces import BLOCK_TOKENS
from baton.hashing import HASH_SCHEME
from baton.kv_cache.fingerprint import Fingerprint
from baton.rpc.http2.message_stream import Dialer
from baton.types import BlockHash, Epoch, InstanceId, Role
from baton_router.indexer.event_applier import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance, InstanceInfo, Status

_EPOCH = Epoch(b"replay".ljust(16))


class _NoChannel:
    """Leads nowhere: simulated instances are never called."""

    def _no_method(self, *_: object, **__: object) -> None:
        return None

    unary_unary = unary_stream = stream_stream = _no_method


class VirtualInstance:
    """One instance.

    Args:
        name: Its name and address.
        role: Prefill or decode.
        index: Where its events go.
        now: Virtual time, in seconds.
        kv_bytes_per_token: All layers.
        max_num_seqs: Sequences that it batches; 0: it does not say.

    Attributes:
        instance: What the router has of it.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        index: PrefixIndex,
        now: Callable[[], float],
        kv_bytes_per_token: float,
        max_num_seqs: int = 0,
    ) -> None:
        self.role = role
        self._sequence = 0
        events = EventApplier(index, now=now)
        self.instance = Instance(name, role, cast(grpc.aio.Channel, _NoChannel()), Dialer(name), events)
        self.instance.load.now = now
        self.instance.info = _info(name, role, kv_bytes_per_token, max_num_seqs)
        self.instance.status = Status.READY
        self.send([], [], snapshot=True)

    def send(self, new: Sequence[BlockHash], gone: Sequence[BlockHash], *, snapshot: bool = False) -> None:
        """Tell the router of blocks that came and of blocks that went."""
        batch = events_pb2.KvEventBatch(epoch=_EPOCH, sequence=self._sequence + 1, snapshot=snapshot)
        if new:
            batch.events.add(stored=events_pb2.KvBlocksStored(block_hashes=new, tier="device"))
        if gone:
            batch.events.add(removed=events_pb2.KvBlocksRemoved(block_hashes=gone, tier="device"))
        if batch.events or snapshot:
            self._sequence += 1
            self.instance.events.apply(batch)


def _info(name: str, role: Role, kv_bytes_per_token: float, max_num_seqs: int) -> InstanceInfo:
    fingerprint = Fingerprint(
        model="replay",
        model_digest="0" * 64,
        kv_dtype="bfloat16",
        block_size=BLOCK_TOKENS,
        layer_shapes=(),
        block_bytes=int(BLOCK_TOKENS * kv_bytes_per_token),
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
        max_num_seqs=max_num_seqs,
    )
