"""A dispatcher that answers from a script, with the demo model's tokenizer: for tests above the router's seam."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.api.v1 import common_pb2
from baton.errors import BatonError
from baton.tokenizer import TextModel, TokenDelta
from baton.types import FinishReason, InstanceId, Role, SamplingParams, TokenLogprob
from baton_router.dispatch.interface import ChunkSink, RoutedChunk
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.policies import Ratings, Scores, Side
from baton_router.scheduler.policy import Choice
from baton_router.types import ModelInfo, RoutedRequest

TINY = Path(__file__).parents[2] / "models" / "baton-tiny"
MODEL = TextModel.load(TINY)
EOS = 4
INFO = ModelInfo("baton-tiny", str(TINY), 256, 4096, frozenset({2, 4}))
ANSWER = "def add(a, b):\n    # naïve 👩‍👩‍👧‍👦 日本\n    return a + b\n"


def encode(text: str) -> list[int]:
    return MODEL.tokenizer.encode(text, add_special_tokens=False)


def logprob(token_id: int, top: int) -> TokenLogprob:
    """A made-up but consistent value: the token itself comes second."""
    others = [token_id + 1, token_id, *range(token_id + 2, token_id + 22)]
    values = tuple((other % 4096, -0.5 * rank) for rank, other in enumerate(others, 1))
    return TokenLogprob(token_id, -1.0, 2, values[:top])


def _is_plain(chunk: RoutedChunk) -> bool:
    """Whether a chunk behind the first one is tokens of the first sequence and nothing else."""
    if len(chunk.deltas) != 1 or chunk.trace is not None or chunk.decision is not None:
        return False
    (delta,) = chunk.deltas
    ends = delta.finish_reason is not None or delta.stop_token_id is not None
    return not (delta.index or delta.logprobs or ends)


class ScriptedRun:
    """A task that hands on what a dispatcher's ``stream`` yields."""

    def __init__(self, dispatcher: ScriptedDispatcher, request: RoutedRequest, sink: ChunkSink) -> None:
        self._dispatcher = dispatcher
        dispatcher.open_streams += 1
        self._open = True
        self._flow = asyncio.Event()
        self._flow.set()
        self._task = asyncio.create_task(self._run(dispatcher.stream(request), sink))

    async def _run(self, chunks: AsyncIterator[RoutedChunk], sink: ChunkSink) -> None:
        failure: Exception | None = None
        begun = False
        try:
            async for chunk in chunks:
                await self._flow.wait()
                chunk.plain = begun and _is_plain(chunk)
                sink.on_chunk(chunk)
                begun = True
        except Exception as error:
            failure = error
        self._close(early=failure is not None)
        sink.on_end(failure)

    def _close(self, *, early: bool) -> None:
        if self._open:
            self._open = False
            self._dispatcher.closed_early += early
            self._dispatcher.open_streams -= 1  # last: it is what threads of tests wait for
            self._dispatcher.changed.set()

    def cancel(self) -> None:
        self._close(early=True)
        self._task.cancel()

    def set_paused(self, paused: bool) -> None:
        if paused:
            self._flow.clear()
        else:
            self._flow.set()


@dataclass
class ScriptedDispatcher:
    """Answers with the tokens of ``script``; a request with a temperature gets random ones drawn from its seed.

    Attributes:
        per_chunk: Tokens of each sequence per message.
        hang_after: Messages after which the stream waits for ever (until it is closed).
        fail_after: Messages after which ``error`` is raised.
        requests: Everything that came.
        open_streams: Streams that are running now.
        closed_early: Streams that were closed before they had ended.
    """

    script: Callable[[RoutedRequest, int], list[int]] = lambda request, index: encode(ANSWER)
    per_chunk: int = 1
    hang_after: int | None = None
    fail_after: int | None = None
    error: Exception | None = None
    info_error: BatonError | None = None
    info: ModelInfo = INFO
    requests: list[RoutedRequest] = field(default_factory=list)
    open_streams: int = 0
    closed_early: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def model_info(self) -> ModelInfo:
        if self.info_error is not None:
            raise self.info_error
        return self.info

    async def route(self, request: RoutedRequest) -> Decision:
        return self._decision(request)

    def start(self, request: RoutedRequest, sink: ChunkSink) -> ScriptedRun:
        self.requests.append(request)
        return ScriptedRun(self, request, sink)

    async def stream(self, request: RoutedRequest) -> AsyncIterator[RoutedChunk]:
        for count, chunk in enumerate(self._chunks(request)):
            if count == self.fail_after and self.error is not None:
                raise self.error
            if count == self.hang_after:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            yield chunk

    def _chunks(self, request: RoutedRequest) -> list[RoutedChunk]:
        sequences = [self._sequence(request, index) for index in range(request.sampling.n)]
        longest = max(len(ids) for ids, _, _ in sequences)
        chunks = []
        for begin in range(0, longest, self.per_chunk):
            end = begin + self.per_chunk
            deltas = []
            for index, (ids, reason, stop) in enumerate(sequences):
                new = ids[begin:end]
                if not new:
                    continue
                last = end >= len(ids)
                top = request.sampling.logprobs
                values = [] if top is None else [logprob(token_id, top) for token_id in new]
                deltas.append(TokenDelta(index, new, values, reason if last else None, stop if last else None))
            first, final = begin == 0, end >= longest
            chunks.append(
                RoutedChunk(
                    deltas,
                    trace=self._trace(request) if first or final else None,
                    decision=self._decision(request) if first else None,
                    prompt_logprobs=self._prompt_logprobs(request) if first else None,
                )
            )
        return chunks

    def _sequence(self, request: RoutedRequest, index: int) -> tuple[list[int], FinishReason, int | None]:
        sampling = request.sampling
        assert sampling.max_tokens is not None
        assert sampling.seed is not None
        ids = [*self.script(request, index), EOS] if sampling.temperature == 0 else _random_ids(sampling, index)
        for at, token_id in enumerate(ids[: sampling.max_tokens]):
            ends = token_id in sampling.stop_token_ids or (token_id == EOS and not sampling.ignore_eos)
            if ends and at + 1 > sampling.min_tokens:
                return ids[: at + 1], FinishReason.STOP, token_id
        return ids[: sampling.max_tokens], FinishReason.LENGTH, None

    def _prompt_logprobs(self, request: RoutedRequest) -> list[TokenLogprob | None] | None:
        top = request.sampling.prompt_logprobs
        if top is None:
            return None
        return [None, *(logprob(token_id, top) for token_id in request.prompt_token_ids[1:])]

    def _trace(self, request: RoutedRequest) -> common_pb2.RequestTrace:
        tokens = len(request.prompt_token_ids)
        return common_pb2.RequestTrace(
            path=common_pb2.PREFILL_PATH_REMOTE,
            prefill_instance="prefill-0",
            decode_instance="decode-1",
            pipe="shm",
            kv_bytes=4096,
            transfer_us=1500,
            prompt_tokens=tokens,
            cached_tokens=min(3, tokens),
            transferred_tokens=max(0, tokens - 3),
        )

    def _decision(self, request: RoutedRequest) -> Decision:
        total = len(request.prompt_token_ids)
        prefill = Side(Role.PREFILL, [InstanceId("prefill-0")], [3 * total // 4], [0.75], [0.0], [0.0], total)
        decode = Side(Role.DECODE, [InstanceId("decode-1")], [total // 4], [0.25], [0.0], [0.0], total)
        return Decision(
            prompt_tokens=total,
            policy="scripted",
            prefill=prefill,
            decode=decode,
            ratings=Ratings(Scores.of(match=[0.75]), Scores.of(match=[0.25])),
            choice=Choice(decode=0, prefill=0, path=None, score=1.0),
            path=None,
            prefill_order=[0],
            prefill_addresses=["prefill-0:1"],
            index_state="exact",
        )


def _random_ids(sampling: SamplingParams, index: int) -> list[int]:
    chance = random.Random(f"{sampling.seed}/{index}")
    return [chance.randrange(5, 4096) for _ in range(sampling.max_tokens or 0)]
