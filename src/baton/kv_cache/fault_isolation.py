"""A connector whose failures stay its own: what the engine calls, and what stands between several connectors."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

from baton.errors import InternalError
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, PlannedSave
from baton.types import BlockHash, BlockId, RequestId, Tenant

log = logging.getLogger(__name__)

_TRACE_EVERY_S = 10.0
"""A hook that fails is called again for the next layer or step: its trace once in so many seconds is enough."""


class GuardedConnector(KVConnector):
    """Calls another connector, and keeps what it raises from the engine; the contract is the base class's.

    A hook that raises is logged, and counts as one that did nothing or had nothing to say. ``plan_load`` and
    ``start_load`` alone raise, since their caller has to tell the request why nothing was loaded.

    Args:
        connector: Belongs to this object from now on.
    """

    def __init__(self, connector: KVConnector) -> None:
        self._connector = connector
        self._traced_at: dict[str, float] = {}
        self._ownerless: RequestId | None = None
        self.name = type(connector).__name__
        self.follows_all = connector.follows_all

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Hand on; see :meth:`SchedulerSide.plan_load`.

        Raises:
            Exception: Whatever the connector raised; InternalError if its answer is no plan.
        """
        plan: object = self._connector.plan_load(request, num_local_tokens)
        if plan is None or isinstance(plan, LoadPlan):
            return plan
        raise InternalError(f"{self.name} planned a load with a {type(plan).__name__}")

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Hand on; see :meth:`SchedulerSide.start_load`.

        Raises:
            Exception: Whatever the connector raised.
        """
        self._connector.start_load(request, num_local_tokens, block_ids)

    def cancel_load(self, request_id: RequestId) -> None:
        """Hand on. The load's update is waited for all the same: nobody else can tell when its last write has ended."""
        with self._guard("cancel_load"):
            self._connector.cancel_load(request_id)

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended; entries that are no updates are left out."""
        found: list[LoadUpdate] = []
        with self._guard("poll_loads"):
            found = [update for update in self._connector.poll_loads() if self._is(update, LoadUpdate, "poll_loads")]
        return found

    def request_finished(self, request_id: RequestId) -> bool:
        """Whether the blocks are to be kept; ``False`` where the connector could not say."""
        answer = False
        with self._guard("request_finished"):
            answer = bool(self._connector.request_finished(request_id))
        return answer

    def poll_releases(self) -> list[RequestId]:
        """Return requests that were let go; entries that are no names are left out."""
        found: list[RequestId] = []
        with self._guard("poll_releases"):
            found = [name for name in self._connector.poll_releases() if self._is(name, str, "poll_releases")]
        return found

    def has_pending(self) -> bool:
        """Whether something is outstanding; ``False`` where the connector could not say."""
        answer = False
        with self._guard("has_pending"):
            answer = bool(self._connector.has_pending())
        return answer

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        """Hand on."""
        with self._guard("step_begins"):
            self._connector.step_begins(saves)

    def layer_computed(self, layer: int) -> None:
        """Hand on."""
        try:  # not the guard: this is called for every layer of every step
            self._connector.layer_computed(layer)
        except Exception as error:
            self._note("layer_computed", error)

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        """Hand on; if that fails, what the next call is about is not saved: it would be as if it were nobody's."""
        self._ownerless = request_id
        with self._guard("blocks_belong"):
            self._connector.blocks_belong(request_id, tenant)
            self._ownerless = None

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Hand on."""
        ownerless, self._ownerless = self._ownerless, None
        if ownerless == request_id:
            return
        with self._guard("blocks_computed"):
            self._connector.blocks_computed(request_id, block_ids, hashes, num_tokens)

    def close(self) -> None:
        """Hand on."""
        with self._guard("close"):
            self._connector.close()

    @contextlib.contextmanager
    def _guard(self, hook: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(hook, error)

    def _note(self, hook: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._traced_at.get(hook, -_TRACE_EVERY_S) >= _TRACE_EVERY_S:
            self._traced_at[hook] = now
            log.error("%s of connector %s failed", hook, self.name, exc_info=error)

    def _is(self, item: object, kind: type, hook: str) -> bool:
        if isinstance(item, kind):
            return True
        log.error("%s of connector %s returned a %s", hook, self.name, type(item).__name__)
        return False
