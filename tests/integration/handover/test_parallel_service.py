"""A service of several processes: idle, what listens, whoever dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.equality import References
from tests.support.transport.shared_memory import left_behind, segments

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.token_ids import pack_ids
from baton.types import SamplingParams
from baton_decode.main import main as decode_main

READY_S = 240.0
PROMPT = [9, 10, 11, 12] * 9


class Service:
    """A decode instance of two ranks in processes of its own."""

    def __init__(self, model: str, log: Path) -> None:
        flags = ["--dtype", "float32", "--kv-blocks", "64", "--tp", "2", "--port", "0"]
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "baton_decode.main", "--model", model, *flags], stdout=file, stderr=file
            )

    def output(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> str:
        """Return where it listens."""

        def listening() -> bool:
            assert self.process.poll() is None, self.output()
            return "listening on" in self.output()

        until(listening, READY_S)
        found = re.search(r"listening on (\S+:\d+)", self.output())
        assert found is not None
        return found[1]

    def ranks(self) -> list[psutil.Process]:
        leader = psutil.Process(self.process.pid)
        return [leader, *leader.children()]


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "time is up"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def services(references: References, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two of them, started together; each test kills one."""
    model, folder = str(references.checkpoint("llama")), tmp_path_factory.mktemp("logs")
    services = [Service(model, folder / f"{index}.log") for index in range(2)]
    yield services
    for service in services:
        service.process.kill()
        service.process.wait()


async def generate(address: str) -> list[int]:
    sampling = sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=12))
    request = worker_pb2.GenerateRequest(request_id="a", prompt_token_ids=pack_ids(PROMPT), sampling=sampling)
    tokens: list[int] = []
    async with open_channel(address) as channel:
        async for response in worker_pb2_grpc.WorkerServiceStub(channel).Generate(request):
            for delta in response.deltas:
                tokens += delta.token_ids
    return tokens


async def test_idle_it_burns_no_core_listens_on_loopback_alone_and_dies_with_its_leader(
    services: list[Service], references: References
) -> None:
    service = services[0]
    address = service.wait_ready()
    assert await generate(address) == references.greedy("llama", [PROMPT, PROMPT[1:]], 12)[0]
    ranks = service.ranks()
    assert len(ranks) == 2
    listening = [
        connection.laddr.ip
        for rank in ranks
        for connection in rank.net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert len(listening) >= 4  # gRPC, tcp pipe, a gloo device per rank
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    for last in (*[False] * 5, True):  # what came before may have an end still to come
        before = [sum(rank.cpu_times()[:2]) for rank in ranks]
        began = time.monotonic()
        await asyncio.sleep(2.0)  # what is measured: nothing happens
        spent = [sum(rank.cpu_times()[:2]) - was for rank, was in zip(ranks, before, strict=True)]
        if max(spent) < 0.03 * (time.monotonic() - began):
            break
        assert not last, spent
    memory = segments()
    service.process.send_signal(signal.SIGKILL)
    assert service.process.wait() == -signal.SIGKILL
    until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks[1:]), 240.0)
    assert left_behind(memory) == set()


async def test_it_ends_with_one_clear_line_when_a_follower_dies_while_idle(services: list[Service]) -> None:
    service = services[1]
    await generate(service.wait_ready())
    follower = service.ranks()[1]
    os.kill(follower.pid, signal.SIGKILL)
    assert service.process.wait(240.0) == 1
    lines = [line for line in service.output().splitlines() if "CRITICAL" in line or "Traceback" in line]
    assert len(lines) == 1
    assert re.search(rf"the engine stops: rank 1 \(.*process {follower.pid}\) was killed by SIGKILL", lines[0])
    assert not follower.is_running()


@pytest.mark.parametrize(
    ("flags", "words"), [(["--tp", "3"], "2 KV heads cannot be divided over tp=3"), (["--pp", "0"], "pp must be")]
)
def test_sizes_that_cannot_work_are_one_clear_line(
    references: References, capfd: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert decode_main(["--model", str(references.checkpoint("llama")), "--log-level", "error", *flags]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert words in error
