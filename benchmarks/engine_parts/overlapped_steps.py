"""What it would bring to plan a decode step, and to note and report what the one before gave, beside a forward pass.

``EngineCore.step`` does one thing after the other: plan, forward, choose tokens, note, report. Here the forward runs in
a thread of its own; the plan of the next step and the notes of the one before are made meanwhile, and only the tokens
are chosen in between. Both ways take turns every few steps of one batch, whose tokens must be those of ``step`` alone.
Also printed: the processor's time of a step, and which part of it could be beside a forward. With one thread, that
is a bound on the gain which other work on the machine does not blur.

A sequence that ends, joins or needs a mask would have to wait for the step in flight; this batch has none, so no engine
could gain more.

    python benchmarks/engine_parts/overlapped_steps.py --threads 2 --write
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from benchmarks.engine_parts.models import write_model

from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest
from baton.engine.runner.input_batch import build_batch
from baton.engine.sampler import sample
from baton.engine.sequence import Sequence
from baton.engine.speculation.verification import StepSampling
from baton.types import RequestId, SamplingParams

RESULT = Path(__file__).parents[1] / "results" / "overlapped_steps.json"
CONTEXT = 128
BLOCK = 16
TURN = 10
SKIPPED = 1
"""Steps of a way until the other one is next; the first ones of a turn do not count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "llama", smoke=False)
        config = EngineConfig(model=folder, threads=args.threads, kv_blocks=2400, prefix_caching=True)
        result = {str(batch): measure(build_engine(config), args, batch) for batch in args.batches}
    name = f"threads {args.threads}"
    print(json.dumps({name: result}, indent=2))
    if args.write:
        before = json.loads(RESULT.read_text()) if RESULT.exists() else {"benchmark": "overlapped_steps"}
        RESULT.write_text(json.dumps({**before, name: result}, indent=2) + "\n")


def measure(core: EngineCore, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return medians in milliseconds, of both ways in turns."""
    steps = 2 * args.turns * TURN
    prompts = np.random.default_rng(0).integers(3, core.executor.vocab_size, (batch, CONTEXT)).tolist()
    expected = _begin(core, prompts, steps)
    for _ in range(steps):
        core.step()
    tokens = [sequence.tokens[:].tolist() for sequence in expected]
    _end(core)
    core.clear_cache()
    sequences = _begin(core, prompts, steps)
    times: dict[str, list[float]] = {"today": [], "overlapped": []}
    parts = _Parts(core)  # from here on: decodes alone
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(args.threads,)) as thread:
        for _ in range(args.turns):
            for way in ("today", "overlapped"):
                result = _today(core) if way == "today" else _overlapped(core, thread)
                times[way] += result[SKIPPED:]
    if [sequence.tokens[:].tolist() for sequence in sequences] != tokens:
        raise RuntimeError("tokens differ")
    figures = parts.figures()
    medians = {way: statistics.median(values) for way, values in times.items()}
    return {
        **{f"{way}_ms": round(1e3 * value, 3) for way, value in medians.items()},
        "gain": round(medians["today"] / medians["overlapped"] - 1, 4),
        **figures,
    }


class _Parts:
    """Takes the calling thread's time of ``step``, and of what it has to do one after the other."""

    def __init__(self, core: EngineCore) -> None:
        self._inside = False
        self._rows: list[dict[str, float]] = []
        self._watch(core.executor, "forward")
        self._watch(StepSampling, "choose")
        step = core.step

        def timed() -> Any:
            self._inside = True
            begun = time.thread_time()
            self._rows.append({})
            try:
                return step()
            finally:
                self._rows[-1]["step"] = time.thread_time() - begun
                self._inside = False

        core.step = timed  # type: ignore[method-assign]

    def _watch(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args)
            finally:
                if self._inside:
                    self._rows[-1][name] = time.thread_time() - begun

        setattr(owner, name, timed)

    def figures(self) -> dict[str, float]:
        """Medians: of a step, and of what could be beside a forward (not the choice of tokens)."""
        whole = statistics.median(row["step"] for row in self._rows)
        beside = statistics.median(row["step"] - row["forward"] - row["choose"] for row in self._rows)
        return {
            "cpu_ms": round(1e3 * whole, 3),
            "cpu_ms_that_could_be_beside": round(1e3 * beside, 3),
            "share": round(beside / whole, 4),
        }


def _begin(core: EngineCore, prompts: list[list[int]], steps: int) -> list[Sequence]:
    """Have all prompts computed, so that every step decodes them all."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=2 * steps, temperature=0.0, ignore_eos=True)
        core.add_request(EngineRequest(RequestId(f"{index}-{time.monotonic_ns()}"), prompt, sampling))
    running = core._scheduler.running
    while len(running) < len(prompts) or any(sequence.num_missing != 1 for sequence in running):
        core.step()
    return list(running)


def _end(core: EngineCore) -> None:
    for sequence in list(core._scheduler.running):
        core.abort(sequence.group.request.request_id)
    while core.has_work():
        core.step()
    core.check_integrity()


def _today(core: EngineCore) -> list[float]:
    times = []
    begun = time.perf_counter()
    for _ in range(TURN):
        core.step()
        before = begun
        begun = time.perf_counter()
        times.append(begun - before)
    return times


@torch.inference_mode()
def _overlapped(core: EngineCore, thread: ThreadPoolExecutor) -> list[float]:
    """The same steps with forwards in a thread."""
    scheduler = core._scheduler
    executor = core.executor
    times = []
    batch = build_batch(scheduler.schedule(), BLOCK)
    flying = thread.submit(executor.forward, batch.forward)
    chosen = list[tuple[Sequence, int]]()
    begun = time.perf_counter()
    for step in range(TURN):
        for sequence, token in chosen:  # of the step before
            sequence.token_output([token], None, first=False)
        for sequence in batch.sampled:
            sequence.advance(1)
            scheduler.commit(sequence)
            sequence.append_token(0)  # not known yet
        last = step == TURN - 1
        following = None if last else build_batch(scheduler.schedule(), BLOCK)
        logits = flying.result().logits
        tokens = sample(logits, [sequence.sampler for sequence in batch.sampled]).token_ids
        chosen = list(zip(batch.sampled, tokens, strict=True))
        for sequence, token in chosen:
            sequence.buffer[sequence.num_tokens - 1] = token
        if following is not None:
            following.forward.token_ids[:] = tokens
            flying = thread.submit(executor.forward, following.forward)
            batch = following
        before = begun
        begun = time.perf_counter()
        times.append(begun - before)
    return times


if __name__ == "__main__":
    main()
