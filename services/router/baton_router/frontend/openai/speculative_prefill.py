"""Computes what the next turn of a conversation begins with, in idle capacity, when a turn has ended.

An answer is in the cache as it was generated. In the next turn the chat template renders it as history, which may be
other tokens: without the reasoning, without an empty ``<think>`` block, trimmed. So the next prompt would have to
compute the whole answer. What the next prompt begins with is what two renderings of the conversation have in common
that end with different further messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from baton.background import create_task
from baton.errors import BatonError
from baton.token_ids import TokenIds
from baton.types import BACKGROUND_PRIORITY, SamplingParams
from baton_router.admission.background import BackgroundSlots
from baton_router.dispatch.interface import RoutedChunk, Running
from baton_router.frontend.openai.answer import Choice, message_of, parse_delta
from baton_router.frontend.openai.openai_request import parse_messages
from baton_router.metrics import Counter
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.text_request import ChatPrompt, PreparedRequest, TextRequest
from baton_router.types import ModelInfo

log = logging.getLogger(__name__)

LEAST_TOKENS = 16
"""Tokens that are worth a request of their own."""
_MOST_WAITING = 64
"""Conversations that are worked on at once; of more, the next turns are not prefilled."""
_WAIT_S = 10.0
"""Longest wait for idle capacity: the next turn has probably begun by then."""
_ENDINGS = ("a", "B")
"""Contents of two further messages; they have no beginning in common."""


class _Prefill:
    """The sink of a request that is only to compute its prompt. Used once.

    Attributes:
        outcome: Result is ``done``, ``interrupted`` or ``failed``.
    """

    def __init__(self) -> None:
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running: Running | None = None

    def start(self, processor: InputProcessor, prepared: PreparedRequest) -> None:
        running = processor.start_prefill(prepared, self)
        if self.outcome.done():
            running.cancel()
        else:
            self._running = running

    def on_chunk(self, chunk: RoutedChunk) -> None:
        """Ignore a chunk: the answer is not read."""

    def on_end(self, error: Exception | None) -> None:
        self._end("done" if error is None else "failed")

    def token_writer(self, *_: object) -> None:
        """Return no writer."""

    def interrupt(self) -> None:
        """End the request on all instances: its capacity is needed."""
        self._end("interrupted")

    def _end(self, outcome: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
        if self._running is not None:
            self._running.cancel()
            self._running = None


class SpeculativePrefill:
    """Prefills next turns.

    Args:
        processor: Tokenizes and runs the prompts.
        slots: Idle capacity.
        registry: Registry for the metrics.
    """

    def __init__(self, processor: InputProcessor, slots: BackgroundSlots, registry: CollectorRegistry) -> None:
        self._processor = processor
        self._slots = slots
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = Counter(
            "baton_router_speculative_prefills", "Prefills of next turns, by outcome", ["outcome"], registry
        )

    def start(self, prepared: PreparedRequest, answer: Choice) -> None:
        """Begin to compute what the turn after an answer begins with; returns at once."""
        if len(self._tasks) >= _MOST_WAITING:
            self._ended.labels("busy").inc()
            return
        task = create_task(self._run(prepared, answer), "speculative prefill", detail=prepared.routed.request_id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, prepared: PreparedRequest, answer: Choice) -> None:
        try:
            outcome = await self._prefill(prepared, answer)
        except BatonError as error:
            log.debug("the turn after %s is not prefilled: %s", prepared.routed.request_id, error)
            outcome = "failed"
        self._ended.labels(outcome).inc()

    async def _prefill(self, prepared: PreparedRequest, answer: Choice) -> str:
        ids = await self._next_prompt(prepared, answer)
        routed = prepared.routed
        held = num_common([*routed.prompt_token_ids, *answer.ids], ids)
        if len(ids) - held < LEAST_TOKENS or len(ids) >= prepared.info.max_model_len:
            return "held"
        request = prepared.request
        account = request.account
        work = await self._processor.prepare(
            TextRequest(
                ids,
                SamplingParams(max_tokens=1, temperature=0.0),
                model=request.model,
                cache_salt=request.cache_salt,
                priority=BACKGROUND_PRIORITY,
                session=request.session,
                user=request.user,
                account=account,
            ),
            fallback_id="prefill",
        )

        def make() -> _Prefill | None:
            return _Prefill() if self._slots.may_run(account) else None

        try:
            async with asyncio.timeout(_WAIT_S):
                prefill = await self._slots.acquire(routed.tenant, make)
        except TimeoutError:
            return "busy"
        try:
            prefill.start(self._processor, work)
            return await prefill.outcome
        finally:
            prefill.interrupt()
            self._slots.release(prefill)

    async def _next_prompt(self, prepared: PreparedRequest, answer: Choice) -> TokenIds:
        """Return the tokens that the next turn's prompt begins with."""
        request = prepared.request
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt)
        events = parse_delta(prepared.parser(), answer.whole())
        # Clients that send reasoning back have done so before.
        message = message_of(events, reasoning=any("reasoning_content" in each for each in prompt.messages))
        first, second = [
            await self._tokenize(request, prompt, [message, _next_message(message, ending)], prepared.info)
            for ending in _ENDINGS
        ]
        return first[: num_common(first, second)]

    async def _tokenize(
        self, request: TextRequest, prompt: ChatPrompt, further: list[dict[str, Any]], info: ModelInfo
    ) -> TokenIds:
        messages = [*prompt.messages, *parse_messages(further)]
        longer = msgspec.structs.replace(
            prompt, messages=messages, add_generation_prompt=False, continue_final_message=False
        )
        return await self._processor.tokenize(msgspec.structs.replace(request, prompt=longer), info)


def _next_message(answer: dict[str, Any], content: str) -> dict[str, Any]:
    """Return the message that probably follows an answer: a call's result, or the user's."""
    if calls := answer.get("tool_calls"):
        return {"role": "tool", "tool_call_id": calls[0]["id"], "content": content}
    return {"role": "user", "content": content}


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
