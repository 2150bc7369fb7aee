"""Baton's engine against Hugging Face's ``generate`` and its continuous batching ``generate_batch``, in one run.

One random Llama of about 120M parameters, bfloat16, greedy, new prompts each time. Prefill: the time to the first token
of a prompt of 512 or 2048 tokens. Decode: batch 1, 8 and 32, context 512, 64 new tokens after the first; counted from
the moment when all sequences have their first token to the one when the first of them ends, so that the batch is full.
The engines take turns within each repeat, and medians are reported: the machine's other work hits all alike.

Mixed load (Baton alone, ``benchmarks/mixed_load.py``): the time between tokens of four streams beside two prompts of
2,000 tokens that are always under way. Its figures have a file of their own.

    python benchmarks/engine.py --threads 2 --write
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.mixed_load import measure_mixed_load

from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.models.loader import quiet_transformers
from baton.engine.request import EngineRequest
from baton.types import RequestId, SamplingParams
from baton.version import __version__

RESULT = Path(__file__).parent / "results" / "engine.json"
MIXED_RESULT = RESULT.with_name("mixed_load.json")
CONTEXT, NEW_TOKENS = 512, 64
AIMS = {"prefill_512": 1.3, "prefill_2048": 1.3, "decode_1": 1.2, "decode_8": 2.5, "decode_32": 3.0}
MIXED_LOAD = "mixed_load"
ITL_SLO_MS = 100.0
FULL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
SMOKE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}

Measure = Callable[[list[list[int]], int], list[list[float]]]
"""Prompts and new tokens -> per sequence the seconds, since the start, at which each of its tokens was there."""


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(Path(folder), SMOKE if args.smoke else FULL)
        if set(args.workloads) & set(AIMS):
            result = run(args, folder, parameters)
            print_table(result)
            write(args, RESULT, result)
        if MIXED_LOAD in args.workloads:
            vocab = (SMOKE if args.smoke else FULL)["vocab_size"]
            ways = measure_mixed_load(folder, vocab, slo_ms=args.itl_slo_ms, threads=args.threads, prompts=args.prompts)
            head = {"benchmark": MIXED_LOAD, "parameters": parameters}
            write(args, MIXED_RESULT, {**head, **ways, "machine": machine()})
    return 0


def write(args: argparse.Namespace, path: Path, result: dict[str, Any]) -> None:
    """Write a result, if that is asked for."""
    if args.write:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {path}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workloads", nargs="*", choices=(*AIMS, MIXED_LOAD), default=[*AIMS, MIXED_LOAD])
    parser.add_argument("--itl-slo-ms", type=float, default=ITL_SLO_MS, help="mixed load: the bounded way's")
    parser.add_argument("--prompts", type=int, default=8, help="mixed load: long prompts per way")
    parser.add_argument("--engines", nargs="*", choices=("baton", "generate", "generate_batch"), default=None)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} and {MIXED_RESULT.name}")
    return parser.parse_args()


def write_model(folder: Path, sizes: dict[str, int]) -> int:
    """Write the random model and return its number of parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **sizes,
        num_attention_heads=12 if sizes is FULL else 4,
        num_key_value_heads=4 if sizes is FULL else 2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with quiet_transformers():
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run(args: argparse.Namespace, folder: str, parameters: int) -> dict[str, Any]:
    """Measure every workload with every engine, taking turns."""
    names = args.engines or ["baton", "generate", "generate_batch"]
    makers = {"baton": make_baton, "generate": make_generate, "generate_batch": make_generate_batch}
    engines, details = {}, {}
    for name in names:
        engines[name], details[name] = makers[name](folder, args)
    load_before = os.getloadavg()[0]
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for workload in AIMS:
        if workload not in args.workloads:
            continue
        kind, size = workload.split("_")
        for repeat in range(args.repeats + 1):  # the first warms up
            for name in names:
                speed = one(engines[name], kind, int(size), repeat, SMOKE if args.smoke else FULL)
                if repeat:
                    speeds[name].setdefault(workload, []).append(speed)
            if repeat:
                latest = ", ".join(f"{name} {speeds[name][workload][-1]:.0f}" for name in names)
                print(f"{workload} [{repeat}/{args.repeats}]: {latest} tokens/s", file=sys.stderr, flush=True)
    return {
        "benchmark": "engine",
        "parameters": parameters,
        "settings": {"dtype": "bfloat16", "threads": args.threads, "context": CONTEXT, "new_tokens": NEW_TOKENS},
        "repeats": args.repeats,
        "engines": details,
        "tokens_per_s": {name: {w: statistics.median(v) for w, v in speeds[name].items()} for name in names},
        "spread": {name: {w: [min(v), max(v)] for w, v in speeds[name].items()} for name in names},
        "ratio_to_generate": ratios(speeds, "generate"),
        "ratio_to_generate_batch": ratios(speeds, "generate_batch"),
        "aims_ratio_to_generate": AIMS,
        "machine": {**machine(), "load_before": load_before, "load_after": os.getloadavg()[0]},
    }


def one(measure: Measure, kind: str, size: int, seed: int, sizes: dict[str, int]) -> float:
    """Measure one workload once; tokens per second. New prompts each time: no cache can help."""
    generator = np.random.default_rng([seed, size])

    def prompts(count: int, length: int) -> list[list[int]]:
        ids: list[list[int]] = generator.integers(3, sizes["vocab_size"], (count, length)).tolist()
        return ids

    count = 1 if kind == "prefill" else size
    new_tokens = 1 if kind == "prefill" else NEW_TOKENS + 1
    times = measure(prompts(count, size if kind == "prefill" else CONTEXT), new_tokens)
    lengths = [len(sequence) for sequence in times]
    if lengths != [new_tokens] * count:
        raise RuntimeError(f"expected {count} sequences of {new_tokens} tokens, got {lengths}")
    if kind == "prefill":
        return size / times[0][0]
    begin, end = max(sequence[0] for sequence in times), min(sequence[-1] for sequence in times)
    return sum(begin < at <= end for sequence in times for at in sequence) / (end - begin)


def make_baton(folder: str, args: argparse.Namespace) -> tuple[Measure, dict[str, Any]]:
    config = EngineConfig(
        model=folder, threads=args.threads, kv_blocks=64 * (CONTEXT + NEW_TOKENS) // 16, prefix_caching=False
    )
    engine = build_engine(config)
    counter = iter(range(10**9))

    def measure(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        times: dict[RequestId, list[float]] = {}
        begin = time.perf_counter()
        for prompt in prompts:
            request_id = RequestId(str(next(counter)))
            times[request_id] = []
            sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            engine.add_request(EngineRequest(request_id, prompt, sampling))
        while engine.has_work():
            for output in engine.step():
                if output.error:
                    raise RuntimeError(output.error)
                times[output.request_id] += [time.perf_counter() - begin] * len(output.token_ids)
        return list(times.values())

    return measure, {"version": __version__, "path": engine.executor.description}


def load_hf(folder: str) -> Any:
    with quiet_transformers():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


class Clock(transformers.StoppingCriteria):
    """A stopping criterion that never stops; it notes when each token was there."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the time."""
        self.times.append(time.perf_counter() - self.begin)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def make_generate(folder: str, args: argparse.Namespace) -> tuple[Measure, dict[str, Any]]:
    model = load_hf(folder)

    def measure(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        ids, clock = torch.tensor(prompts), Clock()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        return [clock.times] * len(prompts)

    return measure, {"version": transformers.__version__, "attention": model.config._attn_implementation}


def make_generate_batch(folder: str, args: argparse.Namespace) -> tuple[Measure, dict[str, Any]]:
    model = load_hf(folder)
    # its default cache takes a share of all memory; this holds the largest workload
    batching = transformers.generation.ContinuousBatchingConfig(
        num_blocks=32 * (CONTEXT + NEW_TOKENS) // 256 + 64, max_batch_tokens=2048, allow_block_sharing=False
    )

    def measure(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        config = transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        begin = time.perf_counter()
        with quiet_transformers():
            out = model.generate_batch(
                inputs=prompts,
                generation_config=config,
                continuous_batching_config=batching,
                record_timestamps=True,
                progress_bar=False,
            )
        return [[at - begin for at in item.timestamps] for item in out.values()]

    return measure, {"version": transformers.__version__, "attention": model.config._attn_implementation}


def ratios(speeds: dict[str, dict[str, list[float]]], base: str) -> dict[str, float]:
    if "baton" not in speeds or base not in speeds:
        return {}
    return {
        workload: round(statistics.median(values) / statistics.median(speeds[base][workload]), 2)
        for workload, values in speeds["baton"].items()
    }


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    flags = next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "").split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "asimd", "bf16")
    return {
        "cpu": model or platform.processor(),
        "cpus": os.cpu_count(),
        "instructions": [flag for flag in wanted if flag in flags],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def print_table(result: dict[str, Any]) -> None:
    speeds = result["tokens_per_s"]
    names = list(speeds)
    millions, threads = result["parameters"] / 1e6, result["settings"]["threads"]
    print(f"\n{millions:.0f}M parameters, bfloat16, {threads} threads, tokens/s")
    head = f"{'workload':14}" + "".join(f"{name:>16}" for name in names)
    print(head + f"{'x generate':>12}{'x batch':>10}{'aim':>6}")
    for workload in next(iter(speeds.values()), {}):
        row = f"{workload:14}" + "".join(f"{speeds[name][workload]:16.1f}" for name in names)
        for key, width in (("ratio_to_generate", 12), ("ratio_to_generate_batch", 10)):
            ratio = result[key].get(workload)
            row += f"{ratio:{width}.2f}" if ratio is not None else " " * width
        print(row + f"{AIMS[workload]:6.1f}")


if __name__ == "__main__":
    sys.exit(main())
