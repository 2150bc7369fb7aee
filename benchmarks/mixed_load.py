"""Time between tokens while long prompts are computed: real services, measured where their streams arrive.

Four streams generate all the time; two prompts of 2,000 tokens are always under way beside them. The ways:

    unbounded   one decode instance computes everything, and its steps are as long as their tokens make them
    slo         the same instance with ``--itl-slo-ms``
    1P1D        a prefill instance computes the long prompts, both instances with their defaults

``alone_ms`` is the median time between two tokens before the first prompt comes. Part of ``benchmarks/engine.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from typing import Any

import numpy as np
from benchmarks.kv.overlap import process, ready

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.rpc.server import free_port
from baton.token_ids import pack_ids
from baton.types import SamplingParams

STREAMS = 4
STREAM_CONTEXT = 256
STREAM_TOKENS = 2000
PROMPTS_AT_ONCE = 2
PROMPT_TOKENS = 2000
TOKENS_ALONE = 60
WAYS = ("unbounded", "slo", "1P1D")


def measure_mixed_load(folder: str, vocab: int, *, slo_ms: float, threads: int, prompts: int) -> dict[str, Any]:
    """Run all ways one after the other; times in milliseconds.

    Args:
        folder: The model.
        vocab: Tokens of the prompts are below it.
        slo_ms: ``--itl-slo-ms`` of the bounded way.
        threads: Threads of the single instance; each of the two of 1P1D has half as many.
        prompts: Long prompts per way.
    """
    flags = {
        "unbounded": ("--threads", str(threads), "--step-budget-ms", "0"),
        "slo": ("--threads", str(threads), "--itl-slo-ms", str(slo_ms)),
        "1P1D": ("--threads", str(max(1, threads // 2))),
    }
    result: dict[str, Any] = {"itl_slo_ms": slo_ms, "threads": threads, "prompts": prompts}
    for way in WAYS:
        result[way] = asyncio.run(_measure(way, folder, vocab, prompts, flags[way]))
        print(f"mixed load, {way}: {result[way]}", file=sys.stderr, flush=True)
    return result


async def _measure(way: str, folder: str, vocab: int, prompts: int, flags: tuple[str, ...]) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        decode = stack.enter_context(process("decode", folder, free_port(), *flags))
        prefill = [stack.enter_context(process("prefill", folder, free_port(), *flags))] if way == "1P1D" else []
        for address in (decode, *prefill):
            await ready(address)
        return await MixedLoad(decode, prefill, vocab).run(prompts)


class MixedLoad:
    """The load on one decode instance."""

    def __init__(self, decode: str, prefill: list[str], vocab: int) -> None:
        self._decode = decode
        self._prefill = prefill
        self._vocab = vocab
        self._rng = np.random.default_rng(0)
        self._names = itertools.count()
        self._arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
        self._warm = asyncio.Event()

    async def run(self, prompts: int) -> dict[str, float]:
        async with open_channel(self._decode) as channel:
            self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await self._generate(PROMPT_TOKENS, 1, [], self._prefill)  # a warm-up
            streams = [
                asyncio.create_task(self._generate(STREAM_CONTEXT, STREAM_TOKENS, times, []))
                for times in self._arrivals
            ]
            await self._warm.wait()
            alone = self._gaps(0.0, time.perf_counter(), skip=10)
            begun = time.perf_counter()
            left = itertools.count()
            ttfts = await asyncio.gather(*(self._prompts(left, prompts) for _ in range(PROMPTS_AT_ONCE)))
            mixed = self._gaps(begun, time.perf_counter())
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        ttft = list(itertools.chain(*ttfts))
        figures = {
            "alone_ms": np.median(alone),
            "itl_p50_ms": np.percentile(mixed, 50),
            "itl_p99_ms": np.percentile(mixed, 99),
            "itl_max_ms": max(mixed),
            "ttft_mean_ms": np.mean(ttft),
        }
        return {name: round(1e3 * float(value), 1) for name, value in figures.items()} | {"gaps": len(mixed)}

    async def _prompts(self, left: itertools.count[int], prompts: int) -> list[float]:
        ttfts = []
        while next(left) < prompts:
            begun = time.perf_counter()
            arrived = list[float]()
            await self._generate(PROMPT_TOKENS, 1, arrived, self._prefill)
            ttfts.append(arrived[0] - begun)
        return ttfts

    def _gaps(self, begin: float, end: float, skip: int = 0) -> list[float]:
        """Return the times between tokens of all streams that ended between two moments."""
        gaps = []
        for times in self._arrivals:
            gaps += [b - a for a, b in itertools.pairwise(times[skip:]) if begin <= b <= end]
        return gaps

    async def _generate(self, length: int, tokens: int, arrived: list[float], candidates: list[str]) -> None:
        """Generate from a new prompt and note when tokens arrive."""
        message = worker_pb2.GenerateRequest(
            request_id=f"mixed-{next(self._names)}",
            prompt_token_ids=pack_ids(self._rng.integers(3, self._vocab, length).tolist()),
            sampling=sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)),
            prefill_candidates=candidates,
            remote_prefill_threshold=1,
        )
        async for response in self._stub.Generate(message):
            now = time.perf_counter()
            for delta in response.deltas:
                arrived += [now] * len(delta.token_ids)
            if min(map(len, self._arrivals)) >= TOKENS_ALONE:
                self._warm.set()
