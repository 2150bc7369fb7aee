"""Hand-over through the store alone: no pipe between prefill and decode, and processes that are killed.

Tokens are those of Hugging Face ``generate``. Which way the KV took is read from the answers' debug data.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.child_env import child_env
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.store_process import store_processes
from tests.support.servers.warm import WarmStarter

from baton.api.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.cli.supervisor import ManagedProcess, ProcessSpec
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.connector.store.backend import ChainPart
from baton.kv_transfer.connector.store.cluster import Placement, segments_of
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_from_pb, sampling_to_pb
from baton.rpc.server import free_port
from baton.token_ids import pack_ids
from baton.types import BlockHash, SamplingParams

BS = 16
NEW_TOKENS = 8
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
START_S = 240.0
WAIT_S = 240.0
STORE = ("--capacity-bytes", str(64 << 20))
ENGINE_FLAGS = ("--dtype", "float32", "--kv-blocks", "700", "--prefill-chunk", "64")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    # Some are longer than a segment of the store, so parts of one prompt lie on different nodes.
    prompts = [prompt for prompt in mixed_prompts(5, 512, count=18, longest=1000) if len(prompt) > 2 * BS]
    prompts.sort(key=len)
    return path, prompts, hf_greedy(path, prompts, NEW_TOKENS)


def num_loadable(prompt: Sequence[int]) -> int:
    """Tokens in full blocks, the one with the last token left out: that token is computed for its logits."""
    return (len(prompt) - 1) // BS * BS


def num_blocks(prompts: Sequence[Sequence[int]]) -> int:
    """Different full blocks of some prompts."""
    root = BlockHash(bytes(32))
    return len({name for prompt in prompts for name in block_hashes(list(prompt), BS, root)})


def decoders(path: Path, kvstore: str, **changes: object) -> LocalCluster:
    """One decode instance and nobody who could prefill for it."""
    engine = EngineConfig(model=str(path), dtype="float32", kv_blocks=700, prefill_chunk=64)
    config = WorkerConfig(kvstore=kvstore, kvstore_decode_saves=False, **changes)  # type: ignore[arg-type]
    return LocalCluster(engine, config, num_prefill=0)


@asynccontextmanager
async def prefill_process(starter: WarmStarter, path: Path, *flags: str) -> AsyncIterator[tuple[str, ManagedProcess]]:
    address = f"127.0.0.1:{free_port()}"
    args = ("--model", str(path), "--port", address.rpartition(":")[2], *ENGINE_FLAGS, *flags)
    spec = ProcessSpec("p0", "baton_prefill.main", args, address, "prefill")
    process = ManagedProcess(spec, lambda *_: None, child_env(), start=starter.spawn)
    try:
        await process.wait_ready(START_S)
        yield address, process
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait_closed()


async def prefill(address: str, prompts: Sequence[Sequence[int]]) -> Fingerprint:
    """Have prompts prefilled, and take nothing of what is offered; returns what the KV is."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = await stub.GetInfo(worker_pb2.GetInfoRequest())

        async def one(name: str, prompt: Sequence[int]) -> None:
            request = worker_pb2.PrefillRequest(
                request_id=name,
                prompt_token_ids=pack_ids(prompt),
                sampling=sampling_to_pb(SAMPLING),
                fingerprint=info.fingerprint,
            )
            call = stub.Prefill(request, timeout=WAIT_S)
            async for response in call:
                if response.HasField("result"):
                    break
            call.cancel()

        await asyncio.gather(*(one(f"p{i}", prompt) for i, prompt in enumerate(prompts)))
    return fingerprint_from_pb(info.fingerprint)


async def wait_for_blocks(addresses: Sequence[str], count: int) -> None:
    """Wait until the nodes hold that many blocks together."""
    async with asyncio.timeout(WAIT_S):
        while True:
            held = 0
            for address in addresses:
                async with open_channel(address) as channel:
                    stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
                    held += (await stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest())).num_blocks
            if held == count:
                return
            await asyncio.sleep(0.02)


def check_trace(trace: common_pb2.RequestTrace) -> None:
    assert trace.cached_tokens + trace.transferred_tokens + trace.recomputed_tokens == trace.prompt_tokens


async def test_equality_through_the_store_alone_with_prefill_killed_before_decode_starts(
    workload, starter: WarmStarter
) -> None:
    path, prompts, expected = workload
    async with store_processes(1, *STORE) as (store,):
        async with prefill_process(starter, path, "--kvstore", store.address) as (address, process):
            await prefill(address, prompts)
            await wait_for_blocks([store.address], num_blocks(prompts))
            process.send_signal(signal.SIGKILL)
            assert await process.wait_closed() == -signal.SIGKILL
        async with decoders(path, store.address) as cluster:
            decode = cluster.decode[0]
            results = await asyncio.gather(*(cluster.generate(decode, prompt, SAMPLING) for prompt in prompts))
            assert [result.token_ids for result in results] == expected
            for prompt, trace in zip(prompts, (result.trace for result in results), strict=True):
                check_trace(trace)
                assert trace.recomputed_tokens == len(prompt) - num_loadable(prompt)
                assert not trace.failed_prefills
                assert trace.path == common_pb2.PREFILL_PATH_STORE or not trace.transferred_tokens
            assert sum(result.trace.transferred_tokens for result in results) > 1000
            await cluster.check_integrity()


@pytest.mark.parametrize("replication", [1, 2])
async def test_equality_through_two_nodes_with_one_killed_in_mid_run(workload, replication: int) -> None:
    path, prompts, expected = workload
    async with store_processes(2, *STORE) as nodes:
        kvstore = ",".join(node.address for node in nodes)
        engine = EngineConfig(model=str(path), dtype="float32", kv_blocks=700, prefill_chunk=64)
        config = WorkerConfig(kvstore=kvstore, kvstore_replication=replication)
        async with LocalCluster(engine, config) as saving:
            fingerprint = await prefill(saving.prefill[0].address, prompts)
            await wait_for_blocks([node.address for node in nodes], replication * num_blocks(prompts))
        # Everybody who computed is gone; only the nodes remember. The one that has the longest prompt's beginning dies.
        owners = [owners_of(prompt, fingerprint, kvstore) for prompt in prompts]
        victim = next(node for node in nodes if node.address == owners[-1][0])
        async with decoders(path, kvstore, kvstore_replication=replication) as cluster:
            decode, half = cluster.decode[0], len(prompts) // 2
            first = [asyncio.ensure_future(cluster.generate(decode, prompt, SAMPLING)) for prompt in prompts[:half]]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            await victim.kill()
            rest = [cluster.generate(decode, prompt, SAMPLING) for prompt in prompts[half:]]
            results = list(await asyncio.gather(*first, *rest))
            assert [result.token_ids for result in results] == expected
            for result in results:
                check_trace(result.trace)
            extra = [
                result.trace.recomputed_tokens - (len(prompt) - num_loadable(prompt))
                for prompt, result in zip(prompts, results, strict=True)
            ]
            if replication == 2:
                assert not any(extra)
            else:
                assert extra[-1] > 0
                assert not any(more for more, who in zip(extra, owners, strict=True) if victim.address not in who)
            assert any(result.trace.transferred_tokens for result in results)
            await cluster.check_integrity()


def owners_of(prompt: Sequence[int], fingerprint: Fingerprint, kvstore: str) -> list[str]:
    """Return who has a prompt's segments."""
    hashes = block_hashes(list(prompt), BS, root_hash(fingerprint.content_key()))
    placement = Placement(kvstore.split(","))
    return [placement.ranked(segment.key, 1)[0] for segment in segments_of(ChainPart(hashes, 0, len(hashes)))]
