"""A decode instance without a model whose tokens come at known times, for ``benchmarks/serve/clients.py``.

A request's first token comes ``--ttft-ms`` after it arrived, three quarters to five quarters of that by its number, the
others every ``--itl-ms``, by the clock: a late one does not make those after it late. Were all alike, the requests of a
closed loop would end and begin in the same instant for ever, and each client would add its own cost of a dozen requests
to their times. It prints its address and serves until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(Path(__file__).parent))]

from tests.support.servers.fake_worker import FakeWorker

from baton.api.v1 import worker_pb2
from baton.tokenizer import Tokenizer
from baton.types import Role

MODEL = str(ROOT / "models" / "baton-tiny")
_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, lie evenly between 0 and 1 however many there are."""


class PacedWorker(FakeWorker):
    """One instance.

    Args:
        ttft_s: From a request's arrival to its first token, in the mean.
        itl_s: Between two tokens.
    """

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        super().__init__(Role.DECODE, "paced", caches=False)
        self.state.model_path = MODEL
        self.state.max_model_len = 2048
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._requests = 0
        tokenizer = Tokenizer.load(MODEL)
        words = [i for i in range(20, tokenizer.vocab_size) if tokenizer.decode([i]).strip().isalnum()]
        self._word = words[len(words) // 2]

    async def _generate(self, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.GenerateResponse]:
        self._requests += 1
        due = time.monotonic() + self._ttft_s * (0.75 + 0.5 * (self._requests * _GOLDEN % 1.0))
        trace = self._trace(request)
        limit = request.sampling.max_tokens
        for position in range(limit):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += self._itl_s
            last = position + 1 == limit
            response = worker_pb2.GenerateResponse()
            delta = response.deltas.add(index=0, token_ids=[self._word])
            if last:
                delta.finish_reason = 2  # length
            if position == 0 or last:
                response.trace.CopyFrom(trace)
            yield response


async def serve(ttft_s: float, itl_s: float) -> None:
    """Serve until standard input ends."""
    worker = PacedWorker(ttft_s, itl_s)
    await worker.start()
    print(worker.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft-ms", type=float, default=80.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    args = parser.parse_args()
    asyncio.run(serve(args.ttft_ms / 1e3, args.itl_ms / 1e3))
