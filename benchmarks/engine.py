"""Baton's engine against Hugging Face's ``generate`` and its continuous batching ``generate_batch``, in one run.

Random models with about 125M parameters that take part in a token, one of each family of ``--models`` (a Llama alone
where nothing is said), bfloat16, greedy, new prompts each time. Prefill: the time to the first token
of a prompt of 512 or 2048 tokens. Decode: batch 1, 8 and 32, context 512, 64 new tokens after the first; counted from
the moment when all sequences have their first token to the one when the first of them ends, so that the batch is full.
The engines take turns within each repeat, and medians are reported: the machine's other work hits all alike. Where
there is much of that, the fastest run of each says more (``spread``, ``ratio_of_best_to_...``), and with one thread
``--clock cpu``: the processor's time of the process instead of the clock's, which other processes do not add to.
``generate_float32`` is ``generate`` over the same weights in float32, which a processor without arithmetic for bfloat16
computes ten times as fast in torch: compare with it there.
``--write`` keeps what the file has of other models, workloads and engines: a long run may be cut into parts. Ratios are
those of engines that ran in turns.
``--rivals`` adds vLLM's CPU build, OpenVINO GenAI and llama.cpp for the Llama, each in a process and a virtual
environment of its own, which is made at first use (several GB in ``--rivals-folder``).
``--quantization`` adds Baton with the checkpoint quantized at load, head included: int8 and int4 with inputs in int8;
int8-exact, int4-exact, fp8 and nf4 with inputs as they are. Its rivals have quantized weights too (``llama_cpp_q8_0``,
``openvino_int4``, ...). Its figures have a file of their own.

Mixed load (Baton alone, ``benchmarks/mixed_load.py``): the time between tokens of four streams beside two prompts of
2,000 tokens that are always under way. Its figures have a file of their own.

With ``--device cuda:0`` instead of all this: one engine on a GPU against what the GPU can do
(``benchmarks/engine_parts/on_device.py``).

    python benchmarks/engine.py --threads 2 --write
    python benchmarks/engine.py --models llama,gemma3,qwen3_moe,gpt_oss,deepseek_v3 --engines baton generate --write
    python benchmarks/engine.py --engines baton --rivals --write
    python benchmarks/engine.py --quantization int8,int4,int4-exact --models llama,llama_1b --engines baton --write
    python benchmarks/engine.py --device cuda:0 --write
    python benchmarks/engine.py --device cuda:0 --quantization int8-exact,int4-exact,fp8 --kv-dtype int8 --write
    TRITON_INTERPRET=1 python benchmarks/engine.py --device interpret --smoke
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.engine_parts.models import FAMILIES, BenchmarkModel, write_model
from benchmarks.engine_parts.on_device import measure_on_device
from benchmarks.mixed_load import measure_mixed_load
from benchmarks.rivals.engines import PLAIN, RIVALS, Rival

from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.models.loader import quiet_transformers
from baton.engine.request import EngineRequest
from baton.types import RequestId, SamplingParams
from baton.version import __version__

RESULTS = Path(__file__).parent / "results"
RESULT, FAMILIES_RESULT, RIVALS_RESULT = (
    RESULTS / name for name in ("engine.json", "engine_families.json", "engine_rivals.json")
)
RIVALS_FOLDER = Path.home() / ".cache" / "baton-rivals"
QUANTIZED_RESULT = RESULT.with_name("engine_quantized.json")
ON_DEVICE_RESULT = RESULT.with_name("engine_on_device.json")
MIXED_RESULT = RESULT.with_name("mixed_load.json")
CONTEXT = 512
NEW_TOKENS = 64
WARM_CONTEXT = 64
WARM_TOKENS = 8
AIMS = {"prefill_512": 1.5, "prefill_2048": 1.5, "decode_1": 1.2, "decode_8": 2.5, "decode_32": 3.0}
MIXED_LOAD = "mixed_load"
ITL_SLO_MS = 100.0

QUANTIZATIONS = {
    "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
    "int8-exact": ("int8", "none"),
    "int4-exact": ("int4", "none"),
    "fp8": ("fp8", "none"),
    "nf4": ("nf4", "none"),
}
"""Weights, and how their inputs are rounded."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TRANSFORMERS = ("generate", "generate_float32", "generate_batch")

Measure = Callable[[list[list[int]], int], list[list[float]]]
"""Prompts and new tokens -> per sequence the seconds, since the start, at which each of its tokens was there."""


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.device != "cpu":
        graphs = tuple(args.cuda_graphs.split(","))
        for name in args.quantization or ["none"]:
            weights, activations = QUANTIZATIONS.get(name, ("none", "auto"))
            options = {"quantization": weights, "quantized_activations": activations, "kv_dtype": args.kv_dtype}
            value = measure_on_device(
                args.device, smoke=args.smoke, repeats=args.repeats, cuda_graphs=graphs, **options
            )
            print(json.dumps(value, indent=2))
            plain = name == "none" and args.kv_dtype == "auto"
            kind = "" if plain else f"_{name}_kv_{args.kv_dtype}"
            write(args, ON_DEVICE_RESULT.with_stem(ON_DEVICE_RESULT.stem + kind), value)
        return 0
    results = {}
    for name in args.models or ["llama"]:
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder), name, smoke=args.smoke)
            if set(args.workloads) & set(AIMS):
                results[name] = run(args, folder, model)
                print_table(name, results[name])
            if MIXED_LOAD in args.workloads and name == "llama" and not args.quantization:
                options = {"slo_ms": args.itl_slo_ms, "threads": args.threads, "prompts": args.prompts}
                ways = measure_mixed_load(folder, model.vocab_size, **options)
                parameters = {"benchmark": "mixed_load", "parameters": model.parameters}
                write(args, MIXED_RESULT, {**parameters, **ways, "machine": machine()})
    if args.models is not None or args.quantization:
        path = QUANTIZED_RESULT if args.quantization else FAMILIES_RESULT
        before = json.loads(path.read_text())["models"] if path.exists() else {}
        models = {**before, **{name: merged(before.get(name, {}), result) for name, result in results.items()}}
        write(args, path, {"benchmark": path.stem, "models": models})
    elif results:
        path = RESULT if args.rivals is None else RIVALS_RESULT
        before = json.loads(path.read_text()) if path.exists() else {}
        write(args, path, merged(before, results["llama"]))
    return 0


def merged(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with what an earlier one has beside it of the same machine: workloads, and other engines."""
    ran = result["engines"]
    earlier = before.get("engines", {})
    same = all(before.get(key) == result[key] for key in ("settings", "parameters"))
    same = same and all(before["machine"].get(key) == result["machine"][key] for key in ("cpu", "instructions"))
    if not same or any(ran[name] != earlier[name] for name in ran.keys() & earlier.keys()):
        return result
    results = {**before, **result, "engines": {**earlier, **ran}, "repeats": {**before["repeats"], **result["repeats"]}}
    for key in ("tokens_per_s", "spread"):
        old = before[key]
        new = result[key]
        results[key] = {name: {**old.get(name, {}), **new.get(name, {})} for name in {**old, **new}}
    for key in (key for key in results if key.startswith("ratio_")):
        results[key] = {**before.get(key, {}), **result.get(key, {})}
    return results


def write(args: argparse.Namespace, path: Path, result: dict[str, Any]) -> None:
    """Write a result, if that is asked for."""
    if args.write:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {path}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cuda:0: one engine on a GPU; interpret: to see that it runs")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "int8"), help="on a GPU: what KV is kept as")
    parser.add_argument("--cuda-graphs", default="on", help="on a GPU: on, off, or batch sizes as 1,8,64")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with one thread, on a busy machine")
    parser.add_argument("--workloads", nargs="*", choices=(*AIMS, MIXED_LOAD), default=[*AIMS, MIXED_LOAD])
    parser.add_argument("--itl-slo-ms", type=float, default=ITL_SLO_MS, help="mixed load: the bounded way's")
    parser.add_argument("--prompts", type=int, default=8, help="mixed load: long prompts per way")
    parser.add_argument("--engines", nargs="*", choices=("baton", *TRANSFORMERS), default=None)
    parser.add_argument("--models", type=model_names, default=None, help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--quantization", type=quantizations, default=[], help=f"of {', '.join(QUANTIZATIONS)}")
    parser.add_argument(
        "--rivals", nargs="*", choices=sorted(RIVALS), default=None, help=f"if none is named: {', '.join(PLAIN)}"
    )
    parser.add_argument("--rivals-folder", type=Path, default=RIVALS_FOLDER, help=f"default {RIVALS_FOLDER}")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--write", action="store_true", help=f"write files in {RESULTS}")
    args = parser.parse_args()
    if args.rivals is not None and any(not name.startswith("llama") for name in args.models or []):
        parser.error("--rivals run Llamas alone")
    if args.device != "cpu" and args.device.startswith("interpret") != args.smoke:
        parser.error("--smoke is for --device interpret, and that for --smoke")
    if args.clock == "cpu" and (args.threads > 1 or "generate_batch" in (args.engines or ["generate_batch"])):
        parser.error("--clock cpu is for one thread (what waits for another one counts), and not for generate_batch")
    return args


def quantizations(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(QUANTIZATIONS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(QUANTIZATIONS)}")
    return names


def model_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(FAMILIES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    return names


def run(args: argparse.Namespace, folder: str, model: BenchmarkModel) -> dict[str, Any]:
    """Load the engines, and measure every workload with each of them, taking turns."""
    names = list(args.engines or ["baton", "generate", "generate_batch"])
    names += [f"baton_{name}" for name in args.quantization]
    makers = {
        "baton": make_baton,
        **{f"baton_{name}": partial(make_baton, quantization=name) for name in args.quantization},
        "generate": make_generate,
        "generate_float32": partial(make_generate, dtype=torch.float32),
        "generate_batch": make_generate_batch,
    }
    engines: dict[str, Measure] = {}
    details = {}
    speeds: dict[str, dict[str, list[float]]] = {}
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        for name in names:
            engines[name], details[name] = makers[name](folder, args)
        for name in [] if args.rivals is None else args.rivals or PLAIN:
            rival = stack.enter_context(Rival(name, args.rivals_folder, Path(folder), args.threads, args.clock))
            engines[name] = rival.measure
            details[name] = rival.details
        print("engines are loaded", file=sys.stderr, flush=True)
        for workload in (each for each in AIMS if each in args.workloads):
            for repeat in range(args.repeats + 1):  # the first warms up
                for name, measure in engines.items():
                    if repeat:
                        speed = one(measure, workload, prompts_of(workload, repeat, model.vocab_size))
                        speeds.setdefault(name, {}).setdefault(workload, []).append(speed)
                    else:
                        measure(prompts_of(workload, repeat, model.vocab_size, WARM_CONTEXT), WARM_TOKENS)
                if repeat:
                    latest = ", ".join(f"{name} {speeds[name][workload][-1]:.0f}" for name in engines)
                    print(f"{workload} [{repeat}/{args.repeats}]: {latest} tokens/s", file=sys.stderr, flush=True)
    return {
        "benchmark": "engine",
        "parameters": model.parameters,
        "active_parameters": model.active,
        "settings": {
            "dtype": "bfloat16",
            "threads": args.threads,
            "clock": args.clock,
            "context": CONTEXT,
            "new_tokens": NEW_TOKENS,
        },
        "repeats": dict.fromkeys(next(iter(speeds.values()), {}), args.repeats),
        "engines": details,
        "tokens_per_s": {name: {w: statistics.median(v) for w, v in speeds[name].items()} for name in engines},
        "spread": {name: {w: [min(v), max(v)] for w, v in speeds[name].items()} for name in engines},
        **all_ratios(speeds),
        "aims_ratio_to_generate": AIMS,
        "machine": {**machine(), "load_before": load_before, "load_after": os.getloadavg()[0]},
    }


def prompts_of(workload: str, seed: int, vocab_size: int, context: int = CONTEXT) -> list[list[int]]:
    """Return a workload's prompts, new ones for each seed: no cache can help."""
    kind, size = workload.split("_")
    count, length = (1, int(size)) if kind == "prefill" else (int(size), context)
    generator = np.random.default_rng([seed, int(size)])
    ids: list[list[int]] = generator.integers(3, vocab_size, (count, length)).tolist()
    return ids


def one(measure: Measure, workload: str, prompts: list[list[int]]) -> float:
    """Measure one workload once; tokens per second."""
    prefill = workload.startswith("prefill")
    new_tokens = 1 if prefill else NEW_TOKENS + 1
    times = measure(prompts, new_tokens)
    lengths = [len(sequence) for sequence in times]
    if lengths != [new_tokens] * len(prompts):
        raise RuntimeError(f"expected {len(prompts)} sequences of {new_tokens} tokens, got {lengths}")
    if prefill:
        return len(prompts[0]) / times[0][0]
    begin = max(sequence[0] for sequence in times)
    end = min(sequence[-1] for sequence in times)
    if end <= begin:
        raise RuntimeError(f"{workload}: a sequence ended before the last of the others began")
    return sum(begin < at <= end for sequence in times for at in sequence) / (end - begin)


def make_baton(
    folder: str, args: argparse.Namespace, quantization: str | None = None
) -> tuple[Measure, dict[str, Any]]:
    config = EngineConfig(
        model=folder, threads=args.threads, kv_blocks=64 * (CONTEXT + NEW_TOKENS) // 16, prefix_caching=False
    )
    if quantization is not None:
        weights, activations = QUANTIZATIONS[quantization]
        config = replace(
            config, quantization=weights, quantized_activations=activations, quantization_ignore=(r"\.(gate|router)$",)
        )
    engine = build_engine(config)
    clock = CLOCKS[args.clock]
    counter = iter(range(10**9))

    def measure(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        times: dict[RequestId, list[float]] = {}
        begin = clock()
        for prompt in prompts:
            request_id = RequestId(str(next(counter)))
            times[request_id] = []
            sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            engine.add_request(EngineRequest(request_id, prompt, sampling))
        while engine.has_work():
            for output in engine.step():
                if output.error:
                    raise RuntimeError(output.error)
                times[output.request_id] += [clock() - begin] * len(output.token_ids)
        return list(times.values())

    return measure, {"version": __version__, "path": engine.executor.description}


def load_hf(folder: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    with quiet_transformers():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


class Clock(transformers.StoppingCriteria):
    """A stopping criterion that never stops; it notes when each token was there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin = clock()
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(self._clock() - self.begin)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def make_generate(
    folder: str, args: argparse.Namespace, dtype: torch.dtype = torch.bfloat16
) -> tuple[Measure, dict[str, Any]]:
    model = load_hf(folder, dtype)

    def measure(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        ids = torch.tensor(prompts)
        clock = Clock(CLOCKS[args.clock])
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


def is_other(name: str) -> bool:
    return name != "baton" and not name.startswith("baton_")


def all_ratios(speeds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Baton's speeds by those of others, and those of quantized weights by all of theirs and by bfloat16's."""
    result = {}
    for base in filter(is_other, speeds):
        result[f"ratio_to_{base}"] = ratios(speeds, "baton", base, statistics.median)
        result[f"ratio_of_best_to_{base}"] = ratios(speeds, "baton", base, max)
    for name in (name for name in speeds if name.startswith("baton_")):
        for base in (base for base in speeds if base == "baton" or is_other(base)):
            result[f"ratio_of_{name}_to_{base}"] = ratios(speeds, name, base, statistics.median)
    return result


def ratios(
    speeds: dict[str, dict[str, list[float]]], name: str, base: str, of: Callable[[list[float]], float]
) -> dict[str, float]:
    if name not in speeds or base not in speeds:
        return {}
    return {workload: round(of(values) / of(speeds[base][workload]), 2) for workload, values in speeds[name].items()}


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


def print_table(model: str, result: dict[str, Any]) -> None:
    speeds = result["tokens_per_s"]
    names = list(speeds)
    others = {key.removeprefix("ratio_").replace("to_", "x ", 1): key for key in result if key.startswith("ratio_")}
    columns = {name: result[key] for name, key in others.items() if "best" not in name and result[key]}
    millions = result["active_parameters"] / 1e6
    threads = result["settings"]["threads"]
    clock = result["settings"]["clock"]
    print(f"\n{model}, {millions:.0f}M active parameters, bfloat16, {threads} threads, tokens/s of {clock} time")
    print(f"{'workload':14}" + "".join(f"{name:>18}" for name in names))
    for workload in next(iter(speeds.values()), {}):
        print(f"{workload:14}" + "".join(f"{speeds[name][workload]:18.1f}" for name in names))
    for name, value in columns.items():
        print(f"{name:40}" + "  ".join(f"{workload} {ratio:.2f}" for workload, ratio in value.items()))


if __name__ == "__main__":
    sys.exit(main())
