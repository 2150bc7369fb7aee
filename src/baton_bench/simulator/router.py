"""The router's own code (placement, index, policies, admission, learnt speeds) over instances on virtual time."""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
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
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance, InstanceInfo, Status
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer, SchedulerMetrics
from baton_router.scheduler.policies import PolicyContext, make_policy
from baton_router.scheduler.policy import Policy
from baton_router.scheduler.speeds import Speeds

_EPOCH = Epoch(b"replay".ljust(16))
OnBlocksChanged = Callable[[Sequence[int], Sequence[int]], None]
"""Called with the names of the blocks that were stored and of those that were dropped."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The simulated instances and the router's settings.

    Attributes:
        prefills: Number of prefill instances; may be 0.
        decodes: Number of decode instances, at least 1.
        kv_bytes_per_token: KV bytes of a token over all layers.
        max_num_seqs: Sequences that an instance batches, which it tells the router; 0: it does not say.
        policy: Name of the placement policy.
        threshold: ``--remote-prefill-threshold`` of the router; ``None``: the policy decides who computes a prompt.
        seed: Seed of the policy's random choices and of the instances' names.
        beta: Weight of load for ``match_minus_load``.
        temperature: Softmax temperature of ``match_minus_load``; 0: the best score wins.
        max_inflight: Requests that a decode instance may have; 0: any number. ``None``: the router's admission control
            decides, as in production.
        whole_blocks: Whether the last block of a prompt counts as a full one.
        block_tokens: Tokens of a block that prompts can share.
    """

    prefills: int
    decodes: int
    kv_bytes_per_token: float
    max_num_seqs: int = 64
    policy: str = "match_minus_load"
    threshold: int | None = None
    seed: int = 0
    beta: float = 0.5
    temperature: float = 0.0
    max_inflight: int | None = None
    whole_blocks: bool = False
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        decode: Number of the decode instance.
        prefill: Number of the prefill instance; ``None``: the decode instance computes the prompt.
        threshold: Missing prompt tokens from which prefill is asked; ``None``: the decode instance's own threshold.
        ticket: The router's record of the request; only the router reads it.
    """

    decode: int
    prefill: int | None
    threshold: int | None = None
    ticket: Any = None


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What instances report with a request's first token; the router learns speeds from it.

    Attributes:
        remote: Whether a prefill instance computed the prompt.
        computed: Prompt tokens computed.
        cached: Prompt tokens that the computing instance had cached.
        moved: Prompt tokens whose KV was transferred.
        exposed_s: Seconds of the transfer after the computation had ended.
        ttft_s: Seconds from placement to the first token.
        queue_s: Seconds from placement until the decode instance admitted the request.
    """

    remote: bool
    computed: int
    cached: int
    moved: int
    exposed_s: float
    ttft_s: float
    queue_s: float = 0.0


class Routing(Protocol):
    """A router on virtual time."""

    def place(self, request: TraceRequest) -> Route | None:
        """Choose instances and reserve a share of them; ``None``: none has room."""

    def on_blocks_changed(self, role: Role, number: int, stored: Sequence[int], dropped: Sequence[int]) -> None:
        """Apply a change of an instance's prefix cache: names of blocks."""

    def on_first_token(self, route: Route, report: PrefillReport) -> None:
        """Return the prompt's share of its instances, and learn from the report."""

    def on_finished(self, route: Route, num_tokens: int) -> None:
        """Return everything that a request of ``num_tokens`` output tokens has reserved."""


MakePolicy = Callable[[Speeds], Policy]
MakeRouting = Callable[[Fleet, Callable[[], float]], Routing]
"""Makes a router for a fleet; the second argument returns the virtual time in seconds."""


class PrefixCache:
    """The KV pool of one instance, in tokens, with the named blocks that it keeps.

    Running sequences share the blocks of one name. Blocks that no sequence uses are kept while there is room for them;
    the least recently used are dropped first.

    Args:
        capacity: Tokens that the pool holds.
        on_change: Called after each change of the kept blocks.
        block_tokens: Tokens of a block.

    Attributes:
        used_tokens: Tokens of running sequences; shared blocks count once.
    """

    def __init__(self, capacity: float, on_change: OnBlocksChanged, block_tokens: int = BLOCK_TOKENS) -> None:
        self.capacity = capacity
        self._block_tokens = block_tokens
        self.used_tokens = 0.0
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._on_change = on_change

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def free_tokens(self) -> float:
        """Tokens that sequences can still take."""
        return self.capacity - self.used_tokens

    def match_prefix(self, names: Sequence[int]) -> int:
        """Return how many leading blocks are kept."""
        kept = self._kept
        return next((at for at, name in enumerate(names) if name not in kept), len(names))

    def unused_tokens(self, names: Sequence[int]) -> int:
        """Return the tokens of those blocks that no sequence uses: what acquiring them takes of the free ones."""
        return self._block_tokens * sum(name not in self._users for name in names)

    def acquire(self, names: Sequence[int]) -> None:
        """Count a sequence as a user of blocks."""
        users = self._users
        for name in names:
            count = users.get(name, 0)
            users[name] = count + 1
            if not count:
                self.used_tokens += self._block_tokens

    def release(self, names: Sequence[int]) -> None:
        """Count a sequence as a user of blocks no more."""
        users = self._users
        for name in names:
            if users[name] == 1:
                del users[name]
                self.used_tokens -= self._block_tokens
            else:
                users[name] -= 1

    def store(self, names: Sequence[int]) -> None:
        """Keep blocks that were computed or received; drop others if there are too many."""
        kept = self._kept
        stored = []
        for name in names:
            if name in kept:
                kept.move_to_end(name)
            else:
                kept[name] = None
                stored.append(name)
        dropped = []
        if math.isfinite(self.capacity):
            private = self.used_tokens - self._block_tokens * len(self._users)
            room = max(len(self._users), int((self.capacity - private) // self._block_tokens))
            while len(kept) > room:
                dropped.append(kept.popitem(last=False)[0])
        if stored or dropped:
            self._on_change(stored, dropped)


class _NoChannel:
    """Leads nowhere: simulated instances are never called."""

    def _no_method(self, *_: object, **__: object) -> None:
        return None

    unary_unary = unary_stream = stream_stream = _no_method


class VirtualInstance:
    """One instance as the router sees it, without a process: load accounting, and KV events on virtual time.

    Args:
        name: Name and address of the instance.
        role: Prefill or decode.
        index: Prefix index that its events are applied to.
        now: Returns the virtual time in seconds.
        fleet: The fleet that it belongs to.

    Attributes:
        instance: The router's record of it.
    """

    def __init__(self, name: str, role: Role, index: PrefixIndex, now: Callable[[], float], fleet: Fleet) -> None:
        self._sequence = 0
        events = EventApplier(index, now=now)
        self.instance = Instance(name, role, cast(grpc.aio.Channel, _NoChannel()), Dialer(name), events)
        self.instance.load.now = now
        self.instance.info = _info(name, role, fleet)
        self.instance.status = Status.READY
        if role is Role.DECODE and fleet.max_inflight:
            self.instance.load.limit = fleet.max_inflight
        self._apply(events_pb2.KvEventBatch(snapshot=True))

    def send_events(self, stored: Sequence[BlockHash], dropped: Sequence[BlockHash]) -> None:
        """Report blocks that were stored and blocks that were dropped."""
        batch = events_pb2.KvEventBatch()
        if stored:
            batch.events.add(stored=events_pb2.KvBlocksStored(block_hashes=stored, tier="device"))
        if dropped:
            batch.events.add(removed=events_pb2.KvBlocksRemoved(block_hashes=dropped, tier="device"))
        self._apply(batch)

    def _apply(self, batch: events_pb2.KvEventBatch) -> None:
        self._sequence += 1
        batch.epoch = _EPOCH
        batch.sequence = self._sequence
        self.instance.events.apply(batch)


def _info(name: str, role: Role, fleet: Fleet) -> InstanceInfo:
    fingerprint = Fingerprint(
        model="replay",
        model_digest="0" * 64,
        kv_dtype="bfloat16",
        block_size=fleet.block_tokens,
        layer_shapes=(),
        block_bytes=int(fleet.block_tokens * fleet.kv_bytes_per_token),
        hash_scheme=HASH_SCHEME,
    )
    return InstanceInfo(
        instance_id=InstanceId(name),
        role=role,
        epoch=_EPOCH,
        fingerprint=fingerprint,
        num_blocks=2**31,
        max_model_len=2**31,
        model_names=("replay",),
        model_path="",
        vocab_size=2**32,
        eos_token_ids=frozenset(),
        max_num_seqs=fleet.max_num_seqs,
    )


class VirtualRouter:
    """The router's placement over simulated instances; implements :class:`Routing`.

    Args:
        fleet: The instances and the router's settings.
        now: Returns the virtual time in seconds.
        make: Makes a policy from the learnt speeds, to be used instead of the fleet's.

    Attributes:
        instances: The router's records of the instances, by role.
        index: Prefix index of all instances.
        decision_us: Processor time of each placement in microseconds.

    Raises:
        ConfigError: The policy is unknown.
    """

    def __init__(self, fleet: Fleet, now: Callable[[], float], make: MakePolicy | None = None) -> None:
        self.index = PrefixIndex()
        self.decision_us: list[float] = []
        self._fleet = fleet
        self._speeds = Speeds(now)
        names = f"-{fleet.seed}" if fleet.seed else ""  # as in deployments they differ: policies hash them
        self._virtual = {
            role: [
                VirtualInstance(f"{role.value[0]}{number}{names}", role, self.index, now, fleet)
                for number in range(count)
            ]
            for role, count in ((Role.PREFILL, fleet.prefills), (Role.DECODE, fleet.decodes))
        }
        self.instances = {role: [each.instance for each in members] for role, members in self._virtual.items()}
        self._numbers = {
            each.address: number for members in self.instances.values() for number, each in enumerate(members)
        }
        if make is not None:
            policy = make(self._speeds)
        else:
            context = PolicyContext(
                beta=fleet.beta, temperature=fleet.temperature, rng=random.Random(fleet.seed), speeds=self._speeds
            )
            policy = make_policy(fleet.policy, context)
        self._placer = Placer(
            self,
            policy,
            SchedulerMetrics(CollectorRegistry()),
            max_prefills=1,
            threshold=fleet.threshold,
            speeds=self._speeds,
            seed=fleet.seed,
        )
        self._room = Room(self, self._speeds, None, None, now) if fleet.max_inflight is None else None
        info = self.instances[Role.DECODE][0].info
        if info is None:
            raise AssertionError("a simulated instance has no info")
        self._root = root_hash(info.content_key)
        self._hashes: dict[int, BlockHash] = {}

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role, all of them."""
        return self.instances[role]

    def place(self, request: TraceRequest) -> Route | None:
        """Choose instances and reserve a share of them; ``None``: requests wait in the router for now."""
        # A block's name stands for all of its tokens.
        size = self._fleet.block_tokens
        tokens = np.repeat(np.array(request.blocks, dtype="<u4"), size)
        if not self._fleet.whole_blocks:
            tokens = tokens[: request.input_tokens]
        if self._room is not None and not self._room.acquire(1, request.input_tokens):
            return None
        placement_request = PlacementRequest(tokens, session=request.session, max_tokens=request.output_tokens)
        began = time.thread_time()
        placement = self._placer.place(placement_request)
        if placement is None:
            if self._room is not None:
                self._room.release(1, request.input_tokens)
            return None
        self.decision_us.append(1e6 * (time.thread_time() - began))
        for name, block_hash in zip(request.blocks, block_hashes(tokens, size, self._root), strict=False):
            self._hashes[name] = block_hash
        decision = placement.decision
        local = decision.path in (PrefillPath.LOCAL, PrefillPath.STORE) or not decision.prefill_addresses
        prefill = None if local else self._numbers[decision.prefill_addresses[0]]
        decode = self._numbers[placement.decode.address]
        return Route(decode, prefill, placement.remote_threshold, (placement, request))

    def on_blocks_changed(self, role: Role, number: int, stored: Sequence[int], dropped: Sequence[int]) -> None:
        hashes = self._hashes
        self._virtual[role][number].send_events([hashes[name] for name in stored], [hashes[name] for name in dropped])

    def on_first_token(self, route: Route, report: PrefillReport) -> None:
        placement, request = self._ticket(route)
        placement.trace = self._trace(placement, request, report)
        placement.grow(1)
        placement.prefilled()
        if self._room is not None:
            self._room.release(0, request.input_tokens)

    def on_finished(self, route: Route, num_tokens: int) -> None:
        placement, _ = self._ticket(route)
        if num_tokens > 1:
            placement.grow(num_tokens - 1)
        self._release(placement)

    def on_given_up(self, route: Route) -> None:
        """Return everything that a request has reserved which was never computed."""
        placement, _ = self._ticket(route)
        self._release(placement)

    def _release(self, placement: Placement) -> None:
        placement.release()
        if self._room is not None:
            self._room.release(1, 0)

    @staticmethod
    def _ticket(route: Route) -> tuple[Placement, TraceRequest]:
        placement, request = route.ticket
        return placement, request

    def _trace(self, placement: Placement, request: TraceRequest, report: PrefillReport) -> common_pb2.RequestTrace:
        path = common_pb2.PREFILL_PATH_REMOTE if report.remote else common_pb2.PREFILL_PATH_LOCAL
        return common_pb2.RequestTrace(
            path=path,
            prefill_instance=placement.prefill[0].instance_id if report.remote else "",
            decode_instance=placement.decode.instance_id,
            prompt_tokens=request.input_tokens,
            cached_tokens=0 if report.remote else report.cached,
            prefill_cached_tokens=report.cached if report.remote else 0,
            recomputed_tokens=0 if report.remote else report.computed,
            transferred_tokens=report.moved,
            kv_bytes=round(report.moved * self._fleet.kv_bytes_per_token),
            exposed_us=round(1e6 * report.exposed_s),
            ttft_us=round(1e6 * report.ttft_s),
            queue_us=round(1e6 * report.queue_s),
        )
