"""Prefill and decode of different dtypes: decode goes on with the KV that it was given, converted.

The reference knows nothing of Baton: one Hugging Face model computes the prompt in the source's dtype, its
``past_key_values`` are converted with ``Tensor.to``, and another one goes on with them in the target's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.supervised import supervised
from tests.support.servers.warm import WarmStarter
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from baton.api.v1 import common_pb2
from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import DeploymentPlan, Supervisor
from baton.client import AsyncClient
from baton.config import EngineConfig
from baton.config.kvstore import KVStoreConfig
from baton.config.worker import WorkerConfig
from baton.engine.models.loader import quiet_transformers
from baton.kv_transfer.connector.p2p.prefill_stream import HeldBlocks
from baton.kv_transfer.connector.p2p.producer import P2PReuser
from baton.types import PrefillPath, RequestId, SamplingParams
from baton_kvstore.server import KVStoreServer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

MODEL = str(Path(__file__).resolve().parents[4] / "models" / "baton-tiny")
NEW_TOKENS = 6
MOST_REQUESTS = 150
ANSWERS = 2
"""Answers of each pair that are compared."""
SETTLE_S = 240.0
CLEAR = 0.15
"""By how much a token must lead to be compared: in bfloat16 another order of additions moves logits by a tenth."""
LEAST_COMPARED = 3
"""Tokens of an answer that must be compared for it to count: one of prefill, the others of decode."""

WORKERS = {
    "prefill-0": ("float32", "--tp", "2"),
    "prefill-1": ("bfloat16",),
    "decode-0": ("bfloat16", "--kv-cast", "--block-size", "32"),
    "decode-1": ("float32", "--kv-cast"),
    "decode-2": ("bfloat16",),
}
"""Dtype and flags of each instance."""


class Reference:
    """Hugging Face models of one checkpoint, one per dtype."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._models: dict[str, Any] = {}

    def model(self, dtype: str) -> Any:
        if dtype not in self._models:
            with quiet_transformers():
                self._models[dtype] = (
                    cast(Any, AutoModelForCausalLM)
                    .from_pretrained(self._path, dtype=getattr(torch, dtype), attn_implementation="eager")
                    .eval()
                )
        return self._models[dtype]

    @torch.inference_mode()
    def greedy(self, prompt: list[int], source: str, target: str) -> list[int]:
        """Prefill in one dtype and decode in another; returns the tokens up to the first that hangs on a rounding."""
        computed = self.model(source)(torch.tensor([prompt]), use_cache=True)
        past, kind = DynamicCache(), getattr(torch, target)
        for index, layer in enumerate(computed.past_key_values.layers):
            past.update(layer.keys.to(kind), layer.values.to(kind), index)
        tokens, logits = list[int](), computed.logits[0, -1].float()
        while len(tokens) < NEW_TOKENS:
            best = logits.topk(2)
            if best.values[0] - best.values[1] < CLEAR:
                break
            tokens.append(int(best.indices[0]))
            logits = self.model(target)(torch.tensor([tokens[-1:]]), past_key_values=past).logits[0, -1].float()
        return tokens


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL)


def prompts() -> Iterator[list[int]]:
    """Code that no two have a beginning of in common, so that nobody's prefix cache mixes dtypes."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    folder = Path(__file__).resolve().parents[4] / "src" / "baton" / "kv_cache"
    text = [token for file in sorted(folder.glob("*.py")) for token in tokenizer(file.read_text()[:6000])["input_ids"]]
    rng = random.Random(0)
    for number in range(MOST_REQUESTS):
        first = rng.randrange(len(text) - 50)
        yield [300 + number, *(text[first : first + rng.choice((9, 17, 40))] * 30)[: rng.randrange(70, 180)]]


def plan() -> DeploymentPlan:
    extra = ExtraArgs(
        worker=("--model", MODEL, "--kv-blocks", "200", "--remote-prefill-threshold", "16"),
        router=("--policy", "random", "--policy-seed", "1"),
    )
    made = make_plan(ratio=Ratio(2, 3), extra=extra)
    workers = tuple(
        dataclasses.replace(x, args=(*x.args, "--dtype", WORKERS[x.name][0], *WORKERS[x.name][1:]))
        for x in made.workers
    )
    return dataclasses.replace(made, workers=workers)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(starter: WarmStarter) -> AsyncIterator[Supervisor]:
    async with supervised(plan(), starter) as supervisor:
        yield supervisor


async def test_decode_goes_on_with_what_prefill_computed_in_another_dtype(
    deployment: Supervisor, reference: Reference
) -> None:
    """Two prefill and three decode instances of two dtypes: TP 2 to 1 and blocks of 16 to 32 tokens among the pairs."""
    pairs = {(p, d) for p in ("prefill-0", "prefill-1") for d in ("decode-0", "decode-1")} | {("prefill-1", "decode-2")}
    seen: Counter[tuple[str, str]] = Counter()
    async with AsyncClient(deployment.plan.grpc_address, timeout=240, retries=0) as client:
        for prompt in prompts():
            result = await client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS)
            trace = result.trace
            assert trace is not None
            assert trace.path == PrefillPath.REMOTE
            # On a busy machine an instance may be too late for that, and another one computes it.
            assert all("did not acknowledge" in failure for failure in trace.failed_prefills), trace.failed_prefills
            pair = trace.prefill_instance, trace.decode_instance
            expected = reference.greedy(prompt, WORKERS[pair[0]][0], WORKERS[pair[1]][0])
            assert result.token_ids[: len(expected)] == expected, pair
            if len(expected) >= LEAST_COMPARED:
                seen[pair] += 1
            if set(seen) == pairs and min(seen.values()) >= ANSWERS:
                return
    raise AssertionError(f"seen were only {seen}")


async def test_nothing_is_left_behind(deployment: Supervisor) -> None:
    async with AsyncClient(deployment.plan.grpc_address, timeout=240, retries=0) as client, asyncio.timeout(SETTLE_S):
        while any(x.in_flight or x.load.blocks_active for x in await client.list_instances()):
            await asyncio.sleep(0.05)


PROMPT = list(range(10, 110))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


def config(model: str, **changes: Any) -> EngineConfig:
    return EngineConfig(model=model, dtype="float32", kv_blocks=64, **changes)


async def test_without_the_flag_kv_of_another_dtype_is_refused_by_field_and_flag(small: str) -> None:
    async with LocalCluster(config(small), decode_changes={"dtype": "bfloat16"}) as cluster:
        result = await cluster.generate(cluster.decode[0], PROMPT, GREEDY)
        (failure,) = result.trace.failed_prefills
        assert "kv_dtype" in failure
        assert "--kv-cast" in failure
        assert (result.trace.local_reason, result.trace.kv_bytes) == ("prefill_failed", 0)
        await cluster.check_integrity()


async def _prefilled(cluster: LocalCluster) -> int:
    engine = cluster.prefill[0].context.engine
    return int((await engine.call(engine.core.stats)).prefill_tokens)


@pytest.mark.parametrize("both", [False, True])
async def test_what_may_have_been_converted_goes_back_only_to_who_converts(
    small: str, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn: a prefill instance that does not convert computes what decode holds, and asks for none of it."""
    expected: list[HeldBlocks] = []
    expect = P2PReuser.expect

    def noted(self: P2PReuser, request_id: RequestId, held: HeldBlocks) -> None:
        expected.append(held)
        expect(self, request_id, held)

    monkeypatch.setattr(P2PReuser, "expect", noted)
    changes = {"dtype": "bfloat16", "kv_cast": True}
    async with LocalCluster(config(small, kv_cast=both), decode_changes=changes) as cluster:
        first = await cluster.generate(cluster.decode[0], PROMPT, SamplingParams(temperature=0.0, max_tokens=80))
        turn = [*PROMPT, *first.token_ids, *range(200, 300)]
        before = await _prefilled(cluster)
        second = await cluster.generate(cluster.decode[0], turn, GREEDY)
        assert [x.trace.path for x in (first, second)] == [common_pb2.PREFILL_PATH_REMOTE] * 2
        new = await _prefilled(cluster) - before
        assert len(expected) == both
        assert new < 130 if both else new >= len(turn) - 112, new
        await cluster.check_integrity()


@pytest_asyncio.fixture(loop_scope="module")
async def store() -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(KVStoreConfig(capacity_bytes=64 * 2**20))
    await server.start()
    yield server
    await server.stop(0)


async def test_a_store_keeps_what_was_converted_apart(small: str, store: KVStoreServer) -> None:
    use = WorkerConfig(kvstore=store.address)
    changes = {"dtype": "bfloat16", "kv_cast": True}
    async with LocalCluster(config(small), use, decode_changes=changes) as cluster:
        first = await cluster.generate(cluster.decode[0], PROMPT, GREEDY)
        assert first.trace.path == common_pb2.PREFILL_PATH_REMOTE
        await cluster.check_integrity()
    found: dict[tuple[str, bool], int] = {}
    for dtype in ("float32", "bfloat16"):
        for kv_cast in (False, True):
            changes = {"dtype": dtype, "kv_cast": kv_cast}
            async with LocalCluster(config(small), use, num_prefill=0, decode_changes=changes) as cluster:
                result = await cluster.generate(cluster.decode[0], PROMPT, GREEDY)
                found[dtype, kv_cast] = result.trace.transferred_tokens
                if dtype == "float32":
                    assert result.token_ids == hf_greedy(small, [PROMPT], NEW_TOKENS)[0]
                elif kv_cast:
                    assert result.token_ids == first.token_ids
                await cluster.check_integrity()
    whole = len(PROMPT) // 16 * 16
    # What prefill computed is found by its like, what decode converted by its own; nobody finds anything else.
    assert found == {
        ("float32", False): whole,
        ("float32", True): 0,
        ("bfloat16", False): 0,
        ("bfloat16", True): whole,
    }
