"""The mixture-of-experts operator against transformers' own experts, and against a dense MLP of as many active weights.

One layer of 64 experts, 8 per token, hidden 768, inner 256, bfloat16, random routing. CPU time of one call on one
thread, the fastest of ``--repeats``, in turns; what a step reads of the experts grows with its rows until all are read.

    python benchmarks/operators.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import time
from collections.abc import Callable

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from baton_kernels.cpu import load_library, runnable_variants
from baton_kernels.experts import CpuExperts, ExpertWeights
from baton_kernels.linear import CpuLinear, PairsLinear
from baton_kernels.row_wise import SILU, CpuGatedMul

EXPERTS = 64
TOP_K = 8
HIDDEN = 768
INNER = 256
ROWS = (1, 8, 32, 512)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library = load_library(runnable_variants()[0])
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "grouped_mm"
    reference = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    experts = CpuExperts(library, ExpertWeights(reference.gate_up_proj, reference.down_proj), SILU)
    linear = PairsLinear if library.pairs_are_faster else CpuLinear
    up = linear(library, (torch.randn(2 * TOP_K * INNER, HIDDEN) * 0.02).bfloat16())
    down = linear(library, (torch.randn(HIDDEN, TOP_K * INNER) * 0.02).bfloat16())
    product = CpuGatedMul(library, torch.bfloat16)
    print(f"{'rows':>6}{'experts ms':>14}{'transformers ms':>18}{'dense ms':>12}")
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN).bfloat16()
        ids = torch.rand(rows, EXPERTS).topk(TOP_K).indices
        weights = torch.rand(rows, TOP_K)
        narrow = ids.int()
        ways: list[Callable[[], object]] = [
            lambda x=x, ids=narrow, weights=weights: experts(x, ids, weights),
            lambda x=x, ids=ids, weights=weights: reference(x, ids, weights.bfloat16()),
            lambda x=x: down(product(up(x))),
        ]
        best = [float("inf")] * len(ways)
        with torch.inference_mode():
            for _ in range(args.repeats):
                for i, way in enumerate(ways):
                    begin = time.thread_time()
                    way()
                    best[i] = min(best[i], time.thread_time() - begin)
        print(f"{rows:6}" + "".join(f"{1e3 * t:{width}.3f}" for t, width in zip(best, (14, 18, 12), strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
