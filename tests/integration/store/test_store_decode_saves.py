"""Decode instances save to the KV store what they computed and generated: the next turn loads it, on any instance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.types import Role, SamplingParams
from baton.worker.instance import WorkerInstance
from baton_kvstore.server import KVStoreServer

BLOCK = 16
NEW_TOKENS = 30
FIRST = list(range(30, 130))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@dataclass(frozen=True)
class Conversation:
    """Two turns, and what ``generate`` answers to each."""

    answer: list[int]
    second: list[int]
    expected: list[int]


@pytest.fixture(scope="module")
def talk(model: Path) -> Conversation:
    answer = hf_greedy(model, [FIRST], NEW_TOKENS)[0]
    second = [*FIRST, *answer, *range(200, 220)]
    return Conversation(answer, second, hf_greedy(model, [second], NEW_TOKENS)[0])


def cluster(model: Path, store: KVStoreServer, *, saves: bool = True) -> LocalCluster:
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=200, prefill_chunk=64)
    return LocalCluster(engine, WorkerConfig(kvstore=store.address, kvstore_decode_saves=saves))


@pytest.mark.parametrize("saves", [True, False])
async def test_the_next_turn_of_a_conversation_is_loaded(
    model: Path, talk: Conversation, store: KVStoreServer, saves: bool
) -> None:
    # One turn with the prompt handed over by a prefill instance, which saves it; all that decode adds is the answer.
    async with cluster(model, store, saves=saves) as before:
        result = await before.generate(before.decode[0], FIRST, GREEDY)
        assert result.token_ids == talk.answer
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        await before.settle()
        await before.check_integrity()
    async with cluster(model, store, saves=saves) as after:
        result = await after.generate(after.decode[0], talk.second, GREEDY, candidates=())
        assert result.token_ids == talk.expected
        assert result.trace.path == common_pb2.PREFILL_PATH_STORE
        # All but the last generated token have their KV computed when a request ends.
        known = len(FIRST) + NEW_TOKENS - 1 if saves else len(FIRST)
        assert result.trace.transferred_tokens == known // BLOCK * BLOCK
        await after.settle()
        await after.check_integrity()


async def test_what_came_from_the_store_does_not_go_back(model: Path, store: KVStoreServer) -> None:
    async with cluster(model, store) as one:
        await one.generate(one.decode[0], FIRST, GREEDY, candidates=())
        await one.settle()
    async with cluster(model, store) as two:
        result = await two.generate(two.decode[0], FIRST, GREEDY, candidates=())
        await two.settle()
        assert result.trace.transferred_tokens == len(FIRST) // BLOCK * BLOCK
        metrics = two.decode[0].context.base.metrics.registry
        assert metrics.get_sample_value("baton_store_saved_bytes_total") == 0
        generated = (len(FIRST) + NEW_TOKENS - 1) // BLOCK - len(FIRST) // BLOCK
        assert metrics.get_sample_value("baton_store_saved_blocks_total") == generated


async def test_a_prefill_instance_loads_what_decode_saved_instead_of_computing_it(
    model: Path, talk: Conversation, store: KVStoreServer
) -> None:
    """Decode has no store here, so the hand-over brings everything; most of it the prefill instance has loaded."""
    async with cluster(model, store) as before:
        await before.generate(before.decode[0], FIRST, GREEDY, candidates=())
        await before.settle()
    after = cluster(model, store)
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=200)
    after.decode = [WorkerInstance(Role.DECODE, WorkerConfig(instance_id="d"), engine)]
    async with after:
        result = await after.generate(after.decode[0], talk.second, GREEDY)
        assert result.token_ids == talk.expected
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        loaded = after.prefill[0].context.base.metrics.registry.get_sample_value("baton_store_loaded_tokens_total")
        assert loaded == (len(FIRST) + NEW_TOKENS - 1) // BLOCK * BLOCK
        await after.settle()
        await after.check_integrity()
