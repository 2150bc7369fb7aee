"""A supervisor that is killed can end nobody: its children end by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SUPERVISOR = """
import asyncio, os, sys
from baton.cli.supervisor import ManagedProcess, ProcessSpec
from baton.rpc.server import free_port

async def main():
    address = f"127.0.0.1:{free_port()}"
    args = ("--port", address.rpartition(":")[2], "--capacity-bytes", str(1 << 20))
    child = ManagedProcess(ProcessSpec("store", "baton_kvstore.main", args, address, "kvstore"), print, os.environ)
    if sys.argv[1] == "ready":
        await child.wait_ready(240)
    print("PID", child.pid, flush=True)
    await child.wait_closed()

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["ready", "at once"])
def test_a_service_ends_with_the_supervisor_that_is_killed(moment: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as errors:
        parent = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, moment], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    children: list[psutil.Process] = []
    try:
        assert parent.stdout is not None
        said = []
        for line in parent.stdout:
            said.append(line)
            if line.startswith("PID "):
                children = [psutil.Process(int(line.split()[1]))]
                break
        assert children, (said, log.read_text())
        assert not psutil.wait_procs(children, timeout=0.2)[0]
        parent.kill()
        assert not psutil.wait_procs(children, timeout=240)[1]
    finally:
        parent.kill()
        parent.communicate()
        for child in children:
            if child.is_running():
                child.kill()
