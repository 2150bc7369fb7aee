"""Instances that went away without deregistering or draining: kept for some minutes, so that operators see them.

A lost instance gets no requests. It is forgotten when it comes back, when another one has taken its place, or after
:data:`KEEP_S`, which is longer than the alert on it waits (``BatonInstanceDown``, ``helm/baton/files/alerts.yaml``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from baton.types import InstanceId, Role
from baton_router.registry.instance import Instance

KEEP_S = 900.0
_MOST = 256


@dataclass(frozen=True, slots=True)
class LostInstance:
    """An instance that went away without deregistering or draining.

    Attributes:
        instance_id: Name of the instance.
        address: Address under which it was known.
        role: Role of the instance when it was lost.
        reason: Why it counts as lost.
        lost_at: When it was lost (monotonic, in seconds).
        num_ready: Ready instances of its role before it was lost, itself included.
    """

    instance_id: InstanceId
    address: str
    role: Role
    reason: str
    lost_at: float
    num_ready: int


class LostInstances:
    """The instances that were lost lately.

    Args:
        instances: Returns the known instances.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, instances: Callable[[], Collection[Instance]], now: Callable[[], float]) -> None:
        self._instances = instances
        self._now = now
        self._lost: dict[str, LostInstance] = {}

    def add(self, instance: Instance, reason: str) -> None:
        """Remember an instance that is not among the known ones any more."""
        num_ready = 1 + sum(x.role is instance.role and x.ready for x in self._instances())
        lost = LostInstance(instance.instance_id, instance.address, instance.role, reason, self._now(), num_ready)
        self._lost.pop(instance.address, None)
        self._lost[instance.address] = lost
        while len(self._lost) > _MOST:
            del self._lost[next(iter(self._lost))]

    def recent(self) -> list[LostInstance]:
        """Return the lost instances that are neither back nor replaced, the latest last."""
        if not self._lost:
            return []
        known = self._instances()
        back = {x.address for x in known} | {x.instance_id for x in known if x.info is not None}
        ready = {role: sum(x.role is role and x.ready for x in known) for role in Role}
        earliest = self._now() - KEEP_S
        self._lost = {
            address: x
            for address, x in self._lost.items()
            if x.lost_at > earliest
            and x.address not in back
            and x.instance_id not in back
            and ready[x.role] < x.num_ready
        }
        return list(self._lost.values())

    def ages(self) -> list[tuple[LostInstance, float]]:
        """Return :meth:`recent`, each with the seconds since it was lost."""
        return [(x, max(0.0, self._now() - x.lost_at)) for x in self.recent()]
