"""Several connectors as one: the first that has something loads, the next goes on where it fell short; all save."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import ConfigError, UnavailableError
from baton.kv_cache.connector import (
    GuardedConnector,
    KVConnector,
    LoadPlan,
    LoadRequest,
    LoadUpdate,
    PlannedSave,
    TransferStats,
)
from baton.types import BlockHash, BlockId, PrefillPath, RequestId, Tenant

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Chain:
    """A load that may go through several connectors; ``active`` is the one at work."""

    request: LoadRequest
    block_ids: Sequence[BlockId]
    active: int = -1
    cancelled: bool = False
    parts: list[TransferStats] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Connectors that could not even start."""


class MultiConnector(KVConnector):
    """Loads from its connectors in order, saves with all of them.

    A load starts at the first connector that plans one. If its update falls short, the next connector that then plans
    one goes on from the tokens that are valid, and so on; the engine sees one update, at the end. A request's blocks
    are given back when every connector that wanted them kept has let them go. One that raises is passed over, and the
    others go on; a load that it has begun stays its own, since only it can tell when its last write has ended.

    Args:
        connectors: The connectors in the order in which they are asked; closed with this object.

    Raises:
        ConfigError: There are none.
    """

    def __init__(self, connectors: Sequence[KVConnector]) -> None:
        if not connectors:
            raise ConfigError("a multi connector needs at least one connector")
        self._connectors = tuple(GuardedConnector(connector) for connector in connectors)
        self.follows_all = any(connector.follows_all for connector in self._connectors)
        self._chains: dict[RequestId, _Chain] = {}
        self._holders: dict[RequestId, set[int]] = {}

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Plan the most that any connector hopes for, so that blocks for all of it are reserved."""
        plans = []
        for i, connector in enumerate(self._connectors):
            try:
                plan = connector.plan_load(request, num_local_tokens)
            except Exception:
                log.exception(
                    "connector %d (%s) could not plan request %s",
                    i,
                    connector.name,
                    request.request_id,
                    extra={"request_id": request.request_id},
                )
                continue
            if plan is not None:
                plans.append(plan)
        if not plans:
            return None
        return LoadPlan(max(plan.num_tokens for plan in plans), any(plan.with_first_token for plan in plans))

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Start with the first connector that plans something.

        Raises:
            UnavailableError: None does any more.
        """
        chain = _Chain(request, block_ids)
        if not self._start_next(chain, num_local_tokens):
            raise UnavailableError("; ".join(chain.failures) or "no connector has anything to load")
        self._chains[request.request_id] = chain

    def cancel_load(self, request_id: RequestId) -> None:
        chain = self._chains.get(request_id)
        if chain is not None:
            chain.cancelled = True
            self._connectors[chain.active].cancel_load(request_id)

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended, and send those that fell short on to the next connector."""
        ended = []
        for i, connector in enumerate(self._connectors):
            for update in connector.poll_loads():
                chain = self._chains.get(update.request_id)
                if chain is None or chain.active != i:
                    log.error(
                        "an update of request %s came from a connector that does not load it",
                        update.request_id,
                        extra={"request_id": update.request_id},
                    )
                    continue
                chain.parts.append(update.stats)
                short = update.first_token is None and not chain.cancelled
                if short and self._start_next(chain, update.num_valid_tokens):
                    continue
                del self._chains[update.request_id]
                ended.append(dataclasses.replace(update, stats=_merged(chain)))
        return ended

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        for connector in self._connectors:
            connector.step_begins(saves)

    def layer_computed(self, layer: int) -> None:
        for connector in self._connectors:
            connector.layer_computed(layer)

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        for connector in self._connectors:
            connector.blocks_belong(request_id, tenant)

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        for connector in self._connectors:
            connector.blocks_computed(request_id, block_ids, hashes, num_tokens)

    def request_finished(self, request_id: RequestId) -> bool:
        """Keep the blocks if a connector wants that."""
        holders = {i for i, connector in enumerate(self._connectors) if connector.request_finished(request_id)}
        if holders:
            self._holders[request_id] = holders
        return bool(holders)

    def poll_releases(self) -> list[RequestId]:
        """Return the requests that no connector wants kept any more."""
        released = []
        for i, connector in enumerate(self._connectors):
            for request_id in connector.poll_releases():
                holders = self._holders.get(request_id, set())
                holders.discard(i)
                if not holders and self._holders.pop(request_id, None) is not None:
                    released.append(request_id)
        return released

    def has_pending(self) -> bool:
        return bool(self._chains or self._holders) or any(c.has_pending() for c in self._connectors)

    def close(self) -> None:
        """Close all; a load that is cancelled so is not sent on."""
        for chain in self._chains.values():
            chain.cancelled = True
        for connector in self._connectors:
            connector.close()

    def _start_next(self, chain: _Chain, num_valid_tokens: int) -> bool:
        """Start the next connector that plans something; ``False``: there is none, and ``active`` stays as it is."""
        request = chain.request
        for i in range(chain.active + 1, len(self._connectors)):
            try:
                plan = self._connectors[i].plan_load(request, num_valid_tokens)
                if plan is None or plan.num_tokens <= num_valid_tokens:
                    continue
                self._connectors[i].start_load(request, num_valid_tokens, chain.block_ids)
            except Exception as error:
                log.exception(
                    "connector %d could not load request %s",
                    i,
                    request.request_id,
                    extra={"request_id": request.request_id},
                )
                chain.failures.append(f"connector {i}: {error}")
                continue
            chain.active = i
            return True
        return False


def _merged(chain: _Chain) -> TransferStats:
    """Add a chain's parts up; path, source and pipe are those of the last part that brought something."""
    parts = chain.parts
    chosen = next((part for part in reversed(parts) if part.path is not PrefillPath.LOCAL), parts[-1])
    return dataclasses.replace(
        chosen,
        kv_bytes=sum(part.kv_bytes for part in parts),
        transfer_us=sum(part.transfer_us for part in parts),
        exposed_us=sum(part.exposed_us for part in parts),
        transferred_tokens=sum(part.transferred_tokens for part in parts),
        failures=tuple(failure for part in parts for failure in part.failures) + tuple(chain.failures),
        parts=tuple(load for part in parts for load in part.loads) if len(parts) > 1 else chosen.parts,
    )
