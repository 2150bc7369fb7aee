"""Instances of 2P2D are killed in the middle of answers under grammars and of tool calls: the undisturbed tokens.

More rounds: ``BATON_TEST_GRAMMAR_ROUNDS=20 python -m pytest tests/e2e/faults/test_grammar_faults.py``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.e2e.faults.test_faults import Round
from tests.support.servers.supervised import supervised

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.engine.llm import LLM
from baton.grammar import json_schema_grammar, lark_grammar, regex_grammar, structural_tag_grammar
from baton.types import FinishReason, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

ROUNDS = int(os.environ.get("BATON_TEST_GRAMMAR_ROUNDS") or 3)
NEW_TOKENS = 80
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "roles": {"type": "array", "items": {"enum": ["author", "editor", "reader"]}, "minItems": 1, "maxItems": 3},
        "home": CITY,
    },
    "required": ["name", "roles", "home"],
    "additionalProperties": False,
}
BEGIN, END = '<tool_call>\n{"name": "forecast", "arguments": ', "}\n</tool_call>"
CALL = f"start: {json.dumps(BEGIN)} %json {json.dumps(CITY)} {json.dumps(END)}"
TAG = {"structures": [{"begin": "<call:forecast>", "schema": CITY, "end": "</call>"}], "triggers": ["<call:"]}
GRAMMARS = [
    json_schema_grammar(PERSON),
    lark_grammar(CALL, kind="tool_call"),
    regex_grammar("([A-Z][a-z]{2,7} ){5}[0-9]{2,4}"),
    structural_tag_grammar(TAG),
]
FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": "forecast", "strict": True, "parameters": CITY}},
    {"type": "function", "function": {"name": "invite", "strict": True, "parameters": PERSON}},
]
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "invite"}}]
TOOL_JOBS: list[dict[str, Any]] = [
    {"text": 9 * f"Plan the journey {at} and tell everybody. ", "tool_choice": choice, "temperature": t, "seed": at}
    for at, (choice, t) in enumerate((choice, t) for choice in CHOICES for t in (0.0, 1.0))
]
"""Chats whose answers are calls; long enough that prefill instances compute them."""


@pytest.fixture(scope="module")
def jobs(model, texts) -> list[tuple[str, SamplingParams]]:
    return [
        (text[:2000], SamplingParams(temperature=temperature, seed=at, max_tokens=NEW_TOKENS, grammar=grammar))
        for at, (text, temperature) in enumerate(zip(texts, (0.0, 0.7, 0.0, 1.0, 0.0, 1.2), strict=True))
        for grammar in (GRAMMARS[at % len(GRAMMARS)], GRAMMARS[(at + 1) % len(GRAMMARS)])
    ]


@pytest.fixture(scope="module")
def expected(model, jobs) -> list[list[int]]:
    with LLM(model, dtype="float32", kv_blocks=1200) as llm:
        outputs = llm.generate([text for text, _ in jobs], [sampling for _, sampling in jobs])
    assert sum(output.finish_reason is FinishReason.STOP for output in outputs) >= len(jobs) // 2
    return [output.token_ids for output in outputs]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(model, starter):
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "1200", "--prefill-chunk", "128")
    decode = ("--remote-prefill-threshold", "32", "--prefill-stall-s", "4")
    plan = make_plan(ratio=Ratio(2, 2), extra=ExtraArgs(worker=worker, decode=decode))
    async with supervised(plan, starter) as supervisor:
        yield supervisor


async def call_tools(supervisor: Supervisor, i: int, *, streamed: bool, salt: str, moved=lambda _: None) -> list[str]:
    """Have a chat answered over HTTP; return how it ended, its text, and name and arguments of each call."""
    job = dict(TOOL_JOBS[i])
    messages: list[Any] = [{"role": "user", "content": job.pop("text")}]
    async with openai.AsyncOpenAI(
        base_url=f"http://{supervisor.plan.http_address}/v1", api_key="none", max_retries=0, timeout=240
    ) as api:
        fields = {"messages": messages, "tools": FUNCTIONS, "max_tokens": NEW_TOKENS, "parallel_tool_calls": False}
        body = {"extra_body": {"cache_salt": salt} if salt else {}}
        if not streamed:
            (choice,) = (await api.chat.completions.create(model="baton-tiny", **fields, **job, **body)).choices
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
            return [str(choice.finish_reason), choice.message.content or "", *(part for call in calls for part in call)]
        parts: list[list[str]] = []
        text, finish, begun = "", "", False
        async for chunk in await api.chat.completions.create(model="baton-tiny", stream=True, **fields, **job, **body):
            for choice in chunk.choices:
                moved(not begun)
                begun = True
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or []:
                    if call.index == len(parts):
                        parts.append([call.function.name, ""])
                    parts[call.index][1] += call.function.arguments or ""
        return [finish, text, *(part for call in parts for part in call)]


class GuidedRound(Round):
    """Every job twice at once, once as a stream, each under its grammar; behind them the chats that get calls."""

    def __init__(self, supervisor: Supervisor, jobs, expected, number: int) -> None:
        super().__init__(supervisor, [*(text for text, _ in jobs), *TOOL_JOBS], expected, number)
        self.samplings = [sampling for _, sampling in jobs]

    def options(self, i: int) -> dict:
        return {"sampling": self.samplings[i]}

    async def answer(self, client, i: int, streamed: bool, salt: str) -> None:
        at = i - len(self.samplings)
        if at < 0:
            await super().answer(client, i, streamed, salt)
            return
        found = await call_tools(self.supervisor, at, streamed=streamed, salt=salt, moved=self._moved)
        assert found == self.expected[i], f"{self.name}: tool job {at}, streamed {streamed}"

    def _moved(self, first: bool) -> None:
        self.progress.begun += first
        self.progress.tokens += 1
        self.progress.changed.set()


async def test_killed_instances_cost_no_token_under_a_grammar(deployment, jobs, expected):
    traces = []
    calls = [await call_tools(deployment, at, streamed=False, salt="") for at in range(len(TOOL_JOBS))]
    assert {finish for finish, *_ in calls} <= {"tool_calls", "length"}
    assert all(len(each) == 4 for each in calls)
    for number in range(ROUNDS):
        one = GuidedRound(deployment, jobs, [*expected, *calls], number)
        await one.run()
        await one.recover()
        traces += one.traces
        print(f"{one.name}: {sorted(one.dead)}, migrations {sum(t.num_migrations for t in one.traces)}")  # noqa: T201
    assert len(traces) == ROUNDS * 2 * len(jobs)
    if ROUNDS >= 3:
        assert sum(trace.num_migrations for trace in traces) > 0
