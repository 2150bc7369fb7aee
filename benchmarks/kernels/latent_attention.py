"""One layer of multi-head latent attention, in three ways.

- ``absorbed``: every sequence attends over the latents in the pool themselves;
- ``latents``: what is served: chunks of prompts expand latents to heads' keys and values, tile by tile, where that
  takes fewer operations;
- ``expanded``: keys and values of heads lie in the pool, nine times as many bytes.

DeepSeek-V2-Lite's shape: 16 heads of 128 + 64 (rotary) and values of 128, rank 512; bfloat16, random numbers. All ways
begin with rotated queries and latents of the new tokens and end with heads' outputs: the first two include the
projections of queries and outputs or of the context's keys and values, the third that of new tokens' keys and values.
They take turns; medians in ms of processor time, and the bytes that a token takes in the pool.

    python benchmarks/kernels/latent_attention.py --write
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton_kernels.cpu import load_library, runnable_variants
from baton_kernels.paged_attention import (
    AttentionSpec,
    CpuPagedAttention,
    LatentProjections,
    LayerPool,
    RaggedBatch,
    attend_latent,
)

RESULT = Path(__file__).parents[1] / "results" / "latent_attention.json"
HEADS = 16
NOPE = 128
ROPE = 64
V_DIM = 128
RANK = 512
BLOCK = 16
ROW = RANK + ROPE
SCALE = (NOPE + ROPE) ** -0.5
WORKLOADS = {
    "decode_1": ((2048, 1),),
    "decode_8": ((2048, 1),) * 8,
    "prefill_512": ((512, 512),),
    "chunk_128_of_2048": ((2048, 128),),
    "chunk_512_of_2048": ((2048, 512),),
    "prefill_2048": ((2048, 2048),),
    "chunk_2048_of_8192": ((8192, 2048),),
    "chunk_512_beside_decode_8": (*((2048, 1),) * 8, (512, 512)),
}
"""(context, new tokens) of each sequence."""


def make_batch(sequences: tuple[tuple[int, int], ...]) -> tuple[RaggedBatch, int]:
    """Return a batch of some sequences, and the blocks that they take."""
    widths = [-(-context // BLOCK) for context, _ in sequences]
    tables = np.zeros((len(sequences), max(widths)), np.int32)
    order = np.random.default_rng(0).permutation(sum(widths)).astype(np.int32)
    at = 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[at : at + width]
        at += width
    starts = np.concatenate([[0], np.cumsum([new for _, new in sequences])]).astype(np.int32)
    positions = np.concatenate([np.arange(context - new, context) for context, new in sequences])
    return RaggedBatch(positions, starts, np.array([c for c, _ in sequences], np.int32), tables, BLOCK), at


def ways(backend: CpuPagedAttention, sequences: tuple[tuple[int, int], ...]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the ways to compute a layer's attention for some sequences."""
    batch, blocks = make_batch(sequences)
    total = int(batch.query_starts[-1])

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims).bfloat16()

    weight = normal(HEADS * (NOPE + V_DIM), RANK) * RANK**-0.5
    projections = LatentProjections(weight, HEADS, V_DIM)
    q = normal(total, HEADS, NOPE + ROPE)
    rows = normal(total, ROW)
    latents = normal(blocks, 1, BLOCK, ROW)
    latent_pool = LayerPool(latents, latents[..., :RANK])
    heads = normal(blocks, HEADS * BLOCK * (NOPE + ROPE + V_DIM))
    keys, values = heads.tensor_split([HEADS * BLOCK * (NOPE + ROPE)], dim=1)
    pool = LayerPool(
        keys.view(blocks, HEADS, BLOCK, NOPE + ROPE).as_strided(
            (blocks, HEADS, BLOCK, NOPE + ROPE), (heads.stride(0), BLOCK * (NOPE + ROPE), NOPE + ROPE, 1)
        ),
        values.as_strided(
            (blocks, HEADS, BLOCK, V_DIM), (heads.stride(0), BLOCK * V_DIM, V_DIM, 1), values.storage_offset()
        ),
    )
    spec = AttentionSpec(HEADS, HEADS, NOPE + ROPE, V_DIM, SCALE)
    latent_spec = AttentionSpec(HEADS, 1, ROW, RANK, SCALE, latent=True)

    def absorbed() -> torch.Tensor:
        keys = rows[:, None]
        plan = backend.prepare(batch)
        queries = projections.queries(q)
        return projections.outputs(backend.run(plan, latent_spec, latent_pool, queries, keys, keys[..., :RANK]))

    def chosen() -> torch.Tensor:
        return attend_latent(backend, backend.prepare(batch), latent_spec, latent_pool, projections, (q, rows))

    def expanded() -> torch.Tensor:
        both = torch.nn.functional.linear(rows[:, :RANK], weight).view(total, HEADS, NOPE + V_DIM)
        rotary = rows[:, None, RANK:].expand(-1, HEADS, -1)
        k = torch.cat([both[..., :NOPE], rotary], dim=2)
        return backend.run(backend.prepare(batch), spec, pool, q, k, both[..., NOPE:])

    return {"absorbed": absorbed, "latents": chosen, "expanded": expanded}


def measure(backend: CpuPagedAttention, repeats: int) -> dict[str, dict[str, float]]:
    """Return the median ms of each way per workload."""
    result = {}
    for name, sequences in WORKLOADS.items():
        each = ways(backend, sequences)
        seconds: dict[str, list[float]] = {way: [] for way in each}
        for i in range(repeats + 1):
            for way, run in each.items():
                start = time.process_time()
                run()
                if i:  # the first one warms up
                    seconds[way].append(time.process_time() - start)
        result[name] = {way: round(1e3 * statistics.median(times), 3) for way, times in seconds.items()}
    return result


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library = load_library(runnable_variants()[0])
    with torch.inference_mode():
        value = measure(CpuPagedAttention(library), args.repeats)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "instructions": library.instructions,
        "threads": args.threads,
        "bytes_per_token_and_layer": {"latents": 2 * ROW, "expanded": 2 * HEADS * (NOPE + ROPE + V_DIM)},
        "ms": value,
    }
    print(json.dumps(result, indent=2))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
