"""Compiles the Triton kernels for a Hopper GPU, which needs none: ``python -m tests.support.compile_kernels``.

Triton's interpreter takes more than its compiler does. Kernels that have configurations are compiled with those that
the shipped tables have for Hopper. Prints a line per kernel: name, and bytes of shared memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_kernels.gpu import (
    experts,
    kv_copy,
    quantized_experts,
    quantized_linear,
    rejection,
    row_wise,
    sampling,
    weights,
)
from baton_kernels.gpu.tuning import Tuning, ranked_tables
from baton_kernels.paged_attention import gpu as attention

TARGET = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)
DTYPE = "*bf16"
STORED = {0: (DTYPE, DTYPE), 1: ("*i8", "*i16"), 2: ("*fp8e4nv", "*fp32")}
"""Pools and their scales, by storage as kernels number it."""


def tunings(operator: str, **sizes: int) -> Tuning:
    """Return what an engine on Hopper takes."""
    tables = ranked_tables("no device", (9, 0), Path("/nowhere"))
    return next(found for table in tables if (found := table.find(operator, sizes)) is not None)


def compiled(
    kernel: Any,
    pointers: dict[str, str],
    numbers: dict[str, str],
    constants: dict[str, Any],
    warps: int = 4,
    stages: int = 3,
    target: GPUTarget = TARGET,
) -> None:
    """Compile a kernel; arguments that are not named are int32."""
    types = dict.fromkeys(kernel.arg_names, "i32") | numbers | pointers
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    result = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    sys.stdout.write(f"{kernel.__name__} {result.metadata.shared}\n")


def attend(head: tuple[int, int, int], group: int, *, few: bool, storage: int = 0, options: bool = False) -> None:
    """Compile attention with heads of a size: its largest power of two, the rest, and values'."""
    main, rest, values = head
    size = main + (rest if rest > 1 else 0)
    chosen = tunings("attention_few" if few else "attention_many", k_dim=size, v_dim=values, group=group)
    heads = min(group, chosen.tile_m)
    stored, scales = STORED[storage]
    pointers = {"q": DTYPE, "out": DTYPE} | dict.fromkeys(("k_pool", "v_pool"), stored)
    pointers |= dict.fromkeys(("k_scales", "v_scales"), scales) | dict.fromkeys(("sums", "stats", "sinks"), "*fp32")
    indices = ("query_starts", "context_lens", "positions", "ancestors", "tree_starts", "tables", "tile_seqs")
    pointers |= dict.fromkeys((*indices, "tile_numbers"), "*i32")
    numbers = {"k_block": "i64", "v_block": "i64", "scale_block": "i64", "scale": "fp32", "softcap": "fp32"}
    constants = {"GROUP": group, "HEADS": heads, "TOKENS": chosen.tile_m // heads, "SPLITS": 8 if few else 1}
    constants |= {"TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n, "D": main, "REST": rest, "DV": values}
    constants |= dict.fromkeys(("WINDOW", "SOFTCAP", "SINKS", "TREE"), options)
    constants |= {"BLOCK_SIZE": 16, "STORAGE": storage}
    compiled(attention.attend_kernel, pointers, numbers, constants, chosen.warps, chosen.stages)


def quantized(form: int, scales: int, group: int, rows: tuple[int, ...]) -> None:
    """Compile the products with weights of a form and what tiles have of scales, for such numbers of rows."""
    pointers = {"values": ("*i8", "*u8", "*fp8e4nv", "*u8")[form], "order": "*i32"}
    pointers |= dict.fromkeys(("scales", "zeros", "table", "x_scales", "sums", "factors"), "*fp32")
    pointers |= dict.fromkeys(("x", "bias", "residual", "out"), DTYPE)
    flags = {"FORM": form, "ZEROS": form < 2, "ORDER": form == 0, "X_SCALES": form != 1, "BIAS": True}
    for tokens in rows:
        chosen = tunings("quantized_linear", tokens=tokens)
        tiles = {"TILE_N": chosen.tile_n, "TILE_K": chosen.tile_k}
        if not chosen.tile_m:
            only = {name: flags[name] for name in ("FORM", "ZEROS", "ORDER")}
            compiled(weights.dequantize_kernel, pointers, {}, only | tiles, chosen.warps)
            continue
        constants = flags | tiles | {"SCALES": scales, "GROUP": group, "RESIDUAL": True, "SPLIT": tokens == 1}
        constants |= {"TILE_M": chosen.tile_m}
        compiled(quantized_linear.linear_kernel, pointers, {}, constants, chosen.warps, chosen.stages)
    if form == 2:  # its bytes, where Triton does not convert such numbers
        chosen, old = tunings("quantized_linear", tokens=1), pointers | {"values": "*u8"}
        constants = flags | {"SCALES": scales, "GROUP": group, "RESIDUAL": True, "SPLIT": True}
        constants |= {"TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n, "TILE_K": chosen.tile_k}
        compiled(quantized_linear.linear_kernel, old, {}, constants, chosen.warps, chosen.stages, AMPERE)
    pointers |= dict.fromkeys(("pairs", "starts", "counts", "tile_experts", "tile_firsts"), "*i32")
    numbers = {"expert_bytes": "i64", "alpha": "fp32", "limit": "fp32"}
    for each in rows[1:2]:
        chosen = tunings("quantized_experts", tokens_per_expert=each)
        constants = flags | {"SCALES": scales, "GROUP": group, "TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n}
        constants |= {"TILE_K": chosen.tile_k}
        how = (chosen.warps, chosen.stages)
        gated = constants | {"TOP_K": 8, "KIND": 0}
        compiled(quantized_experts.quantized_gate_up_kernel, pointers, numbers, gated, *how)
        down = pointers | {"out": "*fp32"}
        compiled(quantized_experts.quantized_down_kernel, down, numbers, constants, *how)


def eight_bits(*, integer: bool) -> None:
    """Compile products of 8 bits with 8 bits, for few tokens and many."""
    stored = "*i8" if integer else "*fp8e4nv"
    pointers = dict.fromkeys(("x", "values"), stored) | dict.fromkeys(("bias", "residual", "out"), DTYPE)
    pointers |= dict.fromkeys(("x_scales", "scales", "zeros", "sums"), "*fp32")
    for tokens in (1, 40, 4096):
        chosen = tunings("eight_bit_linear", tokens=tokens)
        constants = {"INTEGER": integer, "ZEROS": integer, "BIAS": True, "RESIDUAL": True, "SPLIT": tokens == 1}
        constants |= {"TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n, "TILE_K": chosen.tile_k}
        compiled(quantized_linear.eight_bit_kernel, pointers, {}, constants, chosen.warps, chosen.stages)


def main() -> int:
    """Compile them all."""
    eight_bits(integer=True)
    eight_bits(integer=False)
    head, latent = (128, 1, 128), (512, 64, 512)
    for few in (True, False):
        for storage in range(3):
            attend(head, 4, few=few, storage=storage, options=storage == 1)
        attend((256, 1, 256), 2, few=few, options=True)
        attend(latent, 128, few=few)
    tensors = dict.fromkeys(("q", "k", "v", "q_out", "k_pool", "v_pool", "q_norm", "k_norm"), DTYPE)
    tensors |= {"cos": "*fp32", "sin": "*fp32"}
    tensors |= dict.fromkeys(("query_starts", "context_lens", "token_seq", "positions", "tables"), "*i32")
    flags = {
        "ROTATE": True,
        "PAIRS": False,
        "Q_NORM": True,
        "K_NORM": True,
        "LATENT": False,
        "TREE": True,
        "D": 128,
        "DV": 128,
    }
    scalars = {"eps": "fp32", "offset": "fp32", "k_block": "i64", "v_block": "i64", "scale_block": "i64"}
    for storage, (stored, scales) in {**STORED, 2: ("*u8", "*fp32")}.items():
        kept = {"k_pool": stored, "v_pool": stored, "k_scales": scales, "v_scales": scales}
        compiled(attention.write_kernel, tensors | kept, scalars, {**flags, "STORAGE": storage})
    merged = {"sums": "*fp32", "stats": "*fp32", "out": DTYPE, "rows": "*i32"}
    compiled(attention.merge_kernel, merged, {}, {"SPLITS": 8, "PAD": 8, "DV": 128})
    for form in range(4):
        quantized(form, 1, 1, (1, 200, 4096))
        quantized(form, *((0, 1), (2, 32), (3, 1), (2, 32))[form], (16,))
    sums = {"sums": "*fp32", "bias": DTYPE, "residual": DTYPE, "out": DTYPE}
    compiled(quantized_linear.sum_kernel, sums, {}, {"BIAS": True, "RESIDUAL": True, "TILE": 512})
    row = dict.fromkeys(("x", "weight", "residual", "out"), DTYPE)
    scalars = {"eps": "fp32", "offset": "fp32"}
    compiled(row_wise._rms_norm_kernel, row, scalars, {"D": 4096, "RESIDUAL": True})
    for kind in range(3):
        row = {"x": DTYPE, "out": DTYPE}
        compiled(row_wise._gated_kernel, row, {"alpha": "fp32", "limit": "fp32"}, {"KIND": kind, "D": 1024})
    spans = dict.fromkeys(("spans", "ends", "tile_spans", "tile_firsts"), "*i64")
    for gather in (True, False):
        both = {"pool": DTYPE, "buffer": "*fp16", **spans}
        compiled(kv_copy._copy_kernel, both, {"block_stride": "i64"}, {"T": 2048, "GATHER": gather})
    blocks = {"pool": "*i64", "pairs": "*i64"}
    compiled(kv_copy._copy_blocks_kernel, blocks, {"block_stride": "i64"}, {"T": 2048})
    groups = dict.fromkeys(("order", "starts", "counts", "tile_experts", "tile_firsts"), "*i32")
    tensors = groups | dict.fromkeys(("x", "weights", "bias", "out"), DTYPE)
    scalars = {"alpha": "fp32", "limit": "fp32"}
    for each in (1, 100):
        chosen = tunings("experts", tokens_per_expert=each)
        tile = {"BIAS": True, "TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n, "TILE_K": chosen.tile_k}
        how = (chosen.warps, chosen.stages)
        compiled(experts._gate_up_kernel, tensors, scalars, {"TOP_K": 8, "KIND": 2, **tile}, *how)
        compiled(experts._down_kernel, tensors | {"factors": "*fp32", "out": "*fp32"}, {}, tile, *how)
    rows = {"logits": DTYPE, "masks": "*i32", "top_ks": "*i32", "tokens": "*i64", "keys": "*u64", "constants": "*u64"}
    rows |= dict.fromkeys(("temperatures", "top_ps", "min_ps"), "*fp32")
    which = dict.fromkeys(("MASKED", "TOP_K", "TOP_P"), True)
    compiled(sampling._sample_kernel, rows, {"first_token_number": "i64"}, {"TILE": 4096, "CHUNK": 128, **which})
    rows = {"drafts": "*i64", "counts": "*i64", "keys": "*u64", "constants": "*u64", "tokens": "*i64"}
    rows |= {"target": "*fp32", "draft": "*fp32", "accepted": "*i64"}
    numbers = {"accept_number": "i64", "first_token_number": "i64"}
    for drawn in (True, False):
        compiled(rejection._rejection_kernel, rows, numbers, {"DRAWN": drawn, "TILE": 4096})
    return 0


if __name__ == "__main__":
    sys.exit(main())
