"""Compiles the Triton kernels for a Hopper GPU, which needs none: ``python -m tests.support.compile_kernels``.

Triton's interpreter takes more than its compiler does. Prints a line per kernel: name, and bytes of shared memory.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_kernels.gpu import experts, kv_copy, rejection, row_wise, sampling
from baton_kernels.paged_attention import gpu_kernels as attention

TARGET = GPUTarget("cuda", 90, 32)
DTYPE = "*bf16"


def compiled(kernel: Any, pointers: dict[str, str], numbers: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile a kernel; arguments that are not named are int32."""
    types = dict.fromkeys(kernel.arg_names, "i32") | numbers | pointers
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    result = triton.compile(source, target=TARGET, options={"num_warps": 4})
    sys.stdout.write(f"{kernel.__name__} {result.metadata.shared}\n")


def attend(**constants: Any) -> None:
    """Compile attention with such tiles."""
    pointers = dict.fromkeys(("q", "k_pool", "v_pool", "out"), DTYPE) | dict.fromkeys(
        ("sums", "stats", "sinks"), "*fp32"
    )
    pointers |= dict.fromkeys(("query_starts", "context_lens", "tables", "tile_seqs", "tile_firsts"), "*i32")
    numbers = {"k_block": "i64", "v_block": "i64", "scale": "fp32", "softcap": "fp32"}
    compiled(attention.attend_kernel, pointers, numbers, {"BLOCK_SIZE": 16, **constants})


def main() -> int:
    """Compile them all."""
    options = {"WINDOW": True, "SOFTCAP": True, "SINKS": True}
    plain = dict.fromkeys(options, False)
    decode = {"GROUP": 4, "HEADS": 4, "TOKENS": 4, "SPLITS": 8, "TILE_M": 16, "TILE_N": 64}
    prompt = {"GROUP": 4, "HEADS": 4, "TOKENS": 16, "SPLITS": 1, "TILE_M": 64, "TILE_N": 64}
    latents = {"GROUP": 128, "HEADS": 16, "TOKENS": 1, "SPLITS": 8, "TILE_M": 16, "TILE_N": 32}
    head, latent = {"D": 128, "REST": 1, "DV": 128}, {"D": 512, "REST": 64, "DV": 512}
    for shape in (decode | head | options, prompt | head | plain, latents | latent | plain):
        attend(**shape)
    tensors = dict.fromkeys(("q", "k", "v", "q_out", "k_pool", "v_pool", "q_norm", "k_norm"), DTYPE)
    tensors |= {"cos": "*fp32", "sin": "*fp32"}
    tensors |= dict.fromkeys(("query_starts", "context_lens", "token_seq", "tables"), "*i32")
    flags = {"ROTATE": True, "PAIRS": False, "Q_NORM": True, "K_NORM": True, "LATENT": False}
    scalars = {"eps": "fp32", "offset": "fp32", "k_block": "i64", "v_block": "i64"}
    compiled(attention.write_kernel, tensors, scalars, {"D": 128, "DV": 128, **flags})
    merged = {"sums": "*fp32", "stats": "*fp32", "out": DTYPE, "rows": "*i32"}
    compiled(attention.merge_kernel, merged, {}, {"SPLITS": 8, "PAD": 8, "DV": 128})
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
    tile = {"BIAS": True, "TILE_M": 64, "TILE_N": 64, "TILE_K": 64}
    compiled(experts._gate_up_kernel, tensors, scalars, {"TOP_K": 8, "KIND": 2, **tile})
    compiled(experts._down_kernel, tensors | {"factors": "*fp32", "out": "*fp32"}, {}, tile)
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
