"""Costly grammars of one tenant: whose turns they take, and against whose limits they count."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.support.scripted import INFO, ScriptedDispatcher
from tests.unit.router.frontend.test_grammar_process import BOMBS
from tests.unit.router.frontend.test_openai_pipeline import GREEDY, pipeline
from tests.unit.router.test_router_accounts import limited

from baton.config.router import RouterConfig
from baton.errors import InvalidRequestError, QueueFullError
from baton.grammar import StructuredOutputs
from baton_router.admission.gate import Admission
from baton_router.processor.grammars import GrammarCache, GrammarMetrics
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.text_request import TextRequest
from baton_router.processor.turns import TenantTurns

SMALL = StructuredOutputs(regex="a+")
LONG = "def f(x):\n" * 500
"""A prompt that is tokenized in a thread."""


@pytest.fixture
def cache() -> Iterator[GrammarCache]:
    """Two processes, both of them started."""
    made = GrammarCache(GrammarMetrics(CollectorRegistry()))
    made.make(SMALL, "")
    made._processes._starter.submit(lambda: None).result()
    yield made
    for pid in pids(made):
        os.kill(pid, signal.SIGCONT)
    made.close()


def pids(cache: GrammarCache) -> list[int]:
    """Return the ids of a cache's processes, the one that is asked next first."""
    return [process._child.pid for process in reversed(cache._processes._free.queue) if process._child is not None]


def processor(cache: GrammarCache, **options: Any) -> InputProcessor:
    dispatcher = ScriptedDispatcher()
    dispatcher.info = dataclasses.replace(INFO, grammars=True)
    return pipeline(dispatcher, grammars=cache, **options)


def guided(tenant: str, pattern: str) -> TextRequest:
    return TextRequest("x", GREEDY, structured=StructuredOutputs(regex=pattern), cache_salt=tenant)


async def test_neither_prompts_nor_grammars_of_others_wait_for_a_tenants_grammars(cache: GrammarCache) -> None:
    text = processor(cache)
    await text.prepare(TextRequest("x", GREEDY))  # the tokenizer is loaded
    (asked_next, *_) = pids(cache)
    os.kill(asked_next, signal.SIGSTOP)  # as if its grammar took for ever
    costly = [asyncio.create_task(text.prepare(guided("mallory", f"m{at}"))) for at in range(3)]
    while not text._grammar_threads.turns._running:
        await asyncio.sleep(0)
    await asyncio.gather(*(text.prepare(guided("bob", f"b{at}")) for at in range(3)))
    assert len(await text.tokenize(TextRequest(LONG, GREEDY), text.model_info())) > 1000
    assert not any(task.done() for task in costly)
    os.kill(asked_next, signal.SIGCONT)
    await asyncio.gather(*costly)


async def test_prompts_do_not_wait_where_all_processes_are_busy(cache: GrammarCache) -> None:
    text = processor(cache)
    await text.prepare(TextRequest("x", GREEDY))
    stopped = pids(cache)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    costly = [asyncio.create_task(text.prepare(guided(name, "c+"))) for name in ("mallory", "oscar")]
    while text._grammar_threads.turns._free:
        await asyncio.sleep(0)
    assert len(await text.tokenize(TextRequest(LONG, GREEDY), text.model_info())) > 1000
    assert not any(task.done() for task in costly)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*costly)


async def test_the_time_of_a_grammar_counts_against_its_tenants_limits(cache: GrammarCache) -> None:
    admission = Admission(cast(Any, None), cast(Any, None), RouterConfig(), CollectorRegistry())
    text = processor(cache, admission=admission)
    account = limited(tokens_per_minute=10_000)
    bomb = BOMBS["multiples"]
    with pytest.raises(InvalidRequestError, match="costs too much"):
        await text.prepare(TextRequest("x", GREEDY, structured=bomb, account=account))
    with pytest.raises(QueueFullError, match="10000 tokens a minute"):
        await text.prepare(TextRequest("x", GREEDY, account=account))


async def test_a_tenant_leaves_turns_to_others() -> None:
    turns = TenantTurns(2, per_tenant=1)
    await turns.acquire("a")
    second = asyncio.ensure_future(turns.acquire("a"))
    third = asyncio.ensure_future(turns.acquire("a"))
    await asyncio.wait_for(turns.acquire("b"), 240)
    waiting = asyncio.ensure_future(turns.acquire("c"))
    await asyncio.sleep(0)
    assert not second.done()
    turns.release("b")
    await waiting  # and not the second one of a, which came before it
    assert not second.done()
    third.cancel()
    turns.release("a")
    await second
    turns.release("a")
    turns.release("c")
    await turns.acquire("a")
    await turns.acquire("b")
    assert not turns._waiting
