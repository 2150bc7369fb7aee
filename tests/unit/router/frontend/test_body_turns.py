"""Bodies that take long to parse are parsed one per turn of the event loop, in turns of their tenants."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from prometheus_client import CollectorRegistry

from baton_router.dispatch.event_loop import TurnBatcher
from baton_router.frontend.http.bodies import SMALL_BYTES
from baton_router.frontend.http.middleware import HttpMetrics, HttpOptions
from baton_router.frontend.http.protocol import Exchange
from baton_router.frontend.openai.generation import PlainEndpoint, PostEndpoints
from baton_router.frontend.openai.schemas import TokenizeBody
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.turns import TenantTurns
from baton_router.types import Account

PATH = "/tokenize"


class Turn:
    """Counts the turns of the event loop, and whose bodies are parsed in each."""

    def __init__(self) -> None:
        self.number = 0
        self.parsed: list[tuple[int, str]] = []
        self._counting = True
        asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        if self._counting:
            asyncio.get_running_loop().call_soon(self._count)

    async def answer(self, body: Any, account: Account | None) -> dict[str, Any]:
        assert account is not None
        self.parsed.append((self.number, account.name))
        return {}

    def end(self) -> None:
        self._counting = False


class Asked(Exchange):
    """A request of a tenant."""

    def __init__(self, tenant: str) -> None:
        self.path, self.headers, self.request_id, self.status = PATH, [], "id", 0
        self.account = cast(Account, SimpleNamespace(name=tenant))
        self.chunked, self.on_gone, self.on_flow = False, None, None
        self.answered = asyncio.Event()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.status = status
        self.answered.set()


@pytest.mark.parametrize("body", [{"prompt": "x" * SMALL_BYTES}, {"prompt": "x", "previous_response_id": "resp_1"}])
async def test_one_body_is_parsed_per_turn_of_the_loop_and_tenants_alternate(body: dict[str, Any]) -> None:
    turn = Turn()
    endpoints = PostEndpoints(
        cast(InputProcessor, SimpleNamespace(turns=TenantTurns(1))),
        HttpOptions(),
        HttpMetrics(CollectorRegistry()),
        TurnBatcher(),
        {PATH: PlainEndpoint(TokenizeBody, turn.answer)},
    )
    asked = [Asked("many") for _ in range(20)] + [Asked("one")]
    for exchange in asked:
        endpoints.serve(exchange, orjson.dumps(body))
    async with asyncio.timeout(60):
        await asyncio.gather(*(exchange.answered.wait() for exchange in asked))
    turn.end()
    assert {exchange.status for exchange in asked} == {200}
    assert len({number for number, _ in turn.parsed}) == len(asked)
    assert [tenant for _, tenant in turn.parsed].index("one") <= 2
