"""Several nodes as one store, without a coordinator: each client places segments by itself.

A segment goes to its ``replication`` best nodes; :mod:`store_load` finds it there again. One that was found elsewhere
than where it should be is copied to where it should be, and one that is loaded often to further nodes; see
:mod:`store_copies`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from baton.errors import BatonError, UnavailableError
from baton.kv_transfer.blocks import BlockSource
from baton.kv_transfer.connector.background import run_all
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.connector.store.cluster_load import ClusterLoad, Copies, Heat, Placed
from baton.kv_transfer.connector.store.nodes import SEGMENT_BLOCKS, Membership, Node, Nodes, segments_of
from baton.types import BlockId


class StoreCluster:
    """A store of several nodes; see :class:`StoreBackend`.

    Args:
        membership: Says who they are.
        connect: Makes a client for an address.
        options: How patiently they are used.
        use: Where counts go.
        segment_blocks: Unit of placement, in blocks; the same at every client.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], StoreClient],
        options: StoreOptions,
        use: StoreUse,
        *,
        segment_blocks: int = SEGMENT_BLOCKS,
    ) -> None:
        self.options, self.use, self.segment_blocks = options, use, segment_blocks
        self.nodes = Nodes(
            connect,
            failures=options.failures,
            cooldown_s=options.cooldown_s,
            previous_s=options.previous_s,
            use=use,
        )
        self.copies, self.heat = Copies(use), Heat(options.hot_loads_per_s)
        self._membership = membership

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Let each block's owners pull it; see :meth:`StoreBackend.save`. A node that fails costs its copy, no more."""
        held = np.zeros(len(part), np.bool_)
        moved = 0
        for at, answer in await self._put(source, part, block_ids, generations, None, deadline=deadline):
            if not isinstance(answer, BatonError):
                held[at] |= answer[0]
                moved += answer[1]
        return int(held.sum()), moved

    async def save_computing(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        ready: int,
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Let owners pull blocks while they are computed; see :meth:`FollowingBackend.save_computing`."""
        held = np.ones(len(part), np.bool_)
        moved = 0
        for at, answer in await self._put(source, part, block_ids, generations, ready, deadline=deadline):
            held[at] &= False if isinstance(answer, BatonError) else answer[0]
            moved += 0 if isinstance(answer, BatonError) else answer[1]
        return int(held.sum()), moved

    async def _put(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        ready: int | None,
        *,
        deadline: float,
    ) -> list[tuple[list[int], tuple[list[bool], int] | BatonError]]:
        """Put blocks to all their owners; returns, per node, which of the part these were and what it answered."""
        await self._membership.start(self.nodes, deadline=deadline)
        hashes = part.wanted
        groups: dict[Node, list[int]] = {}
        for segment in segments_of(part, self.segment_blocks):
            for node in self.nodes.owners(segment.key, self.options.replication):
                groups.setdefault(node, []).extend(range(segment.start - part.start, segment.stop - part.start))
        if not groups:
            raise UnavailableError("no node of the KV store answers")

        async def put(node: Node, at: list[int]) -> tuple[list[bool], int]:
            names, ids, marks = [hashes[i] for i in at], [block_ids[i] for i in at], [generations[i] for i in at]
            tenant = part.tenant
            return await node.client.put(source, names, ids, marks, deadline=deadline, tenant=tenant, ready=ready)

        answers = await run_all(put(node, at) for node, at in groups.items())
        for node, answer in zip(groups, answers, strict=True):
            if isinstance(answer, BatonError):
                self.nodes.failed(node, answer)
            else:
                self.nodes.answered(node)
        return list(zip(groups.values(), answers, strict=True))

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix that the nodes hold; see :meth:`StoreBackend.load`."""
        await self._membership.start(self.nodes, deadline=deadline)
        placed = Placed(self.nodes, self.copies, self.heat, self.options, self.use, self.segment_blocks)
        await ClusterLoad(placed, part, block_ids, progress, deadline=deadline, cancelled=cancelled).run()

    async def close(self) -> None:
        """Close every connection."""
        await self._membership.close()
        await self.copies.close()
        await self.nodes.close()
