"""What choosing tokens takes: 32 rows of a vocabulary of 152,064, by the C++ operator and by its definition in torch.

Both in turns, medians, milliseconds per step. Logits are normally distributed with a deviation of 1 (flat: nearly all
tokens matter) and 5 (as a model's).

    python benchmarks/engine_parts/sampling.py --threads 2 --write
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton.engine.sampler import cpu_sampler, draw, filtered_probs
from baton.engine.sampler_row import SamplerRow
from baton.types import SamplingParams
from baton_kernels.random_numbers import Draws

RESULT = Path(__file__).parents[1] / "results" / "sampling.json"
ROWS = 32
VOCAB = 152_064
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(top_p=0.9),
    "top_k": SamplingParams(top_k=50),
    "top_k_top_p": SamplingParams(top_k=50, top_p=0.9, temperature=0.8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"benchmark": "sampling", "rows": ROWS, "vocab": VOCAB, "threads": args.threads}
    for deviation in (1.0, 5.0):
        logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * deviation
        result[f"ms, deviation {deviation:g}"] = {
            name: measure(logits, params, args.repeats) for name, params in WAYS.items()
        }
    result["cpus"] = os.cpu_count()
    result["load"] = os.getloadavg()[0]
    print(json.dumps(result, indent=2))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measure(logits: torch.Tensor, params: SamplingParams, repeats: int) -> dict[str, float]:
    """Return the medians of both ways."""
    operator = cpu_sampler()
    if operator is None:
        raise SystemExit("there is no operator for this machine")
    draws = Draws(range(ROWS), [0] * ROWS)
    filters = [SamplerRow(params, 0, stop_ids=(), prompt=(), output=()).filter] * ROWS

    def by_definition() -> object:
        if params.greedy:
            return logits.argmax(dim=-1)
        return draw(filtered_probs(logits, [params] * ROWS), draws.keys())

    ways: dict[str, Callable[[], object]] = {
        "operator": lambda: operator(logits, filters, draws),
        "torch": by_definition,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):  # the first warms up
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if repeat:
                times[name].append(time.perf_counter() - begun)
    return {name: round(1e3 * statistics.median(values), 2) for name, values in times.items()}


if __name__ == "__main__":
    main()
