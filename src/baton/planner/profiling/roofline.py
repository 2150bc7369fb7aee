"""A profile without hardware: what a GPU's published figures allow a model, at stated efficiencies.

Prefill is bound by arithmetic, decode by reading weights and KV (Williams et al., "Roofline", CACM 2009; applied to
LLM serving in Pope et al., "Efficiently Scaling Transformer Inference", MLSys 2023). Tensor parallelism adds two
all-reduces per layer. It says how a plan changes with hardware and workload; what an engine really does is for
``baton profile`` to measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.bench.core.geometries import model_geometry, named_geometry
from baton.errors import ConfigError, shown
from baton.kv_cache.kv_types import FLOAT_BYTES
from baton.planner.profile import DecodeCost, EngineProfile, Limits, Link, Memory, PrefillCost, Profile


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


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the published figures that are taken for reached, and fixed costs in seconds.

    Attributes:
        flops: Of matrix products of prompts.
        attention_flops: Of attention over prompts.
        memory: Of reading weights and KV.
        links: Of all-reduces and of KV on its way.
        usable_memory: For weights and KV.
        step_s: Of a step: the scheduler, launches of kernels.
        allreduce_s: Of an all-reduce, beyond its bytes.
        row_s: Of a sequence in a step: sampling.
    """

    flops: float = 0.55
    attention_flops: float = 0.35
    memory: float = 0.75
    links: float = 0.7
    usable_memory: float = 0.9
    step_s: float = 3e-3
    allreduce_s: float = 10e-6
    row_s: float = 20e-6


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a dense model's cost depends on.

    Attributes:
        name: Of the model.
        params: Weights.
        layers: Of them.
        width: Hidden size.
        heads: Query heads.
        head_dim: Of each.
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


def roofline_profile(gpu_name: str, shape: ModelShape, tps: tuple[int, ...], efficiency: Efficiency) -> Profile:
    """Return a profile that follows from published figures.

    Args:
        gpu_name: One of :data:`GPUS`.
        shape: The model.
        tps: Tensor-parallel sizes; those without room for the weights are left out.
        efficiency: What is taken for reached.

    Raises:
        ConfigError: There is no such GPU, or the model fits into none of the sizes.
    """
    if gpu_name not in GPUS:
        raise ConfigError(f"--roofline must be one of {', '.join(GPUS)}, got {shown(gpu_name)}", field="roofline")
    gpu = GPUS[gpu_name]
    memory = Memory(gpu.memory_bytes, shape.params * shape.weight_bytes, efficiency.usable_memory)
    engines = []
    for tp in tps:
        left = tp * efficiency.usable_memory * gpu.memory_bytes - memory.weights_bytes
        if left >= shape.kv_bytes_per_token:
            engines.append(_engine(gpu, shape, tp, int(left / shape.kv_bytes_per_token), efficiency))
    if not engines:
        raise ConfigError(f"{shape.name} fits into none of {', '.join(map(str, tps))} GPUs", field="tp")
    return Profile(
        model=shape.name,
        source=(
            f"derived, not measured: roofline of {gpu_name} (published figures) at {efficiency.flops:.0%} of its "
            f"arithmetic, {efficiency.memory:.0%} of its memory bandwidth, {efficiency.links:.0%} of its links"
        ),
        layers=shape.layers,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        engines=tuple(engines),
        link=Link(100e-6, efficiency.links * gpu.network_bytes_per_s),
        limits=Limits(max_num_seqs=256, max_num_batched_tokens=8192, prefill_chunk=2048, block_size=16),
        memory=memory,
    )


def _engine(gpu: Gpu, shape: ModelShape, tp: int, kv_tokens: int, efficiency: Efficiency) -> EngineProfile:
    flops, reads = tp * efficiency.flops * gpu.flops, tp * efficiency.memory * gpu.memory_bytes_per_s
    reduces = 2 * shape.layers if tp > 1 else 0
    # A ring all-reduce moves 2 (tp - 1) / tp of its bytes over each link.
    per_token_reduce = reduces * 2 * shape.width * 2 * (tp - 1) / tp / (efficiency.links * gpu.neighbour_bytes_per_s)
    fixed = efficiency.step_s + reduces * efficiency.allreduce_s
    weights = shape.params * shape.weight_bytes / reads
    pair = 4 * shape.layers * shape.heads * shape.head_dim / (tp * efficiency.attention_flops * gpu.flops)
    return EngineProfile(
        tp=tp,
        pp=1,
        prefill=PrefillCost(fixed, 2 * shape.params / flops + per_token_reduce, pair),
        decode=DecodeCost(
            fixed + weights,
            shape.kv_bytes_per_token / reads,
            2 * shape.params / flops + per_token_reduce + efficiency.row_s,
        ),
        kv_tokens=kv_tokens,
        overlap=1.0,
    )


def known_shape(geometry: str, params: float, width: int, heads: int, dtype: str) -> ModelShape:
    """Return the shape of a model by the name or directory of its KV geometry.

    Args:
        geometry: A name that ``baton bench kv --geometry`` knows, or a model directory.
        params: Weights.
        width: Hidden size.
        heads: Query heads.
        dtype: Of weights and KV.

    Raises:
        ConfigError: There is no such geometry.
    """
    found = model_geometry(geometry, dtype) if Path(geometry).is_dir() else named_geometry(geometry, dtype)
    kv = sum(layer.elements_per_token for layer in found.layers) * FLOAT_BYTES[dtype]
    first = found.layers[0]
    return ModelShape(
        geometry, params, len(found.layers), width, heads, first.k_dim, float(kv), float(FLOAT_BYTES[dtype])
    )
