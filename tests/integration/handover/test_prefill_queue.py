"""A prefill instance that is busy is waited for, one that is silent is not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster
from tests.support.standstills import take_standstills_out

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.kv_transfer.connector.p2p import consumer
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.token_ids import pack_ids
from baton.types import SamplingParams
from baton.worker.instance import WorkerInstance

TOKENS = 192  # three steps
NUM_PROMPTS = 16
STALL_S = 3.0
STEP_S = 0.1
"""So that all prompts together take 1.6 times as long as silence is put up with."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


def prompt(number: int) -> list[int]:
    return [(11 * i + 37 * number) % 400 + 10 for i in range(TOKENS)]


@asynccontextmanager
async def busy_cluster(path: str, **changes: float) -> AsyncIterator[LocalCluster]:
    """A cluster whose prefill instance is slow, and reports often, so that a test need not wait for long."""
    engine = EngineConfig(model=path, dtype="float32", kv_blocks=400, prefill_chunk=64, max_num_batched_tokens=64)
    async with LocalCluster(engine, WorkerConfig(prefill_stall_s=STALL_S, **changes)) as running:  # type: ignore[arg-type]
        prefill = running.prefill[0]
        prefill._role._queue._interval_s = 0.2  # type: ignore[union-attr]
        forward = prefill.context.base.model.executor.forward

        def slow(*args: Any) -> Any:
            time.sleep(STEP_S)
            return forward(*args)

        prefill.context.base.model.executor.forward = slow  # type: ignore[method-assign]
        decode: Any = running.decode[0]._role
        decode.connector._stall_s = 3600.0  # of copies: these tests are about words
        yield running
        await running.check_integrity()


@contextmanager
def held_back(instance: WorkerInstance, go_on: threading.Event) -> Iterator[threading.Event]:
    """Have an instance's steps wait for ``go_on``; yields what is set when the first one does."""
    begun = threading.Event()
    executor: Any = instance.context.base.model.executor
    forward = executor.forward

    def held(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(240)
        return forward(*args)

    executor.forward = held
    try:
        yield begun
    finally:
        go_on.set()


@pytest.mark.parametrize("wait_s", [3600.0, 2.0])
async def test_no_prefill_is_thrown_away_under_overload(path: str, wait_s: float) -> None:
    async with busy_cluster(path, prefill_wait_s=wait_s) as cluster:
        prompts = [prompt(number) for number in range(NUM_PROMPTS)]
        decode, prefill = cluster.decode[0], cluster.prefill[0]
        # A standstill of this process, in which both instances are, is no silence of one of them.
        take_standstills_out(asyncio.get_running_loop(), most_s=0.5)
        results = await asyncio.gather(*(cluster.generate(decode, each, GREEDY) for each in prompts))
        assert [result.token_ids for result in results] == hf_greedy(path, prompts, 4)
        remote = [x.trace for x in results if x.trace.path == common_pb2.PREFILL_PATH_REMOTE]
        local = [x.trace for x in results if x.trace.path == common_pb2.PREFILL_PATH_LOCAL]
        assert prefill.context.engine.core.num_prefilled == TOKENS * len(remote), "what was computed was used"
        assert {trace.recomputed_tokens for trace in remote} == {0}
        assert not any(trace.failed_prefills for trace in remote)
        if wait_s < STALL_S:
            assert local
            assert {trace.local_reason for trace in local} == {"prefill_busy"}
        else:
            assert not local


async def test_a_silent_instance_is_left_when_a_router_says_so_and_one_that_is_heard_is_not(path: str) -> None:
    """The instance that hangs: connections to it stand, and nothing answers."""
    async with busy_cluster(path) as cluster:
        decode, prefill = cluster.decode[0], cluster.prefill[0]
        role: Any = decode._role
        role.connector.watch._stall_s = 600.0
        with socket.create_server(("127.0.0.1", 0)) as hung:
            address = f"127.0.0.1:{hung.getsockname()[1]}"
            requests: asyncio.Queue[worker_pb2.GenerateManyRequest] = asyncio.Queue()

            async def sent() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
                while True:
                    yield await requests.get()

            channel = open_channel(decode.address)
            stream = worker_pb2_grpc.WorkerServiceStub(channel).GenerateMany(sent())
            start = worker_pb2.GenerateManyRequest()
            start.starts.add(
                call=1,
                request=worker_pb2.GenerateRequest(
                    request_id="r",
                    prompt_token_ids=pack_ids(prompt(1)),
                    sampling=sampling_to_pb(GREEDY),
                    prefill_candidates=[address, prefill.address],
                    remote_prefill_threshold=1,
                ),
            )
            requests.put_nowait(start)
            while not role.connector.watch._waiting:
                await asyncio.sleep(0.01)
            # Of both: the one that is heard here stays.
            silent = worker_pb2.SilentInstances(addresses=[address])
            requests.put_nowait(worker_pb2.GenerateManyRequest(silent=silent))
            tokens, trace = [], common_pb2.RequestTrace()
            async with asyncio.timeout(240):
                while len(tokens) < 4:
                    answer = await stream.read()
                    tokens += answer.token_ids
                    for message in answer.messages:
                        tokens += [x for delta in message.response.deltas for x in delta.token_ids]
                        trace = message.response.trace if message.response.HasField("trace") else trace
            assert [tokens] == hf_greedy(path, [prompt(1)], 4)
            assert (trace.path, len(trace.failed_prefills)) == (common_pb2.PREFILL_PATH_REMOTE, 1)
            # From now on nobody waits for it at all; and the word of one router costs nothing that is heard here.
            silent.addresses.append(prefill.address)
            go_on = threading.Event()
            with held_back(prefill, go_on):  # else the first is done before the last has come
                busy = [asyncio.create_task(cluster.generate(decode, prompt(10 + at), GREEDY)) for at in range(10)]
                while len(role.connector.watch._waiting.get(prefill.address, ())) < 10:
                    await asyncio.sleep(0.01)
                requests.put_nowait(worker_pb2.GenerateManyRequest(silent=silent))
            assert {x.trace.path for x in await asyncio.gather(*busy)} == {common_pb2.PREFILL_PATH_REMOTE}
            late = await cluster.generate(decode, prompt(2), GREEDY, candidates=[address])
            assert late.trace.failed_prefills == [f"{address}: it does not answer a router"]
            stream.cancel()
            while role.connector.watch._said:  # its word goes with its stream
                await asyncio.sleep(0.01)
            await channel.close()


async def test_a_call_that_nobody_acknowledges_goes_to_another_instance_and_later_ones_go_there_first(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "REST_S", 3600.0)
    monkeypatch.setattr(consumer, "ACKNOWLEDGE_S", 1.0)
    async with busy_cluster(path) as cluster:
        decode, prefill = cluster.decode[0], cluster.prefill[0]
        role: Any = decode._role
        watch = role.connector.watch
        watch._stall_s = 600.0
        with socket.create_server(("127.0.0.1", 0)) as hung:
            address = f"127.0.0.1:{hung.getsockname()[1]}"
            async with asyncio.timeout(240):
                both = [address, prefill.address]
                traces = [(await cluster.generate(decode, prompt(0), GREEDY, candidates=both)).trace]
                monkeypatch.setattr(consumer, "ACKNOWLEDGE_S", 3600.0)  # the one that lives has its time
                traces.append((await cluster.generate(decode, prompt(1), GREEDY, candidates=both)).trace)
                assert {trace.path for trace in traces} == {common_pb2.PREFILL_PATH_REMOTE}
                late = f"{address}: it did not acknowledge the call within 1 s"
                assert [trace.failed_prefills for trace in traces] == [[late], []]
                # Nobody else could compute it: there is as much patience as ever.
                alone = asyncio.create_task(cluster.generate(decode, prompt(2), GREEDY, candidates=[address]))
                while not watch._waiting:
                    await asyncio.sleep(0.01)
                assert min(each.when() for each in watch._waiting[address]) > asyncio.get_running_loop().time() + 300
                watch.set_silent("a router", frozenset({address}))
                assert (await alone).trace.path == common_pb2.PREFILL_PATH_LOCAL


async def test_an_instance_in_the_middle_of_a_step_acknowledges_a_call(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "ACKNOWLEDGE_S", 240.0)
    async with busy_cluster(path) as cluster:
        decode, prefill = cluster.decode[0], cluster.prefill[0]
        role: Any = decode._role
        watch = role.connector.watch
        watch._stall_s = 600.0
        go_on = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as hung, held_back(prefill, go_on) as begun:
            other = f"127.0.0.1:{hung.getsockname()[1]}"
            first = asyncio.create_task(cluster.generate(decode, prompt(1), GREEDY))
            async with asyncio.timeout(240):
                while not begun.is_set():
                    await asyncio.sleep(0.01)
                asked = [prefill.address, other]
                second = asyncio.create_task(cluster.generate(decode, prompt(2), GREEDY, candidates=asked))

                def acknowledged() -> bool:
                    far = asyncio.get_running_loop().time() + 300
                    return sum(each.when() > far for each in watch._waiting.get(prefill.address, ())) == 2

                try:
                    while not acknowledged() and not second.done():
                        await asyncio.sleep(0.01)
                finally:
                    go_on.set()
                for result in (await first, await second):
                    assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
                    assert not result.trace.failed_prefills
