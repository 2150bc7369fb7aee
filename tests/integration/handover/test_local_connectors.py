"""Files on shared storage and host memory behind real instances: tokens as ``generate``, KV that outlives the pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.rpc.channel import open_channel
from baton.types import Role, SamplingParams
from baton.worker.instance import WorkerInstance

BLOCK = 16
NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
PROMPTS = [[(7 * turn + 3 * i) % 500 + 4 for i in range(150 + turn)] for turn in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return hf_greedy(model, PROMPTS, NEW_TOKENS)


def cluster(model: Path, *options: str, kv_blocks: int = 400) -> LocalCluster:
    names = tuple(dict.fromkeys(option.partition(".")[0] for option in options))
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=kv_blocks, prefill_chunk=64)
    config = WorkerConfig(kv_connectors=names, kv_connector_options=tuple(o for o in options if "=" in o))
    return LocalCluster(engine, config)


def registry(instance: WorkerInstance) -> CollectorRegistry:
    return instance.context.base.metrics.registry


def count(instance: WorkerInstance, name: str, connector: str) -> float:
    value = registry(instance).get_sample_value(f"baton_connector_{name}_total", {"connector": connector})
    assert value is not None
    return value


async def test_files_hand_kv_over_when_the_prefill_instance_is_gone(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    option = f"shared_storage.path={tmp_path / 'kv'}"
    async with cluster(model, option) as saving:
        results = await asyncio.gather(*(saving.generate(saving.decode[0], prompt, GREEDY) for prompt in PROMPTS))
        assert [result.token_ids for result in results] == expected
        await saving.check_integrity()
    async with cluster(model, option) as loading:
        await asyncio.gather(*(instance.stop(0) for instance in loading.prefill))
        loading.prefill.clear()
        results = [await loading.generate(loading.decode[0], prompt, GREEDY, candidates=()) for prompt in PROMPTS]
        assert [result.token_ids for result in results] == expected
        for result, prompt in zip(results, PROMPTS, strict=True):
            assert (result.trace.path, result.trace.pipe) == (common_pb2.PREFILL_PATH_STORE, "files")
            assert result.trace.transferred_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        # The next turn finds what was generated, too.
        turn = [*PROMPTS[0], *expected[0], *range(30, 60)]
        (answer,) = hf_greedy(model, [turn], NEW_TOKENS)
        result = await loading.generate(loading.decode[0], turn, GREEDY, candidates=())
        assert result.token_ids == answer
        await loading.settle()


async def test_prefill_instances_load_files_too_and_damage_is_a_miss(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    option = f"shared_storage.path={tmp_path / 'kv'}"
    async with cluster(model, option) as saving:
        await saving.generate(saving.decode[0], PROMPTS[0], GREEDY)
        await saving.settle()
    again = cluster(model, option)
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=400)
    again.decode = [WorkerInstance(Role.DECODE, WorkerConfig(instance_id="d"), engine)]  # knows no files
    async with again:
        result = await again.generate(again.decode[0], PROMPTS[0], GREEDY)
        assert result.token_ids == expected[0]
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        assert count(again.prefill[0], "loaded_tokens", "shared_storage") == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK
        await again.settle()
    files = sorted((tmp_path / "kv").glob("**/*.safetensors"))
    damaged = {file: bytearray(file.read_bytes()) for file in files}
    for file, content in damaged.items():
        content[-1] ^= 1
        file.write_bytes(content)
    async with cluster(model, option) as third:
        result = await third.generate(third.decode[0], PROMPTS[0], GREEDY)
        assert result.token_ids == expected[0]
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        await third.check_integrity()
        assert count(third.decode[0], "load_hits", "shared_storage") == 0
        assert count(third.decode[0], "load_failures", "shared_storage") == 0
    for file in files:  # what was damaged was removed, and written again where it was computed again
        assert not file.exists() or file.read_bytes() != bytes(damaged[file])


async def test_with_a_pool_too_small_host_memory_raises_the_hit_rate(model: Path, expected: list[list[int]]) -> None:
    """Rounds of prompts that the pool cannot hold at once: LRU evicts each before it comes again."""
    found: dict[str, list[int]] = {}
    for name, options in (("without", ()), ("with", (f"offload.bytes={64 << 20}",))):
        async with cluster(model, *options, kv_blocks=30) as small:
            hits = []
            for _ in range(3):
                results = [await small.generate(small.decode[0], prompt, GREEDY, candidates=()) for prompt in PROMPTS]
                assert [result.token_ids for result in results] == expected
                hits.append(sum(r.trace.cached_tokens + r.trace.transferred_tokens for r in results))
                await small.settle()
            await small.check_integrity()
            found[name] = hits
            if options:
                loaded = [r.trace for r in results if r.trace.path == common_pb2.PREFILL_PATH_STORE]
                assert {(trace.pipe, trace.local_reason) for trace in loaded} == {("memory", "")}
                assert count(small.decode[0], "load_failures", "offload") == 0
                assert count(small.decode[0], "loaded_tokens", "offload") > 0
    assert found["without"] == [0, 0, 0]
    whole = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS)
    assert found["with"] == [0, whole, whole]


async def test_routers_are_told_what_lies_in_host_memory(model: Path) -> None:
    async with cluster(model, f"offload.bytes={64 << 20}", kv_blocks=30) as small:
        for prompt in PROMPTS:
            await small.generate(small.decode[0], prompt, GREEDY, candidates=())
        await small.settle()
        async with open_channel(small.decode[0].address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            held: dict[str, set[bytes]] = {"device": set(), "host": set()}
            async for answer in stub.StreamKvEvents(worker_pb2.StreamKvEventsRequest()):
                for event in answer.batch.events:
                    held[event.stored.tier].update(event.stored.block_hashes)
                if not answer.batch.more:
                    break
            total = sum((len(prompt) + NEW_TOKENS - 1) // BLOCK for prompt in PROMPTS)
            assert len(held["host"]) == total
            assert 0 < len(held["device"]) <= 30
            assert held["device"] <= held["host"]
            # And of every change: what comes next is told as it happens.
            stream = stub.StreamKvEvents(
                worker_pb2.StreamKvEventsRequest(from_sequence=answer.batch.sequence + 1, epoch=answer.batch.epoch)
            )
            await small.generate(small.decode[0], list(range(300, 400)), GREEDY, candidates=())
            new: set[bytes] = set()
            async with asyncio.timeout(240):
                async for answer in stream:
                    for event in answer.batch.events:
                        if event.WhichOneof("event") == "stored" and event.stored.tier == "host":
                            new.update(event.stored.block_hashes)
                    if len(new) == (100 + NEW_TOKENS - 1) // BLOCK:
                        break
            stream.cancel()


async def test_all_of_them_together(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    options = (f"offload.bytes={4 << 20}", f"shared_storage.path={tmp_path / 'kv'}")
    async with cluster(model, *options, kv_blocks=40) as both:
        for turn in range(2):
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                result = await both.generate(both.decode[0], prompt, GREEDY)
                assert result.token_ids == tokens, turn
        await both.check_integrity()
        # Whoever has it first loads; both have saved all of it.
        assert count(both.decode[0], "loaded_tokens", "offload") > 0
        assert count(both.decode[0], "saved_blocks", "shared_storage") > 0


@pytest.mark.parametrize(
    "options",
    [
        ("shared_storage",),
        ("shared_storage.path=/proc/nothing/here",),
        ("shared_storage.path=/tmp/x", "shared_storage.max_bytes=100"),
        ("shared_storage.path=/tmp/x", "shared_storage.sync=maybe"),
        ("shared_storage.path=/tmp/x", "shared_storage.threads=0"),
        ("shared_storage.path=/tmp/x", "shared_storage.size=3"),
        ("offload.bytes=12",),
        ("offload.bytes=1GB",),
        (f"offload.bytes={1 << 59}",),
    ],
)
async def test_what_cannot_work_is_refused_at_start(model: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        async with cluster(model, *options):
            pass
    assert refused.value.field == "kv_connector_options"
