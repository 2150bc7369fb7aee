"""The router of ``baton plan``: placement, index, policy and admission as they are, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton.bench.core.traces import BLOCK_TOKENS, TraceRequest
from baton.hashing import block_hashes, root_hash
from baton.planner.simulator.routing import Fleet, Route, Served
from baton.types import BlockHash, PrefillPath, Role
from baton_router.admission.estimates import Room
from baton_router.bench.virtual_instance import VirtualInstance
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance
from baton_router.scheduler.metrics import SchedulerMetrics
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer
from baton_router.scheduler.policies import PolicyContext, make_policy
from baton_router.scheduler.speeds import Speeds


class VirtualRouter:
    """A router over instances that are simulated; implements :class:`baton.planner.simulator.routing.Routing`.

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
