"""KV handed over through a pipe of another package, found by its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster
from tests.support.transport import file_pipe

from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.types import SamplingParams

PROMPT = list(range(20, 220))


async def test_tokens_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_pipe.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = make_checkpoint(tmp_path / "model", "llama")
    expected = hf_greedy(model, [PROMPT], 8)[0]
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=64, prefill_chunk=64)
    async with LocalCluster(engine, WorkerConfig(), decode_pipes=[("file", "tcp")]) as cluster:
        sampling = SamplingParams(temperature=0.0, max_tokens=8)
        result = await cluster.generate(cluster.decode[0], PROMPT, sampling)
        assert (result.token_ids, result.trace.pipe) == (expected, "file")
        await cluster.check_integrity()
