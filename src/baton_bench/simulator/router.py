"""The router of ``baton plan``: placement, index, policy and admission as they are, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc.aio
import numpy as np
from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2, events_pb2
from baton.hashing import HASH_SCHEME, block_hashes, root_hash
from baton.kv_cache.fingerprint import Fingerprint
from baton.rpc.http2.message_stream import Dialer
from baton.types import BlockHash, Epoch, InstanceId, PrefillPath, Role
from baton_bench.traces import BLOCK_TOKENS, TraceRequest
from baton_router.admission.estimates import Room
from baton_router.indexer.event_applier import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance, InstanceInfo, Status
from baton_router.scheduler.metrics import SchedulerMetrics
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer
from baton_router.scheduler.policies import PolicyContext, make_policy
from baton_router.scheduler.speeds import Speeds


@dataclass(frozen=True, slots=True)
class Fleet:
    """What there is to choose from.

    Attributes:
        prefills: Prefill instances.
        decodes: Decode instances.
        kv_bytes_per_token: All layers.
        max_num_seqs: Sequences that an instance batches.
        policy: Name of the router's policy.
        threshold: ``--remote-prefill-threshold`` of the router; ``None``: the policy says who computes a prompt.
        seed: Of its choices.
    """

    prefills: int
    decodes: int
    kv_bytes_per_token: float
    max_num_seqs: int = 64
    policy: str = "match_minus_load"
    threshold: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        decode: Number of the decode instance.
        prefill: Number of the prefill instance; ``None``: the decode instance computes the prompt.
        threshold: Missing prompt tokens from which prefill is asked; ``None``: the decode instance's own threshold.
        ticket: The router's own note of it.
    """

    decode: int
    prefill: int | None
    threshold: int | None = None
    ticket: Any = None


@dataclass(frozen=True, slots=True)
class Served:
    """What instances say of a request with its first token, from which routers learn.

    Attributes:
        remote: Whether a prefill instance computed the prompt.
        computed: Prompt tokens computed.
        cached: Prompt tokens that the computing instance had.
        moved: Prompt tokens whose KV travelled.
        exposed_s: Seconds that this took after the computation.
        ttft_s: Since its arrival.
    """

    remote: bool
    computed: int
    cached: int
    moved: int
    exposed_s: float
    ttft_s: float


class Routing(Protocol):
    """A router on virtual time."""

    def place(self, request: TraceRequest) -> Route | None:
        """Choose instances and reserve a share of them; ``None``: none has room."""

    def changed(self, role: Role, number: int, new: Sequence[int], gone: Sequence[int]) -> None:
        """An instance's prefix cache has changed: names of blocks of 512 tokens."""

    def first_token(self, route: Route, served: Served) -> None:
        """A request has its first token."""

    def finished(self, route: Route, tokens: int) -> None:
        """A request has ended, with so many tokens."""


MakeRouting = Callable[[Fleet, Callable[[], float]], Routing]
"""Makes a router for a fleet; the second argument returns the virtual time in seconds."""

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


class VirtualRouter:
    """A router over instances that are simulated; implements :class:`baton_bench.simulator.simulation.Routing`.

    Args:
        fleet: The instances, and the policy.
        now: Virtual time, in seconds.

    Raises:
        ConfigError: There is no such policy.
    """

    def __init__(self, fleet: Fleet, now: Callable[[], float]) -> None:
        self.index = PrefixIndex()
        self._fleet = fleet
        self._speeds = Speeds(now)
        counts = {Role.PREFILL: fleet.prefills, Role.DECODE: fleet.decodes}
        self._members = {
            role: [
                VirtualInstance(
                    f"{role.value[0]}{number}", role, self.index, now, fleet.kv_bytes_per_token, fleet.max_num_seqs
                )
                for number in range(count)
            ]
            for role, count in counts.items()
        }
        self._instances = {role: [each.instance for each in members] for role, members in self._members.items()}
        self._numbers = {
            each.address: number for members in self._instances.values() for number, each in enumerate(members)
        }
        context = PolicyContext(rng=random.Random(fleet.seed), speeds=self._speeds)
        self._placer = Placer(
            self,
            make_policy(fleet.policy, context),
            SchedulerMetrics(CollectorRegistry()),
            max_prefills=1,
            threshold=fleet.threshold,
            speeds=self._speeds,
            seed=fleet.seed,
        )
        self._room = Room(self, self._speeds, None, None, now)
        info = self._instances[Role.DECODE][0].info
        assert info is not None
        self._root = root_hash(info.content_key)
        self._hashes: dict[int, BlockHash] = {}

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role, all of them."""
        return self._instances[role]

    def place(self, request: TraceRequest) -> Route | None:
        """Choose instances and reserve a share of them; ``None``: requests wait in the router for now."""
        # A block's name stands for all of its tokens, as far as the prompt goes.
        tokens = np.repeat(np.array(request.blocks, dtype="<u4"), BLOCK_TOKENS)[: request.input_tokens]
        if not self._room.take(1, request.input_tokens):
            return None
        ask = PlacementRequest(tokens, session=request.session, max_tokens=request.output_tokens)
        placement = self._placer.place(ask)
        if placement is None:
            self._room.give_back(1, request.input_tokens)
            return None
        for name, item in zip(request.blocks, block_hashes(tokens, BLOCK_TOKENS, self._root), strict=False):
            self._hashes[name] = item
        decision = placement.decision
        local = decision.path in (PrefillPath.LOCAL, PrefillPath.STORE) or not decision.prefill_addresses
        prefill = None if local else self._numbers[decision.prefill_addresses[0]]
        decode = self._numbers[placement.decode.address]
        return Route(decode, prefill, placement.remote_threshold, (placement, request))

    def changed(self, role: Role, number: int, new: Sequence[int], gone: Sequence[int]) -> None:
        """Take an instance's KV events."""
        hashes = self._hashes
        self._members[role][number].send([hashes[name] for name in new], [hashes[name] for name in gone])

    def first_token(self, route: Route, served: Served) -> None:
        """Give the prompt's shares back, and keep what instances say for the speeds."""
        placement, request = self._ticket(route)
        placement.trace = self._trace(placement, request, route, served)
        placement.grow(1)
        placement.prefilled()
        self._room.give_back(0, request.input_tokens)

    def finished(self, route: Route, tokens: int) -> None:
        """Give everything back."""
        placement, _ = self._ticket(route)
        if tokens > 1:
            placement.grow(tokens - 1)
        placement.release()
        self._room.give_back(1, 0)

    @staticmethod
    def _ticket(route: Route) -> tuple[Placement, TraceRequest]:
        placement, request = route.ticket
        return placement, request

    def _trace(
        self, placement: Placement, request: TraceRequest, route: Route, served: Served
    ) -> common_pb2.RequestTrace:
        path = common_pb2.PREFILL_PATH_REMOTE if served.remote else common_pb2.PREFILL_PATH_LOCAL
        return common_pb2.RequestTrace(
            path=path,
            prefill_instance=placement.prefill[0].instance_id if served.remote else "",
            decode_instance=placement.decode.instance_id,
            prompt_tokens=request.input_tokens,
            cached_tokens=0 if served.remote else served.cached,
            prefill_cached_tokens=served.cached if served.remote else 0,
            recomputed_tokens=0 if served.remote else served.computed,
            transferred_tokens=served.moved,
            kv_bytes=round(served.moved * self._fleet.kv_bytes_per_token),
            exposed_us=round(1e6 * served.exposed_s),
            ttft_us=round(1e6 * served.ttft_s),
        )
