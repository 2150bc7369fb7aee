"""``baton profile``: the engine's steps and the pipe's transfers, measured on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from baton.bench.core.report import Record
from baton.bench.kv import command as kv_command
from baton.bench.kv.driver import Driver
from baton.bench.kv.plan import Options
from baton.bench.kv.records import TransferRecord
from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest
from baton.errors import ConfigError
from baton.planner.profile import EngineProfile, FitQuality, Limits, Link, Profile
from baton.planner.profiling.fit import Point, fit_decode, fit_prefill, fit_transfer
from baton.types import RequestId, SamplingParams

Step = Callable[[str, int], None]
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DECODE_STEPS = 12
_WARM_UP = 3


def profile_engine(config: EngineConfig, *, isl: int, repeats: int, pipe: str, step: Step) -> Profile:
    """Measure an engine and a pipe, and fit a profile to them.

    Args:
        config: The engine.
        isl: Longest prompt that is measured, in tokens.
        repeats: How often each is measured; medians count.
        pipe: Kind of pipe between instances; empty: none is measured.
        step: Is told of progress.

    Raises:
        ConfigError: The model or the pipe cannot work, or prompts are too long for the model.
        InternalError: The engine failed.
    """
    step("loading the model", 4)
    # Random prompts that begin alike would be found in the cache.
    core = build_engine(dataclasses.replace(config, prefix_caching=False))
    try:
        meter = _Meter(core, config, isl, repeats)
        step("prompts", 3)
        prefill, prefill_fit = fit_prefill(meter.prompts())
        step("decodes", 2)
        decode, decode_fit = fit_decode(meter.decodes())
        engine = EngineProfile(config.tp, config.pp, prefill, decode, meter.kv_tokens)
        step("both", 1)
        engine, overlap_fit = _with_overlap(engine, meter.mixed())
        layout = core.executor.geometry
        layers, kv_bytes = len(layout.layers), meter.kv_bytes_per_token
    finally:
        core.executor.close()
        core.shards.close()
    fits = {"prefill": prefill_fit, "decode": decode_fit, "mixed": overlap_fit}
    link = Link(0.0, 1e15)
    if pipe:
        step(f"transfers over {pipe}", 0)
        link, fits["transfer"] = measure_link(kv_bytes, pipe)
    return Profile(
        model=config.model,
        source=f"measured by baton profile, {repeats} repeats, {time.strftime('%Y-%m-%d')}",
        layers=layers,
        kv_bytes_per_token=kv_bytes,
        engines=(dataclasses.replace(engine, residuals=fits),),
        link=link,
        limits=Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk=config.prefill_chunk,
            block_size=config.block_size,
            step_budget_ms=config.step_budget_ms,
        ),
    )


class _Meter:
    """Times steps of an engine whose work is known.

    Args:
        core: The engine.
        config: What it was told.
        isl: Longest prompt.
        repeats: How often each is measured.
    """

    def __init__(self, core: EngineCore, config: EngineConfig, isl: int, repeats: int) -> None:
        self._core, self._config, self._repeats = core, config, repeats
        room = min(core.max_model_len, core.stats().num_blocks * self._config.block_size) - _DECODE_STEPS - _WARM_UP - 2
        if not 16 <= isl <= room:
            raise ConfigError(f"--isl must be between 16 and the {room} tokens that fit, got {isl}", field="isl")
        self._isl = isl
        self._rng = np.random.default_rng(0)
        self._ids = itertools.count()

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self._core.stats().num_blocks * self._config.block_size

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token's KV, all layers."""
        return self._core.executor.fingerprint.block_bytes / self._config.block_size

    def _add(self, tokens: int, output: int) -> RequestId:
        request_id = RequestId(f"profile-{next(self._ids)}")
        prompt: list[int] = self._rng.integers(8, self._core.executor.vocab_size, tokens).tolist()
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self._core.add_request(EngineRequest(request_id, prompt, sampling))
        return request_id

    def _timed(self) -> float:
        began = time.perf_counter()
        self._core.step()
        return time.perf_counter() - began

    def _finish(self, requests: Sequence[RequestId] = ()) -> None:
        for request in requests:
            self._core.abort(request)
        while self._core.has_work():
            self._core.step()

    def prompts(self) -> list[Point]:
        """Return steps of prompts: seconds, tokens, pairs; of each kind of step the median."""
        sizes = sorted({min(self._isl, round(16 * 2 ** (i / 2))) for i in range(40)})
        found: dict[tuple[float, float], list[float]] = {}
        for _ in range(self._repeats + 1):
            for size in sizes:
                self._add(size, 1)
                done = 0
                while self._core.has_work():
                    count = min(size - done, self._config.prefill_chunk, self._config.max_num_batched_tokens)
                    seconds = self._timed()
                    if count > 0:
                        found.setdefault((count, count * (done + 0.5 * count)), []).append(seconds)
                    done += count
        # The first round is warm-up.
        return [(statistics.median(times[1:] or times), *work) for work, times in found.items()]

    def decodes(self) -> list[Point]:
        """Return steps of decodes: seconds, context, sequences; of each batch the median."""
        found = []
        for length in sorted({16, max(16, self._isl // 4), self._isl}):
            for batch in _BATCHES:
                if batch > self._config.max_num_seqs or batch * (length + _DECODE_STEPS + 8) > self.kv_tokens:
                    break
                found.append(self._decode(batch, length))
        return found

    def _decode(self, batch: int, length: int) -> Point:
        requests = self._decoding(batch, length, _DECODE_STEPS + _WARM_UP + 1)
        for _ in range(_WARM_UP):
            self._core.step()
        times = [self._timed() for _ in range(_DECODE_STEPS - 1)]
        self._finish(requests)
        # In the middle of these steps each sequence has its prompt, one token of prefill, and those since.
        context = batch * (length + 1 + _WARM_UP + (_DECODE_STEPS - 1) / 2)
        return statistics.median(times), context, float(batch)

    def _decoding(self, batch: int, length: int, output: int) -> list[RequestId]:
        """Have so many sequences decode, whose first tokens are there."""
        requests = [self._add(length, output + batch) for _ in range(batch)]
        first: set[RequestId] = set()
        while len(first) < batch:
            first |= {output.request_id for output in self._core.step()}
        return requests

    def mixed(self) -> list[tuple[float, float, float, float, float]]:
        """Return steps with both: seconds, sequences, context, tokens, pairs."""
        found = []
        chunk = min(self._config.prefill_chunk, self._isl, self._config.max_num_batched_tokens // 2)
        for batch in (4, 16):
            if batch + 1 > self._config.max_num_seqs or (batch + 1) * (chunk + 64) > self.kv_tokens:
                continue
            for tokens in sorted({max(8, chunk // 8), max(8, chunk // 2), chunk}):
                times = []
                requests = self._decoding(batch, 32, 4 * self._repeats + 4)
                steps = 0
                for _ in range(self._repeats):
                    prompt = self._add(tokens, 1)
                    times.append(self._timed())
                    steps += 1
                    self._core.abort(prompt)
                self._finish(requests)
                context = batch * (33 + batch / 2 + steps / 2)
                found.append((statistics.median(times), float(batch), context, float(tokens), 0.5 * tokens * tokens))
        return found


def _with_overlap(
    engine: EngineProfile, points: Sequence[tuple[float, float, float, float, float]]
) -> tuple[EngineProfile, FitQuality]:
    """Return the engine with the share that steps with both save, and how well these steps are met."""
    shares = []
    for seconds, sequences, context, tokens, pairs in points:
        decode, prefill = engine.decode.seconds(sequences, context), engine.prefill.seconds(tokens, pairs)
        least = min(prefill, engine.decode.fixed_s)
        if least > 0:
            shares.append((decode + prefill - seconds) / least)
    overlap = min(1.0, max(0.0, statistics.median(shares))) if shares else 0.0
    engine = dataclasses.replace(engine, overlap=overlap)
    errors = [abs(engine.step_s(*work) / seconds - 1) for seconds, *work in points]
    if not errors:
        return engine, FitQuality()
    return engine, FitQuality(len(errors), round(statistics.median(errors), 4), round(max(errors), 4))


def measure_link(kv_bytes_per_token: float, pipe: str) -> tuple[Link, FitQuality]:
    """Measure transfers of KV between two processes on this machine, over a kind of pipe.

    Raises:
        ConfigError: The pipe cannot work here.
        BatonError: A transfer failed.
    """
    parser = argparse.ArgumentParser()
    kv_command.add_parser(parser.add_subparsers())
    points = []
    for tokens in (64, 1024, 8192):
        size = max(4096, int(tokens * kv_bytes_per_token))
        words = ["kv", "--bytes", str(size), "--descriptors", str(max(1, tokens // 16)), "--pipe", pipe]
        options = Options.from_args(parser.parse_args([*words, "--streams", "1", "--no-reference", "--no-verify"]))
        records: list[Record] = []
        Driver(options, records.append, lambda what, left: None).run()
        points += [(each.p50_ms / 1e3, float(each.bytes)) for each in records if isinstance(each, TransferRecord)]
    latency, rate, quality = fit_transfer(points)
    return Link(latency, rate), quality
