"""Speculative decoding: how often drafts are right, and what they bring in tokens per second.

*Acceptance*: the demo model continues held-out modules of the Python standard library (beginnings of 256 tokens, 160
new ones, one prompt after the other) with each method, greedy and at temperature 0.7, drafts of 8 tokens: the share of
draft tokens that are right by their place, and tokens per step. ``suffix@4`` drafts trees of width 4. ``draft``,
``eagle``, ``eagle3`` and ``medusa`` draft with what ``scripts/train_draft.py`` trained for the demo model.

*Speed*: with the length that the engine chooses by itself, tokens per second against the engine without speculation,
and against ``generate`` plain, with ``prompt_lookup_num_tokens`` (transformers' prompt lookup) and with
``assistant_model``, which is the same model as that of the engine's ``draft``.

*Recorded drafts* (``batch-1`` to ``batch-32``): a random Llama of 125M parameters in bfloat16 generates; then again
with drafts that are what it said, each token right with probability 0.8, 0.6 or 0, in turns with the engine without
speculation. It samples at temperature 4: there the winner of a draw is seldom so close that what bfloat16 changes with
the number of rows makes it another one, after which all that is recorded would be wrong (``accepted`` tells how many
draft tokens were right). ``off``: the time of a step with speculation configured but turned off by the request, against
that of a step without, in turns step by step.

Each part takes less than six minutes, and ``--write`` puts it beside those that are there already:

    python benchmarks/speculation.py --threads 2 --write --parts batch-4
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import itertools
import json
import statistics
import sysconfig
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.engine import machine
from benchmarks.engine_parts.models import write_model
from scripts.demo_model.corpus import is_held_out, load_sources
from tests.support.models.drafters import RecordedDrafter

from baton.config import EngineConfig
from baton.config.demo_model import DEMO_DRAFTS, default_draft
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.llm import LLM
from baton.engine.models.loader import quiet_transformers
from baton.engine.request import EngineRequest
from baton.engine.speculation.speculator import SpeculationStats, Speculator
from baton.tokenizer import Tokenizer
from baton.types import RequestId, SamplingParams
from baton.version import __version__

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "baton-tiny"
RESULT = Path(__file__).parent / "results" / "speculation.json"
PROMPT_TOKENS = 256
NEW_TOKENS = 160
DRAFT_TOKENS = 8
SAMPLINGS = {"greedy": {"temperature": 0.0}, "0.7": {"temperature": 0.7, "seed": 1}}
BATCHES = {1: 96, 4: 96, 8: 64, 16: 48, 32: 40}
"""New tokens of each sequence, by the number of sequences."""
PARTS = ("acceptance", "speed", *(f"batch-{batch}" for batch in BATCHES))
METHODS = ("ngram", "suffix", "suffix@2", "suffix@4", *DEMO_DRAFTS, "eagle3@4")
PROBABILITIES = (0.8, 0.6, 0.0)
RECORDED_CONTEXT = 128
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"benchmark": "speculation", "version": __version__, "machine": machine()}
    if "acceptance" in args.parts:
        result["acceptance"] = acceptance(args)
    if "speed" in args.parts:
        result["speed"] = {f"{args.threads} threads": speed(args)}
    batches = [batch for batch in BATCHES if f"batch-{batch}" in args.parts]
    if batches:
        result["recorded"] = {f"{args.threads} threads": recorded(args, batches)}
    if args.write:
        before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps(merged(before, result), indent=2) + "\n")
        print(f"written to {RESULT}")
    return 0


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return earlier results with those of now in their places."""
    result = dict(before)
    for name, value in now.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, help="batch-N: of each answer, in place of 96 to 40")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="batch-N: cpu, with one thread, on a busy machine"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model in place of 125M, to see that it runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    return parser.parse_args()


def held_out_prompts(count: int) -> list[list[int]]:
    """Return beginnings of held-out modules, several pieces of the long ones."""
    tokenizer = Tokenizer.load(DEMO)
    sources = load_sources(Path(sysconfig.get_path("stdlib")))
    pieces = []
    for path, text in sources.items():
        if is_held_out(path):
            ids = tokenizer.encode(text)
            pieces.append(
                [ids[at : at + PROMPT_TOKENS] for at in range(0, len(ids) - PROMPT_TOKENS, 4 * PROMPT_TOKENS)]
            )
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*pieces))
    return [piece for piece in in_turns if piece is not None][:count]


def method_options(method: str) -> dict[str, Any]:
    """Return the configuration of a method, of its width behind an @, and of what drafts for the demo model."""
    name, _, width = method.partition("@")
    options = {"speculative": name, "speculative_width": int(width or 1)}
    return options | ({"speculative_model": default_draft(name)} if name in DEMO_DRAFTS else {})


# Acceptance


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    """Return per method and way of sampling how often drafts were right."""
    prompts = held_out_prompts(args.prompts)
    result: dict[str, Any] = {"prompts": len(prompts), "draft_tokens": DRAFT_TOKENS}
    answers: dict[str, list[list[int]]] = {}
    for name, sampling in SAMPLINGS.items():
        answers[name], _, _ = one_by_one(args, prompts, sampling)
    for method in args.methods:
        result[method] = {}
        for name, sampling in SAMPLINGS.items():
            options = {**method_options(method), "speculative_tokens": DRAFT_TOKENS}
            tokens, stats, steps = one_by_one(args, prompts, sampling, **options)
            assert stats is not None
            if tokens != answers[name]:
                raise RuntimeError(f"{method}, {name}: the answers differ from those without speculation")
            rates = [round(stats.accepted[i] / stats.drafted[i], 3) for i in range(DRAFT_TOKENS) if stats.drafted[i]]
            per_step = sum(len(answer) for answer in tokens) / steps
            share = stats.accepted.total() / max(1, stats.drafted.total())
            result[method][name] = {
                "tokens_per_step": round(per_step, 2),
                "accepted_of_drafted": round(share, 3),
                "drafted": stats.drafted.total(),
                "accepted_at_position": rates,
            }
            print(f"{method:8} {name:7} {per_step:.2f} tokens/step, {share:.0%} right; by place {rates}", flush=True)
    return result


def one_by_one(
    args: argparse.Namespace, prompts: list[list[int]], sampling: dict[str, Any], **options: Any
) -> tuple[list[list[int]], SpeculationStats | None, int]:
    """Return the answers of the demo model in float32, what became of drafts, and steps that gave tokens."""
    config = EngineConfig(model=str(DEMO), dtype="float32", threads=args.threads, kv_blocks=256, **options)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **sampling)
    with LLM(config) as llm:
        answers = []
        steps = 0
        for prompt in prompts:
            answers.append(llm.generate([prompt], params)[0].token_ids)
        speculator = llm.core.speculator
        stats = None if speculator is None else speculator.stats
        steps = sum(map(len, answers)) - (0 if stats is None else stats.accepted.total())
    return answers, stats, steps


# Speed


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of the demo model on held-out code, one prompt after the other, engines in turns."""
    prompts = held_out_prompts(args.prompts)[: max(2, args.prompts // 3)]
    result: dict[str, Any] = {"prompts": len(prompts), "dtype": "float32"}
    assistant = load_hf(default_draft("draft"))
    ways: dict[str, dict[str, Any]] = {
        "generate": {},
        "generate_prompt_lookup": {"prompt_lookup_num_tokens": 5},
        "generate_assistant": {"assistant_model": assistant},
    }
    for name, sampling in SAMPLINGS.items():
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **sampling)
        engines: dict[str, Any] = {}
        for method in ("none", *args.methods):
            config = EngineConfig(
                model=str(DEMO), dtype="float32", threads=args.threads, kv_blocks=256, **method_options(method)
            )
            engines[method] = LLM(config)
        model = load_hf(DEMO) if name == "greedy" else None
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            for method, llm in engines.items():
                began = time.perf_counter()
                llm.generate([prompt], params)
                times.setdefault(method, []).append(time.perf_counter() - began)
            for way, options in ways.items():
                if model is not None:
                    times.setdefault(way, []).append(hf_seconds(model, prompt, options))
        for llm in engines.values():
            llm.close()
        result[name] = {each: round(NEW_TOKENS / statistics.median(seconds), 1) for each, seconds in times.items()}
        result[name]["ratio"] = {
            each: round(result[name][each] / result[name]["none"], 2) for each in times if each != "none"
        }
        print(f"speed {name}: {result[name]}", flush=True)
    return result


def load_hf(folder: Path | str) -> Any:
    with quiet_transformers():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_seconds(model: Any, prompt: list[int], options: dict[str, Any]) -> float:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    began = time.perf_counter()
    with torch.inference_mode(), quiet_transformers():
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **options)
    return time.perf_counter() - began


# Recorded drafts


def recorded(args: argparse.Namespace, batches: list[int]) -> dict[str, Any]:
    """Return tokens per second of a model of 125M with drafts of a known quality, against none."""
    result: dict[str, Any] = {"context": RECORDED_CONTEXT, "dtype": "bfloat16"}
    result.update(clock=args.clock, repeats=args.repeats)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), "llama", smoke=args.smoke)
        config = EngineConfig(model=folder, threads=args.threads, kv_blocks=32 * 16, prefix_caching=False)
        engine = build_engine(config)
        engine._clock = CLOCKS[args.clock]
        for batch in batches:
            print(f"batch {batch} ...", file=sys.stderr, flush=True)
            result[str(batch)] = of_batch(args, engine, config, batch, model.vocab_size)
            print(f"batch {batch}: {result[str(batch)]}", flush=True)
        engine.executor.close()
    return result


def of_batch(args: argparse.Namespace, engine: EngineCore, config: EngineConfig, batch: int, vocab: int) -> Any:
    """Measure one batch size, the ways in turns; medians of the ratios within each repeat."""
    drafters = {str(p): RecordedDrafter({}, probability=p, vocab_size=vocab) for p in PROBABILITIES}
    on = dataclasses.replace(config, speculative="ngram")
    speculators = {name: Speculator(on, drafter, vocab) for name, drafter in drafters.items()}
    off = Speculator(on, drafters["0.0"], vocab)
    count = args.new_tokens or BATCHES[batch]
    speeds: dict[str, list[float]] = {}
    for repeat in range(args.repeats + 1):  # the first warms up, and lets what is learnt be learnt
        rng = np.random.default_rng([repeat, batch])
        prompts = rng.integers(3, vocab, (batch, RECORDED_CONTEXT)).tolist()
        plain, answers = tokens_per_s(args, engine, None, prompts, count)
        ratios = {}
        for name, speculator in speculators.items():
            drafters[name].outputs = answers
            rate, _ = tokens_per_s(args, engine, speculator, prompts, count)
            ratios[name] = rate / plain
        again, _ = tokens_per_s(args, engine, None, prompts, count)
        ratios["repeated"] = again / plain
        ratios["off_step_time"] = off_step_time(args, engine, off, prompts, count)
        if repeat:
            for name, ratio in ratios.items():
                speeds.setdefault(name, []).append(ratio)
            speeds.setdefault("tokens_per_s", []).append(plain)
    result: dict[str, Any] = {"new_tokens": count}
    result |= {name: round(statistics.median(values), 3) for name, values in speeds.items()}
    for name, speculator in speculators.items():
        stats = speculator.stats
        if not stats.drafted:
            raise RuntimeError(f"batch {batch}, probability {name}: nothing was drafted, so nothing was measured")
        result[f"accepted_{name}"] = round(stats.accepted.total() / stats.drafted.total(), 2)
        result[f"draft_length_{name}"] = round(stats.drafted.total() / max(1, stats.steps), 1)
    return result


def tokens_per_s(
    args: argparse.Namespace, engine: EngineCore, speculator: Speculator | None, prompts: list[list[int]], count: int
) -> tuple[float, dict[tuple[str, int], list[int]]]:
    """Return tokens per second from all first tokens to the first end, and the answers."""
    engine.speculator = speculator
    add_requests(engine, prompts, count)
    times: dict[str, list[float]] = {f"r{i}": [] for i in range(len(prompts))}
    answers: dict[tuple[str, int], list[int]] = {(name, 0): [] for name in times}
    while engine.has_work():
        outputs = engine.step()
        now = CLOCKS[args.clock]()
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            times[output.request_id] += [now] * len(output.token_ids)
            answers[output.request_id, 0] += output.token_ids
    begin = max(each[0] for each in times.values())
    end = min(each[-1] for each in times.values())
    return sum(begin < at <= end for each in times.values() for at in each) / (end - begin), answers


def off_step_time(
    args: argparse.Namespace, engine: EngineCore, off: Speculator, prompts: list[list[int]], count: int
) -> float:
    """Return how long a decode step takes whose requests want no drafts, against one without speculation."""
    add_requests(engine, prompts, count, speculative_tokens=0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in itertools.count():
        if not engine.has_work():
            break
        engine.speculator = off if number % 2 else None
        before = engine.stats().prefill_tokens
        began = CLOCKS[args.clock]()
        outputs = engine.step()
        took = CLOCKS[args.clock]() - began
        if len(outputs) == len(prompts) and engine.stats().prefill_tokens == before:
            seconds[number % 2].append(took)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def add_requests(engine: EngineCore, prompts: list[list[int]], count: int, **options: Any) -> None:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=count, temperature=4.0, seed=i, ignore_eos=True, **options)
        engine.add_request(EngineRequest(RequestId(f"r{i}"), prompt, params))


if __name__ == "__main__":
    raise SystemExit(main())
