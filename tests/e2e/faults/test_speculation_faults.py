"""Instances of 2P2D that speculate in different ways, or not at all, are killed: the same tokens, to the last one."""

from __future__ import annotations

import dataclasses
import os

import pytest
import pytest_asyncio
from tests.e2e.faults.test_faults import Round
from tests.support.servers.supervised import supervised

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.engine.llm import LLM
from baton.types import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

ROUNDS = int(os.environ.get("BATON_TEST_SPECULATION_ROUNDS") or 2)
NEW_TOKENS = 80
WAYS = {
    "mixed": {"prefill-1": ("ngram", 4, 1), "decode-0": ("suffix", None, 4), "decode-1": ("ngram", 5, 1)},
    "decode": {"decode-0": ("suffix", 6, 1), "decode-1": ("suffix", 6, 2)},
    "prefill": {"prefill-0": ("ngram", 4, 1), "prefill-1": ("suffix", None, 2)},
}
"""Per instance its method, number of draft tokens and width of their trees; of those not named, none."""
WAY = os.environ.get("BATON_TEST_SPECULATION_WAY") or "mixed"


@pytest.fixture(scope="module")
def jobs(texts) -> list[tuple[str, SamplingParams]]:
    ways = [
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, max_tokens=NEW_TOKENS),
    ]
    return [(text[:2000], ways[at % 3].replace(seed=at)) for at, text in enumerate([*texts, *texts[:3]])]


@pytest.fixture(scope="module")
def expected(model, jobs) -> list[list[int]]:
    with LLM(model, dtype="float32", kv_blocks=1200) as llm:
        outputs = llm.generate([text for text, _ in jobs], [sampling for _, sampling in jobs])
    return [output.token_ids for output in outputs]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(model, starter):
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "1200", "--prefill-chunk", "128")
    decode = ("--remote-prefill-threshold", "32", "--prefill-stall-s", "4")
    plan = make_plan(ratio=Ratio(2, 2), extra=ExtraArgs(worker=worker, decode=decode))
    workers = []
    for spec in plan.workers:
        method, tokens, width = WAYS[WAY].get(spec.name, ("none", None, 1))
        own = ("--speculative", method, "--speculative-width", str(width))
        own += () if tokens is None else ("--speculative-tokens", str(tokens))
        workers.append(dataclasses.replace(spec, args=(*spec.args, *own)))
    plan = dataclasses.replace(plan, workers=tuple(workers))
    async with supervised(plan, starter) as supervisor:
        yield supervisor


class SampledRound(Round):
    """Every job twice at once, once as a stream."""

    def __init__(self, supervisor: Supervisor, jobs, expected, number: int) -> None:
        super().__init__(supervisor, [text for text, _ in jobs], expected, number)
        self.samplings = [sampling for _, sampling in jobs]

    def options(self, i: int) -> dict:
        return {"sampling": self.samplings[i]}


async def test_killed_instances_cost_no_token_whoever_speculates(deployment, jobs, expected):
    traces = []
    for number in range(ROUNDS):
        one = SampledRound(deployment, jobs, expected, number)
        await one.run()
        await one.recover()
        traces += one.traces
        print(  # noqa: T201
            f"{WAY}, {one.name}: {sorted(one.dead)}, migrations {sum(t.num_migrations for t in one.traces)}, "
            f"accepted {sum(t.accepted_tokens for t in one.traces)} of {sum(t.drafted_tokens for t in one.traces)}"
        )
    assert len(traces) == ROUNDS * 2 * len(jobs)
    speculates = any(name.startswith("decode") for name in WAYS[WAY])
    assert (sum(trace.accepted_tokens for trace in traces) > 0) == speculates
