"""``baton profile``: the engine's steps and the pipe's transfers, measured on this machine."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.config import EngineConfig
from baton.config.flags import AccessConfig
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest
from baton.errors import ConfigError, UnavailableError, shown
from baton.kv_cache.layout import FLOAT_BYTES
from baton.terminal import Step
from baton.types import RequestId, SamplingParams
from baton_bench.geometries import model_geometry, named_geometry
from baton_bench.kv.driver import Driver
from baton_bench.kv.plan import Options
from baton_bench.kv.records import TransferRecord
from baton_bench.report import Record
from baton_bench.serve.options import ServeOptions
from baton_bench.serve.records import ServeRecord
from baton_bench.serve.run import Benchmark
from baton_bench.simulator.profile import (
    DecodeCost,
    EngineProfile,
    FitQuality,
    Limits,
    Link,
    Memory,
    Overheads,
    PrefillCost,
    Profile,
)
from baton_bench.simulator.simulation import Deployment, Simulation
from baton_bench.traces import TraceRequest

FloatArray = npt.NDArray[np.float64]
Point = tuple[float, float, float]
"""Seconds, and what the step computed: two amounts."""


def fit_prefill(points: Sequence[Point]) -> tuple[PrefillCost, FitQuality]:
    """Fit steps of prompts: (seconds, tokens, pairs of a token and one it attends to).

    Raises:
        ConfigError: There are too few points.
    """
    weights, quality = _fit(points, "prefill")
    return PrefillCost(*weights), quality


def fit_decode(points: Sequence[Point]) -> tuple[DecodeCost, FitQuality]:
    """Fit steps of decodes: (seconds, tokens of all contexts, sequences).

    Raises:
        ConfigError: There are too few points.
    """
    weights, quality = _fit(points, "decode")
    return DecodeCost(*weights), quality


def fit_transfer(points: Sequence[tuple[float, float]]) -> tuple[float, float, FitQuality]:
    """Fit transfers: (seconds, bytes); returns latency in seconds and bytes per second.

    Raises:
        ConfigError: There are too few points.
    """
    (latency, per_byte, _), quality = _fit([(seconds, size, 0.0) for seconds, size in points], "transfer")
    return latency, 1.0 / per_byte if per_byte > 0 else 1e15, quality


def _fit(points: Sequence[Point], what: str) -> tuple[tuple[float, float, float], FitQuality]:
    """Fit a constant and two slopes, none below 0, by least squares of relative errors."""
    if len(points) < 3:
        raise ConfigError(f"{len(points)} measurements of {what} are too few for a line", field="isl")
    seconds = np.array([point[0] for point in points])
    features = np.array([(1.0, point[1], point[2]) for point in points])
    weights = nonnegative_least_squares(features / seconds[:, None], np.ones(len(points)))
    errors = np.abs(features @ weights / seconds - 1)
    quality = FitQuality(len(points), round(float(np.median(errors)), 4), round(float(errors.max()), 4))
    fixed, first, second = (float(x) for x in weights)
    return (fixed, first, second), quality


def nonnegative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Return the weights, none below 0, with the least squares of ``matrix @ weights - target``.

    All subsets of the columns are tried: there are three.
    """
    columns = matrix.shape[1]
    best = np.zeros(columns)
    least = float(target @ target)
    for subset in range(1, 1 << columns):
        used = [i for i in range(columns) if subset >> i & 1]
        norms = np.linalg.norm(matrix[:, used], axis=0)
        if not norms.all():
            continue
        result = np.linalg.lstsq(matrix[:, used] / norms, target, rcond=None)[0] / norms
        if (result < 0).any():
            continue
        error = float(((matrix[:, used] @ result - target) ** 2).sum())
        if error < least - 1e-12:
            best = np.zeros(columns)
            least = error
            best[used] = result
    return best


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
        step: Called with the name of each step and the number of steps left.

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
        layers = len(layout.layers)
        kv_bytes = meter.kv_bytes_per_token
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
        device=config.device,
    )


class _Meter:
    """Measures the seconds of steps with known work.

    Args:
        core: The engine.
        config: Configuration of the engine.
        isl: Longest prompt.
        repeats: How often each is measured.
    """

    def __init__(self, core: EngineCore, config: EngineConfig, isl: int, repeats: int) -> None:
        self._core = core
        self._config = config
        self._repeats = repeats
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

    def _finish(self, requests: Iterable[RequestId] = ()) -> None:
        for request in requests:
            self._core.abort(request)
        while self._core.has_work():
            self._core.step()

    def prompts(self) -> list[Point]:
        """Return steps of prompts: seconds, tokens, pairs; of each kind of step the median."""
        sizes = sorted({min(self._isl, round(16 * 2 ** (i / 2))) for i in range(40)})
        result: dict[tuple[float, float], list[float]] = {}
        for _ in range(self._repeats + 1):
            for size in sizes:
                self._add(size, 1)
                done = 0
                while self._core.has_work():
                    count = min(size - done, self._config.prefill_chunk, self._config.max_num_batched_tokens)
                    seconds = self._timed()
                    if count > 0:
                        result.setdefault((count, count * (done + 0.5 * count)), []).append(seconds)
                    done += count
        # The first round is warm-up.
        return [(statistics.median(times[1:] or times), *work) for work, times in result.items()]

    def decodes(self) -> list[Point]:
        """Return steps of decodes: seconds, context, sequences; of each batch the median."""
        results = []
        for length in sorted({16, max(16, self._isl // 4), self._isl}):
            for batch in _BATCHES:
                tokens = length + self._outputs(batch, length)
                if batch > self._config.max_num_seqs or batch * (tokens + self._config.block_size) > self.kv_tokens:
                    break
                if tokens <= self._core.max_model_len:
                    results.append(self._decode(batch, length))
        return results

    def _decode(self, batch: int, length: int) -> Point:
        requests = self._decoding(batch, length, self._outputs(batch, length))
        for _ in range(_WARM_UP):
            self._core.step()
        times = [self._timed() for _ in range(_DECODE_STEPS - 1)]
        self._finish(requests)
        # In the middle of these steps each sequence has its prompt, what it generated before, and those since.
        context = batch * (length + _WARM_UP + (_DECODE_STEPS - 1) / 2) + requests.total()
        return statistics.median(times), context, float(batch)

    def _outputs(self, batch: int, length: int) -> int:
        """Return the tokens that the first of ``batch`` sequences generates at most, until the last is measured."""
        chunk = min(self._config.prefill_chunk, self._config.max_num_batched_tokens)
        return (batch - 1) * -(-length // chunk) + _WARM_UP + _DECODE_STEPS + 1

    def _decoding(self, batch: int, length: int, output: int) -> Counter[RequestId]:
        """Add ``batch`` sequences of at most ``output`` tokens and run steps until each has its first; returns all."""
        requests = {self._add(length, output) for _ in range(batch)}
        generated = Counter[RequestId]()
        while generated.keys() != requests:
            generated.update({each.request_id: len(each.token_ids) for each in self._core.step()})
        return generated

    def mixed(self) -> list[tuple[float, float, float, float, float]]:
        """Return steps with both: seconds, sequences, context, tokens, pairs."""
        results = []
        chunk = min(self._config.prefill_chunk, self._isl, self._config.max_num_batched_tokens // 2)
        for batch in (4, 16):
            if batch + 1 > self._config.max_num_seqs or (batch + 1) * (chunk + 64) > self.kv_tokens:
                continue
            for tokens in sorted({max(8, chunk // 8), max(8, chunk // 2), chunk}):
                times = []
                requests = self._decoding(batch, 32, 4 * self._repeats + 4 + batch)
                steps = 0
                for _ in range(self._repeats):
                    prompt = self._add(tokens, 1)
                    times.append(self._timed())
                    steps += 1
                    self._core.abort(prompt)
                self._finish(requests)
                context = batch * (32 + steps / 2) + requests.total()
                results.append((statistics.median(times), float(batch), context, float(tokens), 0.5 * tokens * tokens))
        return results


def _with_overlap(
    engine: EngineProfile, points: Sequence[tuple[float, float, float, float, float]]
) -> tuple[EngineProfile, FitQuality]:
    """Return the engine with the share that steps with both save, and how well these steps are met."""
    shares = []
    for seconds, sequences, context, tokens, pairs in points:
        decode = engine.decode.seconds(sequences, context)
        prefill = engine.prefill.seconds(tokens, pairs)
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
    points = []
    for tokens in (64, 1024, 8192):
        size = max(4096, int(tokens * kv_bytes_per_token))
        options = Options(
            bytes=size,
            descriptors=max(1, tokens // 16),
            pipes=(pipe,),
            streams=(1,),
            reference=False,
            verify=False,
        )
        records: list[Record] = []
        Driver(options, records.append, lambda what, left: None).run()
        points += [(each.p50_ms / 1e3, float(each.bytes)) for each in records if isinstance(each, TransferRecord)]
    latency, rate, quality = fit_transfer(points)
    return Link(latency, rate), quality


REQUESTS = 12
OUTPUT = 24


def measure_overheads(url: str, access: AccessConfig, profile: Profile, *, isl: int, step: Step) -> Overheads:
    """Compare an idle deployment with what the profile predicts for single requests.

    Args:
        url: URL of the deployment: the profiled engine, with a prefill instance.
        access: Token and certificates.
        profile: Profile of the deployment's engine and link.
        isl: Prompt tokens of requests that are handed over.
        step: Called with the name of each step and the number of steps left.

    Raises:
        UnavailableError: It does not answer, or requests fail.
    """
    short = max(1, min(isl, profile.limits.remote_prefill_threshold - 1))
    step("short requests", 1)
    ttft, itl = _measured(url, access, short)
    own_ttft, own_itl = _predicted(profile, short, prefills=0)
    step("requests that are handed over", 0)
    far_ttft, _ = _measured(url, access, isl)
    far_own, _ = _predicted(profile, isl, prefills=1)
    request = max(0.0, ttft - own_ttft)
    per_step = max(0.0, itl - own_itl)
    # Steps of prompts take the same time more as those of decodes; requests need not take it twice.
    request = max(0.0, request - per_step)
    return Overheads(request, max(0.0, far_ttft - far_own - request - per_step), per_step)


def _measured(url: str, access: AccessConfig, isl: int) -> tuple[float, float]:
    options = ServeOptions(url=url, isl=isl, osl=OUTPUT, requests=REQUESTS, max_concurrency=1, warmup=3)
    records: list[Record] = []
    Benchmark(options, access, {}).run(records.append, lambda what, left: None)
    load = next(each for each in records if isinstance(each, ServeRecord))
    if load.failed or load.ttft_ms is None or load.itl_ms is None:
        raise UnavailableError(f"requests to {url} failed: {load.errors}")
    return load.ttft_ms.median / 1e3, load.itl_ms.median / 1e3


def _predicted(profile: Profile, isl: int, *, prefills: int) -> tuple[float, float]:
    engine = profile.engines[0]
    deployment = Deployment(
        prefills, 1, engine, engine, profile.limits, profile.link, profile.layers, profile.kv_bytes_per_token
    )
    deployment = dataclasses.replace(deployment, overheads=Overheads())
    outcome = Simulation(deployment).run([TraceRequest(0.0, isl, OUTPUT, tuple(range(-(-isl // 512))))])
    return outcome.percentile("ttft", 50) / 1e3, outcome.percentile("itl", 50) / 1e3


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of a GPU: dense bfloat16 arithmetic, memory, the links to its neighbours and to the network."""

    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    neighbour_bytes_per_s: float
    network_bytes_per_s: float


GPUS = {
    # NVIDIA's data sheets: "H100 Tensor Core GPU", "H200 Tensor Core GPU", "A100 Tensor Core GPU"; network: one
    # 400 Gbit/s (A100: 200 Gbit/s) adapter per GPU, as in DGX systems. NVLink per direction.
    "h100-sxm": Gpu(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200-sxm": Gpu(989e12, 141e9, 4.8e12, 450e9, 50e9),
    "a100-sxm": Gpu(312e12, 80e9, 2.04e12, 300e9, 25e9),
}


# What is taken for reached of the published figures (shares, 0 to 1), and fixed costs in seconds.
FLOPS_SHARE = 0.55
"""Of the peak arithmetic, by prompts' matrix products."""
ATTENTION_FLOPS_SHARE = 0.35
"""Of the peak arithmetic, by attention over prompts."""
MEMORY_SHARE = 0.75
"""Of the memory bandwidth, by reading weights and KV."""
LINK_SHARE = 0.7
"""Of the links' bandwidth, by all-reduces and KV transfers."""
USABLE_MEMORY = 0.9
"""Of the memory, for weights and KV."""
STEP_S = 3e-3
"""Of a step: the scheduler, launches of kernels."""
ALLREDUCE_S = 10e-6
"""Of an all-reduce, beyond the time of its bytes."""
ROW_S = 20e-6
"""Of each sequence of a step, for sampling."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a dense model that its cost depends on.

    Attributes:
        name: Name of the model.
        params: Weights.
        layers: Number of decoder layers.
        width: Hidden size.
        heads: Query heads.
        head_dim: Size of one attention head.
        kv_bytes_per_token: All layers.
        weight_bytes: Per weight.
    """

    name: str
    params: float
    layers: int
    width: int
    heads: int
    head_dim: int
    kv_bytes_per_token: float
    weight_bytes: float = 2.0


def roofline_profile(gpu_name: str, shape: ModelShape, tps: tuple[int, ...]) -> Profile:
    """Return a profile that follows from published figures.

    Args:
        gpu_name: One of :data:`GPUS`.
        shape: The model.
        tps: Tensor-parallel sizes; those without room for the weights are left out.

    Raises:
        ConfigError: There is no such GPU, or the model fits into none of the sizes.
    """
    if gpu_name not in GPUS:
        raise ConfigError(f"--roofline must be one of {', '.join(GPUS)}, got {shown(gpu_name)}", field="roofline")
    gpu = GPUS[gpu_name]
    memory = Memory(gpu.memory_bytes, shape.params * shape.weight_bytes, USABLE_MEMORY)
    engines = []
    for tp in tps:
        left = tp * USABLE_MEMORY * gpu.memory_bytes - memory.weights_bytes
        if left >= shape.kv_bytes_per_token:
            engines.append(_engine(gpu, shape, tp, int(left / shape.kv_bytes_per_token)))
    if not engines:
        raise ConfigError(f"{shape.name} fits into none of {', '.join(map(str, tps))} GPUs", field="tp")
    return Profile(
        model=shape.name,
        source=(
            f"derived, not measured: roofline of {gpu_name} (published figures) at {FLOPS_SHARE:.0%} of its "
            f"arithmetic, {MEMORY_SHARE:.0%} of its memory bandwidth, {LINK_SHARE:.0%} of its links"
        ),
        layers=shape.layers,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        engines=tuple(engines),
        link=Link(100e-6, LINK_SHARE * gpu.network_bytes_per_s),
        limits=Limits(max_num_seqs=256, max_num_batched_tokens=8192, prefill_chunk=2048, block_size=16),
        memory=memory,
        device="cuda:0",
    )


def _engine(gpu: Gpu, shape: ModelShape, tp: int, kv_tokens: int) -> EngineProfile:
    flops = tp * FLOPS_SHARE * gpu.flops
    reads = tp * MEMORY_SHARE * gpu.memory_bytes_per_s
    reduces = 2 * shape.layers if tp > 1 else 0
    # A ring all-reduce moves 2 (tp - 1) / tp of its bytes over each link.
    per_token_reduce = reduces * 2 * shape.width * 2 * (tp - 1) / tp / (LINK_SHARE * gpu.neighbour_bytes_per_s)
    fixed = STEP_S + reduces * ALLREDUCE_S
    weights = shape.params * shape.weight_bytes / reads
    pair = 4 * shape.layers * shape.heads * shape.head_dim / (tp * ATTENTION_FLOPS_SHARE * gpu.flops)
    return EngineProfile(
        tp=tp,
        pp=1,
        prefill=PrefillCost(fixed, 2 * shape.params / flops + per_token_reduce, pair),
        decode=DecodeCost(
            fixed + weights,
            shape.kv_bytes_per_token / reads,
            2 * shape.params / flops + per_token_reduce + ROW_S,
        ),
        kv_tokens=kv_tokens,
        overlap=1.0,
    )


_DTYPE = "bfloat16"


def known_shape(geometry: str, params: float, width: int, heads: int) -> ModelShape:
    """Return the shape of a bfloat16 model by the name or directory of its KV geometry.

    Args:
        geometry: A name that ``baton bench kv --geometry`` knows, or a model directory.
        params: Weights.
        width: Hidden size.
        heads: Query heads.

    Raises:
        ConfigError: There is no such geometry.
    """
    result = model_geometry(geometry, _DTYPE) if Path(geometry).is_dir() else named_geometry(geometry, _DTYPE)
    size = float(FLOAT_BYTES[_DTYPE])
    kv = sum(layer.elements_per_token for layer in result.layers) * size
    return ModelShape(geometry, params, len(result.layers), width, heads, result.layers[0].k_dim, kv, size)
