"""Every launch of the Triton kernels that models of the shipped forms and dtypes make, by the operators themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from baton_kernels.experts import ExpertWeights
from baton_kernels.gpu import kv_copy
from baton_kernels.gpu.experts import TritonExperts
from baton_kernels.gpu.quantized_experts import TritonQuantizedExperts
from baton_kernels.gpu.quantized_linear import TritonEightBitLinear, TritonQuantizedLinear, takes_eight_bits
from baton_kernels.gpu.rejection import TritonRejectionSampler
from baton_kernels.gpu.row_wise import TritonGatedMul, TritonRmsNorm
from baton_kernels.gpu.sampling import TritonSampler
from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch, Rotation, TokenTrees
from baton_kernels.paged_attention.gpu import TritonPagedAttention
from baton_kernels.quantization import (
    EXACT,
    INT8_PER_TOKEN,
    ActivationScheme,
    ActivationType,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
)
from baton_kernels.quantized_experts import QuantizedExpertWeights
from baton_kernels.row_wise import SILU, Activation, ActivationKind
from baton_kernels.sampling import RowFilter

CPU = torch.device("cpu")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "f16": F16, "f32": F32}
CLIPPED = Activation(ActivationKind.CLIPPED_SWISH, 1.702, 7.0)


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of an operator.

    Attributes:
        name: What is called and with what, for people.
        call: Makes the call.
        brief: Whether it is among the few that compile every kernel once.
        fp8: Whether it needs a GPU that has float8_e4m3fn.
    """

    name: str
    call: Callable[[], object]
    brief: bool = False
    fp8: bool = False


def all_launches() -> Iterator[Launch]:
    """Return the launches of all operators."""
    yield from _attention()
    yield from _linears()
    yield from _experts()
    yield from _others()


# Attention


def _spec(heads: int, kv_heads: int, k_dim: int, v_dim: int = 0, *, window: int = 0, softcap: float = 0.0,
          sinks: bool = False, latent: bool = False) -> AttentionSpec:  # fmt: skip
    logits = torch.zeros(heads) if sinks else None
    return AttentionSpec(heads, kv_heads, k_dim, v_dim or k_dim, 0.1, window, softcap, logits, latent)


SHAPES = {
    "llama": _spec(32, 8, 128),
    "qwen2-small": _spec(14, 2, 64),
    "gpt-oss": _spec(64, 8, 64, window=128, sinks=True),
    "phi2": _spec(32, 32, 80),
    "phi3": _spec(32, 32, 96, window=2047),
    "gemma2": _spec(8, 4, 256, window=4096, softcap=50.0),
    "gemma4": _spec(8, 1, 512),
    "deepseek": _spec(128, 1, 576, 512, latent=True),
    "deepseek-heads": _spec(128, 128, 192, 128),
}
"""Heads of models, by the family that has them."""
EIGHT_BITS = ("llama", "gemma2", "deepseek")
STORAGES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def _attention() -> Iterator[Launch]:
    for shape, spec in SHAPES.items():
        for name, dtype in DTYPES.items():
            brief = name == "bf16" and shape == "llama"
            yield Launch(f"attention {shape} {name}", partial(attend, spec, dtype, dtype), brief)
        if shape in EIGHT_BITS:
            for stored, kind in STORAGES.items():
                fp8 = stored == "fp8"
                yield Launch(f"attention {shape} bf16 kv-{stored}", partial(attend, spec, BF16, kind), fp8=fp8)
    yield Launch("attention llama f32 kv-bf16", partial(attend, SHAPES["llama"], F32, BF16))
    yield Launch("attention llama f32 kv-int8", partial(attend, SHAPES["llama"], F32, torch.int8))
    for shape in ("llama", "gpt-oss", "deepseek"):
        yield Launch(f"attention {shape} bf16 trees", partial(attend, SHAPES[shape], BF16, BF16, trees=True))
    llama = SHAPES["llama"]
    norms = torch.ones(llama.k_dim, dtype=BF16)
    angles = torch.zeros(64, llama.k_dim // 2)
    for name, rotation in {
        "halves": Rotation(angles, angles),
        "norms": Rotation(angles, angles, norms, norms, 1e-6, 1.0),
        "pairs": Rotation(angles, angles, pairs=True),
    }.items():
        for stored, kind in {"bf16": BF16, **STORAGES}.items():
            call = partial(attend, llama, BF16, kind, rotation=rotation)
            yield Launch(f"rotated {name} bf16 kv-{stored}", call, brief=False, fp8=stored == "fp8")


def attend(
    spec: AttentionSpec,
    dtype: torch.dtype,
    stored: torch.dtype,
    *,
    rotation: Rotation | None = None,
    trees: bool = False,
) -> None:
    """Run decodes of one sequence (split), of many (not split), and a prompt in a step with a decode."""
    attention = TritonPagedAttention(CPU)
    pool = layer_pool(spec, stored)
    steps = [([1], [4000], trees), ([1] * 512, [600] * 512, False), ([300, 1], [700, 40], False)]
    for counts, contexts, with_trees in steps[:1] if trees or rotation else steps:
        plan = attention.prepare(ragged_batch(counts, contexts, trees=with_trees))
        tokens = sum(counts)
        q = torch.zeros(tokens, spec.num_heads, spec.k_dim, dtype=dtype)
        k = torch.zeros(tokens, spec.kv_heads, spec.k_dim, dtype=dtype)
        v = k[..., : spec.v_dim] if spec.latent else torch.zeros(tokens, spec.kv_heads, spec.v_dim, dtype=dtype)
        attention.run_rotated(plan, spec, pool, (q, k, v), rotation)


def layer_pool(spec: AttentionSpec, stored: torch.dtype, blocks: int = 4, block_size: int = 16) -> LayerPool:
    """Return a pool of one layer; scales are those that its dtype has."""
    k = torch.zeros(blocks, spec.kv_heads, block_size, spec.k_dim, dtype=stored)
    v = k[..., : spec.v_dim] if spec.latent else torch.zeros_like(k[..., :1]).expand(*k.shape[:3], spec.v_dim).clone()
    scales = None
    if stored is torch.int8:
        scales = torch.zeros(blocks, spec.kv_heads, block_size, dtype=BF16)
    if stored is torch.float8_e4m3fn:
        scales = torch.ones(spec.kv_heads)
    return LayerPool(k, v, 0, scales, scales)


def ragged_batch(counts: list[int], contexts: list[int], *, trees: bool = False, width: int = 256) -> RaggedBatch:
    """Return a step of sequences with so many new tokens and tokens."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lens = np.array(contexts, np.int32)
    total = int(starts[-1])
    tree = TokenTrees(np.ones(total, np.uint64), lens - 1) if trees else None
    tables = np.zeros((len(counts), width), np.int32)
    return RaggedBatch(np.zeros(total, np.int64), starts, lens, tables, 16, trees=tree)


# Linear layers

ROWS, COLUMNS = 1024, 2048
MANY_ROWS = 32768
"""So many that tiles are not shared by several programs."""
TOKENS = (1, 24, 48, 200, 512)
"""One of each entry of the tables."""
FP8_BLOCKS = ActivationScheme(ActivationType.FP8, group=128)
FP8_PER_TOKEN = ActivationScheme(ActivationType.FP8)


def quantized_weight(form: str, rows: int, columns: int = COLUMNS) -> QuantizedWeight:
    """Return a weight of a form: ``int4-128-order`` has groups of 128 and an order of its columns; 0: one group."""
    kind, group, *more = form.split("-")
    size = int(group) or columns
    scales = torch.ones(rows, columns // size)
    order = torch.arange(columns, dtype=torch.int32) if "order" in more else None
    if kind == "int8":
        values = torch.zeros(rows, columns, dtype=torch.int8)
        return Int8Weight(values, scales, torch.zeros_like(scales) if "zeros" in more else None, order)
    if kind == "fp8":
        height = 128 if "blocks" in more else 1
        scales = torch.ones(rows // height, columns // size)
        return Fp8Weight(torch.zeros(rows, columns).to(torch.float8_e4m3fn), scales, (height, size))
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    if kind == "int4":
        return Int4Weight(packed, scales, torch.full_like(scales, 8.0), order)
    return TableWeight(packed, scales, TABLES[kind])


TABLES = {
    "mxfp4": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    "nf4": torch.linspace(-1, 1, 16),
}
FORMS = (
    *("int8-0", "int8-0-zeros", "int8-128-order", "int4-128", "int4-128-order", "int4-32"),
    *("fp8-0", "fp8-128-blocks", "mxfp4-32", "nf4-64", "int4-96"),
)


def _linears() -> Iterator[Launch]:
    for form in FORMS:
        columns = 1920 if form == "int4-96" else COLUMNS
        for tokens in TOKENS:
            for rows in (ROWS, MANY_ROWS) if tokens < 512 else (ROWS,):
                brief = form in ("int8-0-zeros", "int4-128", "fp8-128-blocks", "mxfp4-32") and tokens in (1, 512)
                call = partial(multiply, form, rows, columns, tokens, BF16)
                yield Launch(f"linear {form} bf16 {tokens} of {rows}", call, brief and rows == ROWS)
        for name, dtype in (("f16", F16), ("f32", F32)):
            for tokens in (1, 200):
                call = partial(multiply, form, MANY_ROWS, columns, tokens, dtype)
                yield Launch(f"linear {form} {name} {tokens} of {MANY_ROWS}", call)
    for form, scheme, fp8 in (
        ("int8-0-zeros", INT8_PER_TOKEN, False),
        ("fp8-0", FP8_PER_TOKEN, True),
        ("int4-128", INT8_PER_TOKEN, False),
        ("fp8-128-blocks", FP8_BLOCKS, False),
        ("fp8-128-blocks", FP8_PER_TOKEN, False),
    ):
        for tokens in (1, 24, 200, 512):
            for rows in (ROWS, MANY_ROWS) if tokens < 512 else (ROWS,):
                call = partial(multiply, form, rows, COLUMNS, tokens, BF16, scheme)
                grouped = " by group" if scheme.group else ""
                name = f"linear {form} inputs {scheme.type.value}{grouped} {tokens} of {rows}"
                yield Launch(name, call, tokens == 1 and rows == ROWS and form == "int8-0-zeros", fp8)


def multiply(
    form: str, rows: int, columns: int, tokens: int, dtype: torch.dtype, scheme: ActivationScheme = EXACT
) -> None:
    """Run a linear layer with and without bias and residual."""
    weight = quantized_weight(form, rows, columns)
    x = torch.zeros(tokens, columns, dtype=dtype)
    bias = torch.zeros(rows, dtype=dtype)
    make = TritonEightBitLinear if takes_eight_bits(weight, scheme) else TritonQuantizedLinear
    make(weight, None, scheme)(x)
    if rows == MANY_ROWS and tokens == 1:
        make(weight, bias, scheme)(x, torch.zeros(tokens, rows, dtype=dtype))


# Experts

EXPERTS, INNER, HIDDEN = 4, 512, 1024


def _experts() -> Iterator[Launch]:
    for interleaved, activation in ((False, SILU), (True, CLIPPED)):
        for name, dtype in DTYPES.items():
            for tokens in (8, 100, 400):
                kind = "interleaved" if interleaved else "plain"
                call = partial(mix, interleaved, activation, tokens, dtype)
                yield Launch(f"experts {kind} {name} {tokens}", call, name == "bf16" and tokens == 8)
    for form in ("int8-0", "int4-128", "fp8-128-blocks", "mxfp4-32"):
        for name, dtype in DTYPES.items():
            for tokens in (8, 400):
                call = partial(mix_quantized, form, tokens, dtype)
                brief = name == "bf16" and tokens == 8 and form == "mxfp4-32"
                yield Launch(f"experts {form} {name} {tokens}", call, brief)
    for tokens in (8, 400):
        yield Launch(f"experts int4-96 bf16 {tokens}", partial(mix_quantized, "int4-96", tokens, BF16, hidden=960))
    call = partial(mix_quantized, "int8-0", 400, BF16, INT8_PER_TOKEN)
    yield Launch("experts int8-0 inputs int8 400", call)


def _choices(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(tokens * 2).view(tokens, 2) % EXPERTS
    return ids, torch.ones(tokens, 2)


def mix(interleaved: bool, activation: Activation, tokens: int, dtype: torch.dtype) -> None:
    """Run a mixture of plain experts."""
    gate_up, down = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if interleaved:
        gate_up, down = (EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, INNER, HIDDEN)
        biases = torch.zeros(EXPERTS, 2 * INNER, dtype=dtype), torch.zeros(EXPERTS, HIDDEN, dtype=dtype)
    weights = ExpertWeights(torch.zeros(gate_up, dtype=dtype), torch.zeros(down, dtype=dtype), *biases, interleaved)
    TritonExperts(weights, activation)(torch.zeros(tokens, HIDDEN, dtype=dtype), *_choices(tokens))


def mix_quantized(
    form: str, tokens: int, dtype: torch.dtype, scheme: ActivationScheme = EXACT, *, hidden: int = HIDDEN
) -> None:
    """Run a mixture of quantized experts."""
    inner = INNER * hidden // HIDDEN
    gate_up = [quantized_weight(form, 2 * inner, hidden)] * EXPERTS
    down = [quantized_weight(form, hidden, inner)] * EXPERTS
    experts = TritonQuantizedExperts(QuantizedExpertWeights(gate_up, down), SILU, (scheme, scheme))
    experts(torch.zeros(tokens, hidden, dtype=dtype), *_choices(tokens))


# The others

VOCAB = 151936


def _others() -> Iterator[Launch]:
    for name, dtype in DTYPES.items():
        brief = name == "bf16"
        for dim in (1024, 8192):
            yield Launch(f"norm {name} {dim}", partial(norm, dim, dtype), brief and dim == 1024)
        for kind in ActivationKind:
            call = partial(TritonGatedMul(Activation(kind, 1.702, 7.0)), torch.zeros(4, 2 * 14336, dtype=dtype))
            yield Launch(f"gated {kind.name.lower()} {name}", call, brief and kind is ActivationKind.SILU)
        yield Launch(f"sample {name}", partial(sample, dtype), brief)
        yield Launch(f"gather {name}", partial(copy_spans, dtype), brief)
    for drawn in (True, False):
        yield Launch(f"rejection {'drawn' if drawn else 'given'}", partial(reject, drawn=drawn), drawn)
    call = partial(kv_copy.copy_blocks, torch.zeros(4, 4096, dtype=torch.uint8), np.array([[0, 1]]))
    yield Launch("copy blocks", call, brief=True)


def norm(dim: int, dtype: torch.dtype) -> None:
    """Run RMS norm without and with a residual."""
    x = torch.zeros(4, dim, dtype=dtype)
    operator = TritonRmsNorm(x[0], 1e-5)
    operator(x)
    operator(x, x)


def sample(dtype: torch.dtype) -> None:
    """Choose a token, with and without a mask."""
    mask = np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32)
    sampler = TritonSampler(CPU)
    for masks in (None, [mask]):
        filters = [RowFilter(0.7, 50, 0.9, 0.0)]
        sampler(torch.zeros(1, VOCAB, dtype=dtype), filters, np.ones(1, np.uint64), masks)


def reject(*, drawn: bool) -> None:
    """Verify drafts."""
    target = torch.full((2, 4, VOCAB), 1.0 / VOCAB)
    drafts = torch.zeros(2, 3, dtype=torch.int64)
    draft = target[:, :3].contiguous() if drawn else None
    counts = torch.zeros(2, dtype=torch.int64)
    TritonRejectionSampler(CPU)(target, draft, drafts, counts, np.ones((2, 4), np.uint64))


def copy_spans(dtype: torch.dtype) -> None:
    """Gather and scatter parts of blocks, as they are and with another dtype."""
    pool = torch.zeros(4, 4096, dtype=dtype)
    spans = np.array([[0, 0, 1024], [1, 1024, 1024]])
    for buffer in (torch.zeros(2048, dtype=dtype), torch.zeros(2048, dtype=F16 if dtype is F32 else F32)):
        kv_copy.gather_spans(pool, spans, buffer)
        kv_copy.scatter_spans(pool, spans, buffer)
