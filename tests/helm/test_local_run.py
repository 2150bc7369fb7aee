"""The chart's manifests run as local processes: they answer as ``generate`` does, and roll without a lost request."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, Self

import pytest

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install")
from tests.support.chart import ROOT, example, manifests
from tests.support.equality import hf_greedy
from tests.support.servers.pods import LocalKubernetes
from tests.support.servers.warm import WarmStarter

from baton.api.v1 import common_pb2
from baton.client import AsyncClient
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = ROOT / "models/baton-tiny"
NEW_TOKENS = 240
STREAMS = 20


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(str(MODEL))
    text = Path(__file__).read_text(encoding="utf-8")
    shared = tokenizer.encode(text)[:150]
    return [tokenizer.encode("def main():\n"), shared, [*shared, *tokenizer.encode("\n\nimport os\n")], shared[40:130]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return hf_greedy(MODEL, prompts, NEW_TOKENS)


def demo_values() -> dict[str, Any]:
    """The example cpu-demo, with what makes tokens comparable, hand-overs frequent and ends quick."""
    values = example("cpu-demo")
    values["worker"] |= {"preStopSleepS": 0}
    values["worker"]["flags"] |= {"dtype": "float32"}
    values["decode"] = {"flags": {"remote-prefill-threshold": 16}}
    values["router"] |= {"flags": {"drain-timeout-s": 150}}  # as long as answers take, on a busy machine too
    return values


async def answer(cluster: LocalKubernetes, prompt: list[int]) -> tuple[list[int], common_pb2.RequestTrace]:
    """Have one prompt answered as a stream, over a connection of its own."""
    key = cluster.secret("demo-baton-auth", "api-key")
    tokens: list[int] = []
    async with AsyncClient(cluster.endpoint("demo-baton", "grpc"), token=key) as client:
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
        async with await client.generate(prompt, stream=True, sampling=sampling) as stream:
            async for chunk in stream:
                tokens += chunk.token_ids
        assert stream.trace is not None
        return tokens, stream.trace


async def test_the_example_cpu_demo_answers_as_generate(
    prompts: list[list[int]], expected: list[list[int]], starter: WarmStarter, tmp_path: Path
) -> None:
    async with LocalKubernetes(manifests(demo_values()), tmp_path, starter) as cluster:
        assert (await cluster.helm_test()).startswith("baton-tiny")
        answers = [await answer(cluster, prompt) for prompt in prompts]
        assert [tokens for tokens, _ in answers] == expected
        assert "remote" in {trace.path for _, trace in answers}
        assert not any(pod.liveness_failures for pod in cluster.pods)


class Load:
    """Streams side by side that begin again as they end, each compared with what ``generate`` gives."""

    def __init__(self, cluster: LocalKubernetes, prompts: list[list[int]], expected: list[list[int]]) -> None:
        self._cluster, self._prompts, self._expected = cluster, prompts, expected
        self.failures: list[str] = []
        self.answered = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(STREAMS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self) -> None:
        """Wait until as many answers more have come as there are streams."""
        wanted = self.answered + STREAMS
        async with asyncio.timeout(240):
            while self.answered < wanted:
                assert not self.failures
                await asyncio.sleep(0.02)

    async def _run(self, stream: int) -> None:
        for index in itertools.count(stream):
            which = index % len(self._prompts)
            try:
                tokens, _ = await answer(self._cluster, self._prompts[which])
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return
            if tokens != self._expected[which]:
                self.failures.append(f"prompt {which}: {tokens}, not {self._expected[which]}")
            self.answered += 1


@pytest.mark.alone
async def test_every_role_rolls_under_load_without_a_lost_request(
    prompts: list[list[int]], expected: list[list[int]], starter: WarmStarter, tmp_path: Path
) -> None:
    values = demo_values()
    values["kvstore"] = {
        "enabled": True,
        "flags": {"capacity-bytes": 1 << 26, "disk-bytes": 1 << 28, "disk-segment-bytes": 1 << 24},
    }
    async with (
        LocalKubernetes(manifests(values), tmp_path, starter) as cluster,
        Load(cluster, prompts, expected) as load,
    ):
        for role in ("prefill", "decode", "kvstore", "router"):
            await load.more()
            (before,) = cluster.of(f"demo-baton-{role}")
            await cluster.roll(f"demo-baton-{role}")
            (after,) = cluster.of(f"demo-baton-{role}")
            assert after is not before
            await load.more()
            assert load.failures == []
        assert len(cluster.ended) == 4
        assert not [pod.name for pod in cluster.ended if pod.killed or pod.process.poll() != 0]
        assert not any(pod.liveness_failures for pod in [*cluster.pods, *cluster.ended])


async def test_instances_that_come_are_used_and_one_that_never_gets_ready_changes_nothing(
    prompts: list[list[int]], expected: list[list[int]], starter: WarmStarter, tmp_path: Path
) -> None:
    async with LocalKubernetes(manifests(demo_values()), tmp_path, starter) as cluster:
        (stuck,) = await cluster.scale("demo-baton-prefill", 2, held=True)
        await cluster.scale("demo-baton-prefill", 4)
        wanted = {pod.name for pod in cluster.of("demo-baton-prefill")} - {stuck.name}
        async with asyncio.timeout(240):
            while not await stuck.probe(
                "readinessProbe"
            ):  # it would serve, but the cluster does not say that it is ready
                await asyncio.sleep(0.05)
        seen: set[str] = set()
        async with asyncio.timeout(240):
            for number in itertools.count():
                fresh = [8 + (number * 97 + i * 7) % 400 for i in range(80)]  # nothing of it is cached
                _, trace = await answer(cluster, fresh)
                seen |= {trace.prefill_instance} - {""}
                if seen >= wanted:
                    break
        assert seen == wanted
        assert [tokens for tokens, _ in [await answer(cluster, prompt) for prompt in prompts]] == expected
