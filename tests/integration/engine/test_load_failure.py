"""What happens to a request whose KV does not come: computed here, or failed, as the operator wants."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.config import EngineConfig
from baton.types import SamplingParams

PROMPT = list(range(10, 110))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
NOBODY = ["127.0.0.1:1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def config(model: Path, policy: str) -> EngineConfig:
    return EngineConfig(model=str(model), dtype="float32", kv_blocks=64, kv_load_failure=policy)


async def test_recompute_gives_the_right_tokens(model: Path) -> None:
    async with LocalCluster(config(model, "recompute")) as cluster:
        result = await cluster.generate(cluster.decode[0], PROMPT, GREEDY, candidates=NOBODY)
        assert result.token_ids == hf_greedy(model, [PROMPT], 8)[0]
        assert result.trace.local_reason == "prefill_failed"
        await cluster.check_integrity()


async def test_fail_says_why_and_gives_everything_back(model: Path) -> None:
    async with LocalCluster(config(model, "fail")) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="its KV could not be loaded") as failed:
            await cluster.generate(cluster.decode[0], PROMPT, GREEDY, candidates=NOBODY)
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        await cluster.check_integrity()
        result = await cluster.generate(cluster.decode[0], PROMPT, GREEDY)  # a prefill instance that is there
        assert result.token_ids == hf_greedy(model, [PROMPT], 8)[0]
        await cluster.check_integrity()
