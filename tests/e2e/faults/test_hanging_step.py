"""A decode instance whose engine hangs in a step, as when a device hangs, while it answers every health check."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.equality import hf_greedy

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEW_TOKENS = 200
HANG = """
import os, sys, threading

if "baton_decode.main" in sys.orig_argv:
    from baton.engine.core import EngineCore

    step = EngineCore.step

    def hang(core):
        try:
            os.rename({trigger!r}, {trigger!r} + ".taken")  # by one of the instances
        except FileNotFoundError:
            return step(core)
        threading.Event().wait()

    EngineCore.step = hang
"""


async def test_its_streams_go_on_elsewhere(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trigger = tmp_path / "hang"
    (tmp_path / "sitecustomize.py").write_text(HANG.format(trigger=str(trigger)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "1500", "--step-timeout-s", "3")
    lines: list[str] = []
    plan = make_plan(ratio=Ratio(1, 2), extra=ExtraArgs(worker=worker))
    supervisor = Supervisor(plan, lambda name, line: lines.append(f"{name}: {line}"))
    prompts = [[3 + number, 40, 41, 42, 43] for number in range(12)]
    begun = asyncio.Semaphore(0)
    async with supervisor, AsyncClient(plan.grpc_address, timeout=240) as client:
        before = {name: process.pid for name, process in supervisor.processes.items()}

        async def ask(prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            stream = await client.generate(prompt, stream=True, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            async for event in stream:
                if not tokens:
                    begun.release()
                tokens += event.token_ids
            return tokens

        answers = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        for _ in prompts:
            await begun.acquire()
        trigger.touch()
        assert await asyncio.gather(*answers) == hf_greedy(model, prompts, NEW_TOKENS)
        hung = [line for line in lines if "the engine hangs: a step has not ended within 3 s" in line]
        assert len(hung) == 1
        name = hung[0].partition(":")[0]
        async with asyncio.timeout(240):
            while supervisor.processes[name].pid == before[name]:  # it ended, and was started again
                await asyncio.sleep(0.05)
        assert await ask(prompts[0]) == hf_greedy(model, prompts[:1], NEW_TOKENS)[0]
