"""Another ratio of prefill and decode instances, while requests run.

Instances change their role: the router sends a drained instance nothing new, what runs on it ends or goes on elsewhere,
and its caches stay.
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
_SEEN_S = 30.0
OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Switch:
    """An instance that changes its role."""

    instance: str
    before: Role
    after: Role


class Fleet(Protocol):
    """What is asked of a client here."""

    async def list_instances(self) -> list[Instance]:
        """Return every instance that the router knows."""

    async def drain(self, instance: str, *, wait: float = ..., migrate: bool = ...) -> int:
        """Have an instance take no new requests."""

    async def set_role(self, instance: str, role: Role) -> None:
        """Make an idle instance one of another role."""


def plan_switches(instances: Sequence[Instance], targets: dict[Role, int]) -> list[Switch]:
    """Choose the instances that change their role: of those that are too many, the least busy.

    Args:
        instances: All that the router knows.
        targets: How many are wanted of each role; a role that is not named gets what is left.

    Raises:
        ConfigError: They do not add up to what there is, or no decode instance would be left.
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
    """Return instances in order, those with the least to do first."""
    return sorted(instances, key=_busy)


def _busy(instance: Instance) -> tuple[int, int, str]:
    load = instance.load
    return (instance.in_flight + load.num_running + load.num_waiting, load.blocks_active, instance.instance_id)


async def switch(client: Fleet, each: Switch, wait_s: float) -> None:
    """Change the role of an instance, and wait until the router sends it requests again.

    Args:
        client: Of the router.
        each: What to change.
        wait_s: Seconds in which its requests may end, before they go on elsewhere; then as many again for blocks that
            others still read.

    Raises:
        BusyError: It did not become idle; it takes requests in its old role again.
        BatonError: Somebody does not answer.
    """
    try:
        await client.drain(each.instance, wait=wait_s, migrate=True)
        deadline = time.monotonic() + max(wait_s, 1.0)
        while True:
            try:
                await client.set_role(each.instance, each.after)
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)
    except (BatonError, asyncio.CancelledError):
        with contextlib.suppress(BatonError):  # it is out of reach: the first error says more
            await client.set_role(each.instance, each.before)
        raise
    await _until(client, each, lambda x: x.role is each.after and x.healthy and not x.load.draining)


async def _until(client: Fleet, each: Switch, condition: Callable[[Instance], bool]) -> None:
    deadline = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline:
        if any(x.instance_id == each.instance and condition(x) for x in await client.list_instances()):
            return
        await asyncio.sleep(_POLL_S)
    raise UnavailableError(f"the router does not see {each.instance} as a {each.after} instance")
