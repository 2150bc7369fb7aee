"""Grammars over prefill and decode instances: the same tokens as in one engine, wherever each of them is sampled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc.aio
import pytest
from tests.support.equality import References
from tests.support.preemption import expect_short_outputs
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.errors import InvalidRequestError
from baton.grammar import choice_grammar, json_schema_grammar, regex_grammar
from baton.rpc.errors import from_rpc_error
from baton.types import FinishReason, Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "name": {"type": "string", "maxLength": 12},
        "lives": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["kind", "name", "lives"],
    "additionalProperties": False,
}
GRAMMARS = [
    json_schema_grammar(SCHEMA),
    choice_grammar(["yes", "no", "perhaps"]),
    regex_grammar("([a-z]{3,6} ){4}[0-9]+"),
]
PROMPTS = [[7 + (i * 31 + at * 13) % 480 for at in range(20 + 17 * i)] for i in range(6)]
JOBS = [
    (prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=60, grammar=grammar))
    for i, prompt in enumerate(PROMPTS)
    for grammar in GRAMMARS
    for temperature in (0.0, 1.0)
]


def config(path: Path, **changes: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 400, "prefill_chunk": 64, "max_num_batched_tokens": 256, **changes}
    return EngineConfig(model=str(path), **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(references: References) -> Path:
    return references.checkpoint("llama")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    with LLM(config(path)) as llm:
        outputs = llm.generate([prompt for prompt, _ in JOBS], [sampling for _, sampling in JOBS])
    for (_, sampling), output in zip(JOBS, outputs, strict=True):
        if sampling.grammar == GRAMMARS[0] and output.finish_reason is FinishReason.STOP:
            assert json.loads(output.text).keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    assert sum(output.finish_reason is FinishReason.STOP for output in outputs) > len(JOBS) // 2
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("order", ["decode_first", "prefill_first"])
async def test_the_first_token_follows_the_grammar_too(path: Path, expected: list[list[int]], order: str) -> None:
    async with LocalCluster(config(path), num_prefill=2) as cluster:

        async def run(at: int) -> tuple[list[int], common_pb2.RequestTrace]:
            prompt, sampling = JOBS[at]
            prefilled = None
            if order == "prefill_first":
                prefilled = await cluster.prefill_first(cluster.prefill[at % 2], prompt, sampling)
            result = await cluster.generate(cluster.decode[0], prompt, sampling, prefilled=prefilled)
            return result.token_ids, result.trace

        results = await asyncio.gather(*map(run, range(len(JOBS))))
        assert [tokens for tokens, _ in results] == expected
        assert sum(trace.path == common_pb2.PREFILL_PATH_REMOTE for _, trace in results) > len(JOBS) // 3
        await cluster.check_integrity()


async def test_a_stream_goes_on_elsewhere_after_any_token(path: Path, expected: list[list[int]]) -> None:
    async with LocalCluster(config(path)) as cluster:

        async def run(at: int) -> list[int]:
            (prompt, sampling), tokens = JOBS[at], expected[at]
            cut = at * 7 % len(tokens)
            return (
                tokens[:cut]
                + (await cluster.generate(cluster.decode[0], prompt, sampling, output=tokens[:cut])).token_ids
            )

        assert await asyncio.gather(*map(run, range(len(JOBS)))) == expected
        await cluster.check_integrity()


async def test_preempted_sequences_go_on_in_their_grammar(path: Path, expected: list[list[int]]) -> None:
    async with LocalCluster(config(path), decode_changes={"kv_blocks": 24}) as cluster:
        core = cluster.decode[0].context.engine.core
        expect_short_outputs(core)
        results = await asyncio.gather(
            *(cluster.generate(cluster.decode[0], prompt, sampling, threshold=None) for prompt, sampling in JOBS)
        )
        assert [result.token_ids for result in results] == expected
        assert core.stats().num_preemptions > 0
        await cluster.check_integrity()


async def test_a_prefill_instance_that_knows_no_grammars_is_done_without(path: Path, expected: list[list[int]]) -> None:
    changes = {"grammar_backend": "auto"}
    async with LocalCluster(config(path, grammar_backend="none"), decode_changes=changes) as cluster:
        for at in (0, 1):
            prompt, sampling = JOBS[at]
            result = await cluster.generate(cluster.decode[0], prompt, sampling)
            assert result.token_ids == expected[at]
            assert result.trace.path == common_pb2.PREFILL_PATH_LOCAL


@pytest.mark.parametrize(
    ("grammar", "output", "field"),
    [
        (Grammar("grammar", "start: unknown"), [], "grammar"),
        (Grammar("grammar", ""), [], "grammar"),
        (Grammar("grammar", 'start: "a"', (9999,)), [], "grammar.start_token_ids"),
        (GRAMMARS[1], [300], "output_token_ids"),
    ],
)
async def test_instances_check_what_they_are_told(path: Path, grammar: Grammar, output: list[int], field: str) -> None:
    async with LocalCluster(config(path)) as cluster:
        sampling = SamplingParams(max_tokens=9, grammar=grammar)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.generate(cluster.decode[0], PROMPTS[0], sampling, output=output, candidates=())
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequestError)
        assert error.field == field
        await cluster.check_integrity()
