"""Decode over a long context with KV in bfloat16 and in int8: one layer's attention, and whole steps.

- ``attention``: a layer over a pool of random numbers, for sequences with one new token each (and a chunk of a prompt,
  to see that it is not slower), in the shapes of models in use;
- ``step``: a step of the engine with a random Llama of about 125M parameters (``benchmarks/engine.py``) whose sequences
  have a context of 16k tokens, which is not computed: the pool is as it was allocated;
- ``pool``: bytes of a block, and tokens per GiB.

Both kinds of KV take turns; medians in ms. With one thread the clock is the process's processor time, which no
other process adds to; with more it is the wall's.

    python benchmarks/kv_dtype.py --write
    python benchmarks/kv_dtype.py --threads 2 --write
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from benchmarks.engine_parts.models import write_model

from baton.config import EngineConfig
from baton.engine.build import make_arena
from baton.engine.executor.base import load_executor
from baton.engine.runner.input_batch import ForwardBatch
from baton.engine.runner.model_runner import pool_views
from baton.kv_cache.layout import KVLayout, LayerShape
from baton_kernels.cpu import load_library, runnable_variants
from baton_kernels.paged_attention import AttentionSpec, CpuPagedAttention, RaggedBatch
from baton_kernels.paged_attention.quantized import write_rows

RESULT = Path(__file__).parent / "results" / "kv_dtype.json"
KINDS = ("bfloat16", "int8")
BLOCK = 16
SHAPES = {
    "llama-8b (32 heads, 8 KV heads of 128)": (32, 8, 128),
    "llama-1b (32 heads, 8 KV heads of 64)": (32, 8, 64),
    "without grouping (16 heads of 128)": (16, 16, 128),
}
WORKLOADS = {
    "decode_1_of_16k": ((16384, 1),),
    "decode_8_of_2k": ((2048, 1),) * 8,
    "chunk_512_of_2k": ((2048, 512),),
}
"""(context, new tokens) of each sequence."""
CONTEXT = 16384
Way = Callable[[], object]


def batch_of(sequences: tuple[tuple[int, int], ...]) -> tuple[RaggedBatch, int]:
    """Return a batch, and the blocks that it takes."""
    widths = [-(-context // BLOCK) for context, _ in sequences]
    order = np.random.default_rng(0).permutation(sum(widths)).astype(np.int32)
    at = 0
    tables = np.zeros((len(sequences), max(widths)), np.int32)
    for row, width in enumerate(widths):
        tables[row, :width] = order[at : at + width]
        at += width
    starts = np.concatenate([[0], np.cumsum([new for _, new in sequences])]).astype(np.int32)
    positions = np.concatenate([np.arange(context - new, context) for context, new in sequences])
    return RaggedBatch(positions, starts, np.array([c for c, _ in sequences], np.int32), tables, BLOCK), at


def attention_of(
    backend: CpuPagedAttention, kind: str, shape: tuple[int, int, int], sequences: tuple[tuple[int, int], ...]
) -> Way:
    """Return a layer's attention over a pool full of random numbers."""
    heads, kv_heads, dim = shape
    batch, blocks = batch_of(sequences)
    layout = KVLayout((LayerShape(kv_heads, dim, dim),), BLOCK, kind)
    spec = AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5)
    (pool,) = pool_views(layout, torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8), [spec], [None])
    every = torch.arange(blocks).repeat_interleave(BLOCK), torch.arange(BLOCK).repeat(blocks)
    for cache, scales in ((pool.k, pool.k_scales), (pool.v, pool.v_scales)):
        write_rows(cache, scales, every, torch.randn(blocks * BLOCK, kv_heads, dim).bfloat16())
    total = int(batch.query_starts[-1])
    q, k, v = (torch.randn(total, count, dim).bfloat16() for count in (heads, kv_heads, kv_heads))
    return lambda: backend.run(backend.prepare(batch), spec, pool, q, k, v)


def step_of(path: str, kind: str, sequences: int, threads: int) -> Way:
    """Return a step of an engine in which some sequences decode at a context of 16k tokens."""
    blocks = sequences * CONTEXT // BLOCK
    config = EngineConfig(
        model=path, dtype="bfloat16", kv_dtype=kind, kv_blocks=blocks, threads=threads, max_num_seqs=sequences
    )
    executor = load_executor(config)
    shards = make_arena(config, executor, private=True)
    batch = ForwardBatch(
        token_ids=np.arange(sequences) + 10,
        positions=np.full(sequences, CONTEXT - 1),
        query_starts=np.arange(sequences + 1, dtype=np.int32),
        context_lens=np.full(sequences, CONTEXT, np.int32),
        block_tables=np.arange(blocks, dtype=np.int32).reshape(sequences, -1),
        logit_rows=np.arange(sequences),
    )

    def run() -> object:
        assert shards.primary.num_blocks >= blocks
        return executor.forward(batch)

    return run


def medians(ways: dict[str, Way], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return each way's median ms, and how many times as fast int8 is."""
    seconds: dict[str, list[float]] = {kind: [] for kind in ways}
    for i in range(repeats + 1):
        for kind, run in ways.items():
            start = clock()
            run()
            if i:  # the first one warms up
                seconds[kind].append(clock() - start)
    result = {kind: round(1e3 * statistics.median(times), 3) for kind, times in seconds.items()}
    return {**result, "ratio": round(result["bfloat16"] / result["int8"], 2)}


def pool_figures(shape: tuple[int, int, int]) -> dict[str, float]:
    """Return bytes of a block and tokens per GiB, for 32 layers of a shape."""
    layouts = {kind: KVLayout((LayerShape(shape[1], shape[2], shape[2]),) * 32, BLOCK, kind) for kind in KINDS}
    result: dict[str, float] = {}
    for kind, layout in layouts.items():
        result[f"block_bytes_{kind}"] = layout.block_bytes
        result[f"tokens_per_gib_{kind}"] = (1 << 30) // layout.block_bytes * BLOCK
    result["bytes_ratio"] = round(result["block_bytes_int8"] / result["block_bytes_bfloat16"], 3)
    result["tokens_ratio"] = round(result["tokens_per_gib_int8"] / result["tokens_per_gib_bfloat16"], 2)
    return result


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=("attention", "step"), help="measure this alone")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}, beside runs with other threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    library = load_library(runnable_variants()[0])
    backend = CpuPagedAttention(library)
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    result |= {"instructions": library.instructions, "clock": "processor" if args.threads == 1 else "wall"}
    result["pool"] = {name: pool_figures(shape) for name, shape in SHAPES.items()}
    with torch.inference_mode():
        if args.only != "step":
            result["attention_ms"] = {
                name: {
                    load: medians(
                        {kind: attention_of(backend, kind, shape, sequences) for kind in KINDS}, args.repeats, clock
                    )
                    for load, sequences in WORKLOADS.items()
                }
                for name, shape in SHAPES.items()
            }
        if args.only != "attention":
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder), "llama", smoke=False)
                fields = Path(folder) / "config.json"
                fields.write_text(json.dumps(json.loads(fields.read_text()) | {"max_position_embeddings": CONTEXT}))
                result["step_ms"] = {
                    f"decode_{count}_of_16k": medians(
                        {kind: step_of(folder, kind, count, args.threads) for kind in KINDS}, args.repeats, clock
                    )
                    for count in (1, 4)
                }
    print(json.dumps(result, indent=2))
    if args.write:
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        key = f"threads_{args.threads}"
        kept[key] = kept.get(key, {}) | result
        RESULT.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
