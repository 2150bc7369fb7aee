"""A prefill and a decode instance in processes of their own on one device, behind a router."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient, Generation


@asynccontextmanager
async def device_pair(path: Path, device: str, *flags: str, pipes: str = "cuda_ipc") -> AsyncIterator[Supervisor]:
    """Run ``baton up`` with one prefill and one decode instance; prompts from one token on are prefilled remotely.

    Args:
        path: The model.
        device: Of both instances.
        flags: More for both.
        pipes: Kinds of pipe.
    """
    worker = ("--model", str(path), "--dtype", "float32", "--device", device, *flags)
    router = ("--remote-prefill-threshold", "1", "--policy-seed", "3")
    plan = make_plan(ratio=Ratio(1, 1), pipes=pipes, extra=ExtraArgs(worker=worker, router=router))
    lines: list[str] = []
    supervisor = Supervisor(dataclasses.replace(plan), lambda name, line: lines.append(f"{name} | {line}"))
    try:
        async with supervisor:
            yield supervisor
    finally:
        print("\n".join(lines[-60:]))  # noqa: T201  pytest shows it with a failure


async def ask(
    supervisor: Supervisor, prompts: Sequence[list[int]], new_tokens: int, timeout: float
) -> list[Generation]:
    """Have all prompts answered at once, greedily."""
    async with AsyncClient(supervisor.plan.grpc_address, timeout=timeout, retries=0) as client:
        calls = (client.generate(prompt, temperature=0.0, max_tokens=new_tokens) for prompt in prompts)
        return list(await asyncio.gather(*calls))
