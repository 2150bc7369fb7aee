"""Processes that die: restarted and registered again, or the end of the whole, as asked. Nothing is left running."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest
from tests.support.servers.warm import WarmStarter

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import ManagedProcess, ProcessSpec, Supervisor
from baton.client import AsyncClient
from baton.errors import ConfigError, UnavailableError

pytestmark = pytest.mark.slow


def plan(model: str):
    return make_plan(ratio=Ratio(0, 1), extra=ExtraArgs(worker=("--model", model, "--kv-blocks", "200")))


def warm(starter: WarmStarter, model: str, lines: list[str], **options) -> Supervisor:
    supervisor = Supervisor(plan(model), lambda name, line: lines.append(f"{name} | {line}"), **options)
    supervisor.spawn = starter.spawn
    return supervisor


async def test_an_instance_that_dies_is_restarted_and_registers_again(model, starter):
    lines: list[str] = []
    async with warm(starter, model, lines) as supervisor:
        async with AsyncClient(supervisor.plan.grpc_address, timeout=240) as client:
            assert (await client.generate("import os", max_tokens=4, ignore_eos=True)).token_ids
            first = supervisor.processes["decode-0"].pid
            supervisor.kill("decode-0")
            async with asyncio.timeout(240):
                while supervisor.processes["decode-0"].pid == first or not any(  # it may be forgotten meanwhile
                    item.healthy for item in await client.list_instances()
                ):
                    await asyncio.sleep(0.05)
            # The router knows the new one by its epoch: nothing of the old one's cache is believed.
            assert (await client.generate("import os", max_tokens=4, ignore_eos=True)).token_ids
        pids = [process.pid for process in supervisor.processes.values()]
    assert any("restarting in 0.5 s" in line for line in lines), lines[-20:]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_no_restart_ends_the_whole(model, starter):
    async with warm(starter, model, [], restart=False) as supervisor:
        supervisor.kill("decode-0")
        async with asyncio.timeout(240):
            assert "decode-0" in await supervisor.wait()


async def test_who_is_in_a_hurry_waits_for_no_drain(model):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    deaf = asyncio.Event()
    spec = ProcessSpec("deaf", "timeit", ("-n1", "-r1", code), "", "decode")
    process = ManagedProcess(spec, lambda *_: deaf.set(), {})
    supervisor = Supervisor(plan(model), lambda *_: None, grace_s=50)
    supervisor.processes["deaf"] = process
    async with asyncio.timeout(240):
        await deaf.wait()
        stopping = asyncio.ensure_future(supervisor.stop())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(stopping), 0.3)
        supervisor.hurry()
        await stopping
    assert process.returncode == -9


async def test_a_process_that_is_never_ready_is_told_by_name():
    spec = ProcessSpec("sleepy", "timeit", ("-n", "1", "import time; time.sleep(60)"), "127.0.0.1:1", "decode")
    process = ManagedProcess(spec, lambda *_: None, {})
    with pytest.raises(UnavailableError, match="sleepy was not ready"):
        await process.wait_ready(0.3)
    await process.end(0.0)
    assert process.returncode is not None


async def test_a_process_that_ends_at_once_is_told_with_its_status():
    spec = ProcessSpec("broken", "no_such_module_of_ours", (), "127.0.0.1:1", "decode")
    lines: list[str] = []
    process = ManagedProcess(spec, lambda _, line: lines.append(line), {"PATH": sys.exec_prefix})
    with pytest.raises(UnavailableError, match="broken ended with status 1"):
        await process.wait_ready(240)
    assert any("no_such_module_of_ours" in line for line in lines)


@pytest.mark.parametrize(("text", "prefill", "decode"), [("2P3D", 2, 3), ("0p1d", 0, 1), ("10P20D", 10, 20)])
def test_ratios(text, prefill, decode):
    assert Ratio.parse(text) == Ratio(prefill, decode)


@pytest.mark.parametrize("text", ["", "2P", "3D", "P1D", "1P0D", "-1P1D", "1P1D1", "60P60D"])
def test_ratios_that_are_none(text):
    with pytest.raises(ConfigError) as caught:
        Ratio.parse(text)
    assert caught.value.field == "ratio"
