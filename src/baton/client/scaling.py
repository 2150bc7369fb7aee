"""Changes the ratio of prefill and decode instances while requests run, by switching roles.

The router sends a drained instance no new requests. Its running requests end or continue elsewhere, and it keeps its
caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.client.types import Instance
from baton.errors import BatonError, BusyError, ConfigError, UnavailableError
from baton.types import Role

_POLL_S = 0.1
_VISIBLE_S = 30.0
"""Seconds until the router must report the new role."""
OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of an instance's role.

    Attributes:
        instance: Identifier of the instance.
        before: The old role.
        after: The new role.
    """

    instance: str
    before: Role
    after: Role


class Fleet(Protocol):
    """The methods of a client that :func:`switch_role` needs."""

    async def list_instances(self) -> list[Instance]:
        """Return all instances that the router knows."""

    async def drain(self, instance: str, *, wait: float = ..., migrate: bool = ...) -> int:
        """Stop new requests to an instance, and wait for its running ones."""

    async def set_role(self, instance: str, role: Role) -> None:
        """Change the role of an idle instance."""


def plan_switches(instances: Sequence[Instance], targets: dict[Role, int]) -> list[Switch]:
    """Choose the instances that change their role: the least busy ones of the role with too many.

    Args:
        instances: All instances that the router knows.
        targets: Number of instances per role; a missing role gets the remaining instances.

    Raises:
        ConfigError: The numbers do not add up to the number of instances, or no decode instance would remain.
    """
    usable = [each for each in instances if each.role in OTHER_ROLE and each.healthy and not each.refused]
    counts = {role: sum(each.role is role for each in usable) for role in OTHER_ROLE}
    wanted = {role: targets.get(role, len(usable) - targets.get(OTHER_ROLE[role], 0)) for role in OTHER_ROLE}
    if sum(wanted.values()) != len(usable) or min(wanted.values()) < 0:
        there = f"{counts[Role.PREFILL]} prefill and {counts[Role.DECODE]} decode instances"
        asked = " and ".join(f"{role}={number}" for role, number in targets.items())
        raise ConfigError(f"there are {there}, {len(usable)} in all, which {asked} is not", field="targets")
    if wanted[Role.DECODE] < 1:
        raise ConfigError("at least one decode instance must stay", field="targets")
    surplus = next((role for role in OTHER_ROLE if counts[role] > wanted[role]), None)
    if surplus is None:
        return []
    candidates = least_busy([each for each in usable if each.role is surplus])
    chosen = candidates[: counts[surplus] - wanted[surplus]]
    return [Switch(each.instance_id, surplus, OTHER_ROLE[surplus]) for each in chosen]


def least_busy(instances: Sequence[Instance]) -> list[Instance]:
    """Return instances in order of their work, the least busy first."""
    return sorted(instances, key=_work)


def _work(instance: Instance) -> tuple[int, int, str]:
    load = instance.load
    return (instance.in_flight + load.num_running + load.num_waiting, load.blocks_active, instance.instance_id)


async def switch_role(client: Fleet, switch: Switch, wait_s: float) -> None:
    """Change the role of an instance, and wait until the router sends it requests again.

    Args:
        client: Client of the router.
        switch: The change.
        wait_s: Seconds for the instance's requests to end before they continue elsewhere, and again for blocks that
            other instances still read.

    Raises:
        BusyError: The instance did not become idle; it takes requests in its old role again.
        BatonError: The router or the instance does not answer.
    """
    try:
        await client.drain(switch.instance, wait=wait_s, migrate=True)
        deadline = time.monotonic() + max(wait_s, 1.0)
        while True:
            try:
                await client.set_role(switch.instance, switch.after)
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)
    except (BatonError, asyncio.CancelledError):
        with contextlib.suppress(BatonError):  # out of reach: the first error says more
            await client.set_role(switch.instance, switch.before)
        raise
    await _wait_until(client, switch, lambda x: x.role is switch.after and x.healthy and not x.load.draining)


async def _wait_until(client: Fleet, switch: Switch, condition: Callable[[Instance], bool]) -> None:
    deadline = time.monotonic() + _VISIBLE_S
    while time.monotonic() < deadline:
        if any(x.instance_id == switch.instance and condition(x) for x in await client.list_instances()):
            return
        await asyncio.sleep(_POLL_S)
    raise UnavailableError(f"the router does not see {switch.instance} as a {switch.after} instance")
