"""Faults: what they strike, for how long, and how they are undone."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.chaos.deployment import REDIS, Deployment

SHM = Path("/dev/shm")
BYTES = ("corrupt", "truncate", "duplicate")
"""Kinds that change what is sent: over connections with checksums alone, which KV has and gRPC leaves to TCP."""
NETWORK = ("cut", "freeze", "delay")
_BETWEEN_BYTES = 40_000
"""On average: less than a block."""
_BEGINNING_S = 2.5
LONG_S = 4.0
"""Faults that last longer do so whatever the requests do."""
DEATHS = ("kill", "stop", "descriptors", "memory", "shm")
"""Kinds after which a process does not serve, or not all, for a while at least."""
WEIGHTS = {
    "kill": 6, "stop": 5, "cut": 4, "freeze": 3, "delay": 3, "corrupt": 4, "truncate": 3, "duplicate": 3,
    "disk": 2, "shm": 1, "descriptors": 2, "memory": 2, "clock": 2,
}  # fmt: skip


@dataclass
class Fault:
    """One fault.

    Attributes:
        kind: A key of ``WEIGHTS``.
        target: A process (`` rank``: a rank of it that is not its leader), a proxy or a place.
        at: When: after this share of the seed's tokens.
        delay_s: Seconds after that, into what lies between two tokens.
        hold_s: How long it lasts.
        number: What else there is to draw, in [0, 1).
        struck: How often it did something: each process, connection or piece of bytes counts, each read of a clock.
    """

    kind: str
    target: str
    at: float
    delay_s: float
    hold_s: float
    number: float
    struck: int = 0

    def __str__(self) -> str:
        when = f"at {self.at:.2f}+{self.delay_s:.3f} s for {self.hold_s:.2f} s"
        return f"{self.kind} {self.target} {when}{'' if self.struck else ', in vain'}"

    @property
    def process(self) -> str:
        """The process that it strikes, or that it cuts off."""
        return self.target.split(" ")[0]

    @property
    def afterwards_s(self) -> float:
        """How long it outlasts the last request, at most: what is saved then is struck, too."""
        return self.hold_s if self.kind == "shm" or self.hold_s > LONG_S else 0.5

    @property
    def is_death(self) -> bool:
        """Whether the process did not serve for a while; one that is stopped for a moment is only slow."""
        return bool(self.struck) and self.kind in DEATHS and (self.kind != "stop" or self.hold_s > LONG_S)

    @classmethod
    def drawn(cls, rng: random.Random, deployment: Deployment, *, longest_s: float, only: Sequence[str] = ()) -> Fault:
        """Draw one that makes sense for a deployment."""
        barred = (() if deployment.private else ("disk", "shm")) + (
            () if deployment.shape.proxied and "shm" not in deployment.shape.pipes else BYTES
        )
        kinds = {kind: weight for kind, weight in WEIGHTS.items() if kind not in barred}
        if not deployment.shape.proxied:  # Redis alone has a network then
            kinds |= dict.fromkeys(NETWORK, 1)
        if only:
            kinds = {kind: weight for kind, weight in kinds.items() if kind in only}
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        names = deployment.names
        if kind in ("kill", "stop"):
            ranks = [f"{name} rank" for name in names if deployment.num_ranks(name) > 1]
            target = rng.choice([*names, *ranks, REDIS])
        elif kind in NETWORK:
            target = rng.choice(list(deployment.proxies))
        elif kind in BYTES:
            target = rng.choice([name for name in deployment.proxies if name.endswith(" kv")])
        elif kind == "disk":
            target = kind
        else:
            target = rng.choice(names)
        hold = math.exp(rng.uniform(math.log(0.1), math.log(LONG_S)))
        if kind == "stop" and rng.random() < 0.03:
            hold = rng.uniform(LONG_S, 60.0)
        if kind == "kill" and target != REDIS:  # the supervisor undoes it
            hold = 0.0
        at, delay = rng.random() * 0.9, rng.uniform(0.0, 0.05)
        if kind in BYTES:  # they wait for their bytes, and prompts go first
            at, delay, hold = 0.0, 0.0, max(hold, 2.0)
        elif kind == "delay":
            at /= 4
        elif kind == "shm":  # until its next life has begun
            hold = max(hold, _BEGINNING_S)
        return cls(kind, target, at, delay, min(hold, longest_s), rng.random())

    @contextlib.asynccontextmanager
    async def struck_at(self, deployment: Deployment) -> AsyncIterator[None]:
        """Strike, and undo it at the end of the block."""
        async with contextlib.AsyncExitStack() as stack:
            await _STRIKES.get(self.kind, _disturb)(self, deployment, stack)
            yield


async def _kill(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    if fault.target == REDIS:
        await deployment.redis.kill()
        stack.push_async_callback(deployment.redis.start)
    else:
        for pid in _pids(fault, deployment):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    fault.struck += 1


async def _stop(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    if fault.target == REDIS:
        deployment.redis.signal(signal.SIGSTOP)
        stack.callback(deployment.redis.signal, signal.SIGCONT)
    for pid in _pids(fault, deployment):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            stack.callback(_quietly, os.kill, pid, signal.SIGCONT)
    fault.struck += 1


def _pids(fault: Fault, deployment: Deployment) -> list[int]:
    if fault.target == REDIS:
        return []
    pid = deployment.pid(fault.process)
    if not fault.target.endswith(" rank"):
        return [pid]
    ranks = psutil.Process(pid).children() if psutil.pid_exists(pid) else []
    return [ranks[int(fault.number * len(ranks))].pid] if ranks else []


async def _cut(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    proxy = deployment.proxies[fault.target]
    if fault.number < 0.4:  # open connections alone
        proxy.reset()
    else:
        await proxy.cut()
        stack.push_async_callback(proxy.start)
    fault.struck += 1


async def _freeze(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    proxy = deployment.proxies[fault.target]
    proxy.freeze()
    stack.callback(proxy.thaw)
    fault.struck += 1


async def _disturb(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    """Delay every piece, or change some bytes now and then, wherever in the coming pieces."""
    proxy = deployment.proxies[fault.target]
    rng = random.Random(fault.number)
    longest_s = 10 ** (3 * fault.number - 2)  # from 10 ms to ten seconds: some outlast what is waited for
    left = int(rng.expovariate(1 / _BETWEEN_BYTES))

    async def disturb(data: bytes, to_target: bool) -> bytes:
        nonlocal left
        if fault.kind == "delay":
            fault.struck += 1
            await asyncio.sleep(rng.uniform(0.0, longest_s))
            return data
        if len(data) <= left:
            left -= len(data)
            return data
        fault.struck += 1
        before, part, after = data[:left], data[left : left + rng.choice((1, 7, 4096))], data[left:]
        left = int(rng.expovariate(1 / _BETWEEN_BYTES))
        if fault.kind == "corrupt":
            flip = rng.randrange(1, 256)
            return before + bytes(byte ^ flip for byte in part) + after[len(part) :]
        return before + part + after if fault.kind == "duplicate" else before + after[len(part) :]

    proxy.disturb = disturb  # with another one under way: this instead, and the first to end ends both
    stack.callback(setattr, proxy, "disturb", None)


async def _fill(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    ballast = (SHM if fault.kind == "shm" else deployment.disk.parent) / f"ballast-{fault.number}"
    stack.callback(ballast.unlink, missing_ok=True)
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            fault.struck += 1
    if fault.kind == "shm":  # its next life makes anew what is shared between processes
        await _kill(fault, deployment, stack)


async def _limit(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    """Give a process no more descriptors, or no more memory, than it has.

    What wants some in vain says so in the log, which is counted.
    """
    pid = deployment.pid(fault.process)
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if fault.kind == "descriptors":
            which, most = resource.RLIMIT_NOFILE, 4  # those that are open stay
        else:
            which, most = resource.RLIMIT_AS, 1 << 20  # what it has stays, and the heap's holes; nothing is mapped anew
        _, hard = resource.prlimit(pid, which)
        resource.prlimit(pid, which, (most, hard))
        stack.callback(_quietly, resource.prlimit, pid, which, (hard, hard))  # as services have it, whoever limits too
        fault.struck += 1
        for name, proxy in deployment.proxies.items():
            if name.startswith(fault.process + " "):
                proxy.reset()  # connections, and what comes with them, are wanted anew


async def _set_clock(fault: Fault, deployment: Deployment, stack: contextlib.AsyncExitStack) -> None:
    pid = deployment.pid(fault.process)
    far = 10 ** (1 + 5 * abs(2 * fault.number - 1))  # seconds: from ten to ten days
    before = deployment.clocks.reads(pid)

    def set_right() -> None:
        deployment.clocks.set(pid, 0.0)
        fault.struck = deployment.clocks.reads(pid) - before

    stack.callback(set_right)
    deployment.clocks.set(pid, far if fault.number > 0.5 else -far)


def _quietly(act: Callable[..., object], *arguments: object) -> None:
    """Undo something of a process that may have died meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        act(*arguments)


_STRIKES = {
    "kill": _kill,
    "stop": _stop,
    "cut": _cut,
    "freeze": _freeze,
    "disk": _fill,
    "shm": _fill,
    "descriptors": _limit,
    "memory": _limit,
    "clock": _set_clock,
}
