"""All operators but attention: copies of KV, sampling, norms, products with packed weights, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.kernel_parts.measure import Check, Timed, error

from baton_kernels import kv_copy as kv_copy_definition
from baton_kernels.experts import ExpertWeights, experts_reference
from baton_kernels.gpu import kv_copy
from baton_kernels.gpu.experts import TritonExperts
from baton_kernels.gpu.quantized_experts import TritonQuantizedExperts
from baton_kernels.gpu.quantized_linear import TritonEightBitLinear, TritonQuantizedLinear, takes_eight_bits
from baton_kernels.gpu.rejection import TritonRejectionSampler
from baton_kernels.gpu.row_wise import TritonGatedMul, TritonRmsNorm
from baton_kernels.gpu.sampling import TritonSampler
from baton_kernels.quantization import (
    ActivationScheme,
    ActivationType,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)
from baton_kernels.quantized_experts import QuantizedExpertWeights, quantized_experts_reference
from baton_kernels.quantized_linear import quantized_linear_reference
from baton_kernels.rejection import rejection_sample
from baton_kernels.row_wise import SILU, gated_reference, rms_norm_reference
from baton_kernels.sampling import RowFilter

FORMS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4": lambda weight: quantize_int4(weight, 128),
    "fp8": quantize_fp8,
    "nf4": quantize_nf4,
}
EIGHT_BITS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {"int8": quantize_int8, "fp8": quantize_fp8}
"""Whose inputs have 8 bits, too."""
HIDDEN = 4096
INNER = 14336
VOCAB = 128256
"""Those of Llama 3.1 8B."""
EXPERTS = 128
TOP_K = 8
EXPERT_INNER = 768
"""Those of Qwen3 30B-A3B, whose hidden size is half as large."""
TOKENS = {1: (1, 1), 16: (2, 16), 32: (17, 32), 64: (33, 64), 256: (65, 384), 2048: (385, 1 << 30)}
"""Rows that are timed, and those that a configuration found with them is for."""


def on(device: torch.device, form: Any) -> Any:
    """A quantized weight on a device."""
    tensors = {each.name: getattr(form, each.name) for each in fields(form)}
    return replace(form, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, torch.Tensor)})


def checks(device: torch.device) -> Iterator[Check]:
    """Each operator at small shapes against its definition."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2

    def norm() -> float:
        x = torch.randn(5, 96).to(dtype)
        weight = torch.randn(96).to(dtype)
        got = TritonRmsNorm(weight.to(device), 1e-6)(x.to(device))
        return error(got, rms_norm_reference(x.double(), weight.double(), 1e-6, 0.0), tolerance)

    def gated() -> float:
        x = torch.randn(5, 192).to(dtype)
        return error(TritonGatedMul()(x.to(device)), gated_reference(x.double(), SILU), tolerance)

    yield Check("rms_norm", norm)
    yield Check("silu_mul", gated)
    yield Check("kv_copy", lambda: _check_copies(device))
    yield Check("sample", lambda: _check_sampling(device))
    yield Check("rejection_sample", lambda: _check_rejection(device))
    for name, quantize in FORMS.items():
        yield Check(f"linear, {name}", lambda quantize=quantize: _check_linear(quantize, dtype, device, tolerance))
        if name in EIGHT_BITS:
            yield Check(f"linear, {name} by {name}", lambda name=name: _check_eight_bits(name, device))
        yield Check(f"moe, {name}", lambda quantize=quantize: _check_experts(quantize, dtype, device, tolerance))
    yield Check("moe", lambda: _check_experts(None, dtype, device, tolerance))


def _check_copies(device: torch.device) -> float:
    pool = torch.randn(6, 300)
    spans = np.array([[4, 0, 300], [1, 100, 64], [2, 7, 1]])
    want = torch.zeros(365, dtype=torch.float16)
    got = torch.zeros(365, dtype=torch.float16, device=device)
    there = pool.to(device, copy=True)
    kv_copy_definition.gather_spans(pool, spans, want)
    kv_copy.gather_spans(there, spans, got)
    worst = error(got, want, 1e-9)
    kv_copy_definition.scatter_spans(pool, spans, want)
    kv_copy.scatter_spans(there, spans, got)
    pairs = np.array([[4, 0], [1, 3]])
    kv_copy_definition.copy_blocks(pool, pairs)
    kv_copy.copy_blocks(there, pairs)
    return max(worst, error(there, pool, 1e-9))


def _check_sampling(device: torch.device) -> float:
    logits = torch.randn(4, 1000)
    keys = np.arange(4, dtype=np.uint64)
    greedy = [RowFilter(0.0, 0, 1.0, 0.0)] * 4
    sampler = TritonSampler(device)
    right = torch.equal(sampler(logits.to(device), greedy, keys).cpu(), logits.argmax(-1))
    first = sampler(logits.to(device), [RowFilter(1.0, 1, 1.0, 0.0)] * 4, keys).cpu()  # the only one of the best one
    return 0.0 if right and torch.equal(first, logits.argmax(-1)) else float("inf")


def _check_rejection(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.rand(6, n, 50, generator=generator) for n in (4, 3))
    target, draft = (x / x.sum(-1, keepdim=True) for x in (target, draft))
    drafts = torch.randint(0, 50, (6, 3), generator=generator)
    counts = torch.tensor([3, 3, 0, 1, 2, 3])
    keys = np.arange(24, dtype=np.uint64).reshape(6, 4)
    got, kept = TritonRejectionSampler(device)(*(x.to(device) for x in (target, draft, drafts, counts)), keys)
    want, wanted = rejection_sample(target.numpy(), draft.numpy(), drafts.numpy(), counts.numpy(), keys)
    right = np.array_equal(got.cpu().numpy(), want) and np.array_equal(kept.cpu().numpy(), wanted)
    return 0.0 if right else float("inf")


def _check_linear(
    quantize: Callable[[torch.Tensor], QuantizedWeight], dtype: torch.dtype, device: torch.device, tolerance: float
) -> float:
    weight = quantize(torch.randn(70, 384))
    operator = TritonQuantizedLinear(on(device, weight))
    worst = 0.0
    for tokens in (1, 20, 400):
        x = torch.randn(tokens, 384).to(dtype)
        want = quantized_linear_reference(x.double(), weight)
        worst = max(worst, error(operator(x.to(device)), want, tolerance))
    return worst


def _check_eight_bits(form: str, device: torch.device) -> float:
    weight = EIGHT_BITS[form](torch.randn(70, 384))
    scheme = ActivationScheme(ActivationType(form))
    if not takes_eight_bits(on(device, weight), scheme):
        return 0.0
    operator = TritonEightBitLinear(on(device, weight), None, scheme)
    worst = 0.0
    for tokens in (1, 100):
        x = torch.randn(tokens, 384)
        want = quantized_linear_reference(x, weight, activations=scheme)
        worst = max(worst, error(operator(x.to(device)), want, 1e-3))
    return worst


def _check_experts(
    quantize: Callable[[torch.Tensor], QuantizedWeight] | None,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
) -> float:
    x = torch.randn(9, 64).to(dtype)
    factors = torch.rand(9, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)]).int()
    gate_up, down = (torch.randn(4, *shape).to(dtype) / 8 for shape in ((64, 64), (64, 32)))
    given = [each.to(device) for each in (x, ids, factors)]
    if quantize is None:
        got = TritonExperts(ExpertWeights(gate_up.to(device), down.to(device)), SILU)(*given)
        return error(got, experts_reference(ExpertWeights(gate_up, down), SILU, x, ids, factors), tolerance)
    experts = QuantizedExpertWeights([quantize(each) for each in gate_up], [quantize(each) for each in down])
    there = QuantizedExpertWeights([on(device, e) for e in experts.gate_up], [on(device, e) for e in experts.down])
    want = quantized_experts_reference(experts, SILU, x, ids, factors)
    return error(TritonQuantizedExperts(there, SILU)(*given), want, tolerance)


def timed(device: torch.device) -> Iterator[Timed]:
    """Shapes of Llama 3.1 8B; experts of Qwen3 30B-A3B."""
    yield from _copies(device)
    x = torch.randn(4096, HIDDEN, device=device).bfloat16()
    weight = torch.randn(HIDDEN, device=device).bfloat16()
    norm = TritonRmsNorm(weight, 1e-6)
    rival = {"torch rms_norm": lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-6)}
    yield Timed("rms_norm, 4096 x 4096", lambda: norm(x), 4 * x.numel(), rivals=rival)
    wide = torch.randn(4096, 2 * INNER, device=device).bfloat16()
    product = TritonGatedMul()
    eager = {"torch silu(x) * y": lambda: F.silu(wide[:, :INNER]) * wide[:, INNER:]}
    yield Timed("silu_mul, 4096 x 14336", lambda: product(wide), 3 * wide.numel(), rivals=eager)
    logits = torch.randn(64, VOCAB, device=device) * 3
    keys = np.arange(64, dtype=np.uint64)
    sampler = TritonSampler(device)
    for name, row in (("greedy", (0.0, 0, 1.0, 0.0)), ("top-k 50, top-p 0.9", (0.8, 50, 0.9, 0.0))):
        rows = [RowFilter(*row)] * 64
        run = lambda rows=rows: sampler(logits, rows, keys)  # noqa: E731
        yield Timed(f"sample, {name}, 64 x 128256", run, 4 * logits.numel(), captured=False)
    yield from _linears(device)
    yield from _experts(device)


def _copies(device: torch.device) -> Iterator[Timed]:
    """Blocks of 16 tokens of 32 layers of 8 heads of 128, in bfloat16: 2 MiB each."""
    elements = 32 * 2 * 8 * 16 * 128
    pool = torch.randn(1024, elements, device=device, dtype=torch.float32).bfloat16()
    order = np.random.default_rng(0).permutation(1024)[:512]
    whole = np.array([(block, 0, elements) for block in order])
    head = [(b, part * 8 * 2048 + 2 * 2048, 2 * 2048) for b in order for part in range(64)]
    for name, spans, dtype in (
        ("512 blocks", whole, torch.bfloat16),
        ("2 of 8 heads of 512 blocks", np.array(head), torch.bfloat16),
        ("512 blocks to float16", whole, torch.float16),
    ):
        buffer = torch.empty(int(spans[:, 2].sum()), dtype=dtype, device=device)
        run = lambda spans=spans, buffer=buffer: kv_copy.gather_spans(pool, spans, buffer)  # noqa: E731
        yield Timed(f"kv_copy, gather, {name}", run, 4 * buffer.numel(), captured=False)
        back = lambda spans=spans, buffer=buffer: kv_copy.scatter_spans(pool, spans, buffer)  # noqa: E731
        yield Timed(f"kv_copy, scatter, {name}", back, 4 * buffer.numel(), captured=False)
    pairs = np.stack([order[:256], order[256:]], axis=1)
    moved = 4 * 256 * elements
    yield Timed("kv_copy, 256 blocks to others", lambda: kv_copy.copy_blocks(pool, pairs), moved, captured=False)


def _linears(device: torch.device) -> Iterator[Timed]:
    plain = (torch.randn(INNER, HIDDEN, device=device) * 0.02).bfloat16()
    for form, quantize in FORMS.items():
        weight = on(device, quantize(plain.cpu()))
        operator = TritonQuantizedLinear(weight)
        for tokens, bucket in TOKENS.items():
            x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
            moved = operator.nbytes + 2 * tokens * (HIDDEN + INNER)
            when = {"form": form.replace("nf4", "table"), "tokens": bucket}
            yield Timed(
                f"linear, {form}, {HIDDEN} to {INNER}, {tokens} tokens",
                lambda operator=operator, x=x: operator(x),
                moved,
                2 * tokens * HIDDEN * INNER,
                # Another weight: it is not compared, only timed beside it.
                {"torch bfloat16 (not compared)": lambda x=x: x @ plain.T},
                tunes=("quantized_linear", when),  # type: ignore[arg-type]
            )
    yield from _eight_bits(device, plain)


def _eight_bits(device: torch.device, plain: torch.Tensor) -> Iterator[Timed]:
    for form, quantize in EIGHT_BITS.items():
        weight = on(device, quantize(plain.cpu()))
        scheme = ActivationScheme(ActivationType(form))
        if not takes_eight_bits(weight, scheme):
            continue  # fp8, on a GPU without such numbers
        operator = TritonEightBitLinear(weight, None, scheme)
        for tokens, bucket in TOKENS.items():
            x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
            yield Timed(
                f"linear, {form} by {form}, {HIDDEN} to {INNER}, {tokens} tokens",
                lambda operator=operator, x=x: operator(x),
                operator.nbytes + 2 * tokens * (HIDDEN + INNER),
                2 * tokens * HIDDEN * INNER,
                tunes=("eight_bit_linear", {"form": form, "tokens": bucket}),
            )


def _experts(device: torch.device) -> Iterator[Timed]:
    hidden = HIDDEN // 2
    gate_up = torch.randn(EXPERTS, 2 * EXPERT_INNER, hidden, device=device).mul_(0.02).bfloat16()
    down = torch.randn(EXPERTS, hidden, EXPERT_INNER, device=device).mul_(0.02).bfloat16()
    cpu = [x.cpu() for x in (gate_up, down)]
    packed = QuantizedExpertWeights(*([on(device, quantize_fp8(each)) for each in x] for x in cpu))
    ways = {
        "bfloat16": ("experts", TritonExperts(ExpertWeights(gate_up, down), SILU), 2),
        "fp8": ("quantized_experts", TritonQuantizedExperts(packed, SILU), 1),
    }
    for tokens in (1, 64, 2048):
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        ids = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices.int()
        factors = torch.rand(tokens, TOP_K, device=device)
        read = int(ids.unique().numel()) * 3 * EXPERT_INNER * hidden
        each = -(-tokens * TOP_K // EXPERTS)
        for name, (operator, experts, size) in ways.items():
            run = lambda experts=experts, x=x, ids=ids, factors=factors: experts(x, ids, factors)  # noqa: E731
            flops = 2 * tokens * TOP_K * 3 * EXPERT_INNER * hidden
            bucket = {"tokens_per_expert": (0, 16) if each <= 16 else (17, 1 << 30)}
            tunes: Any = (operator, bucket) if tokens > 1 else None
            yield Timed(f"moe, {name}, {tokens} tokens", run, size * read, flops, tunes=tunes)
