"""What grammars cost: from a request to its first mask, masks, steps of a batch, and the steps that forced tokens save.

A vocabulary of 128,000 tokens (byte-level BPE of installed packages' sources, trained at first use) and a nested schema
with enums and patterns, new names in each so that none is known.

* First mask: from the JSON of a request to a mask, with the router's check, the instance's compilation and the mask;
  masks along documents that follow the schema. CPU time of the thread, as machines are shared; ``wall`` beside it.
  ``--rivals``: xgrammar and outlines_core on the same schemas, documents and vocabulary, each in an environment of its
  own in ``--cache``.
* Steps: 32 rows of a random Llama with the 125M benchmark model's layers over this vocabulary, bfloat16, in four
  engines: all rows free, all guided (each by a schema of its own; forced tokens sampled one by one, so that each step
  does the same work), half of them, and half of them with masks that are there before their tokens are chosen, also
  where they need not be. The engines step in turns, so what the machine does besides meets all alike, and
  they change parts from batch to batch, as each has its place in memory, which makes some faster than others. Each step
  is compared with the free one beside it, in time and in CPU time of all threads; medians, and means without
  a tenth at either end. What guided rows cost those beside them is the step of the half-guided batch against that of
  the free one. A model that was trained for such answers wants what its grammar allows, but for a few tokens; random
  weights seldom do. So the same is measured with the next token of a document that follows the schema raised in all
  rows' logits, but for ``--wrong`` of the tokens, at which another one is wanted, and with the logits as they are.
* Refusals: how often the model that calls tools is refused a token, in calls that it was taught and in one that it was
  not. The first of ``--wrong`` is what the former found at most, the second ten times that.
* Forced tokens: their share along the documents, and forward passes per token of a random model's guided answers (most
  of which is free text), in float32, with jump-forward and without; the answers are compared.

    python benchmarks/grammar.py --write --rivals
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from benchmarks.engine import machine
from benchmarks.engine_parts.models import COMMON, FULL, SMOKE
from benchmarks.rivals.engines import environment
from scripts.demo_model.tool_conversations import ConversationMaker, Exchange
from tests.support.servers.up import running_up
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.grammar.constraint import GrammarCompiler, load_compiler
from baton.engine.grammar.guidance import GuidanceMatcher
from baton.engine.models.loader import quiet_transformers
from baton.engine.request import EngineRequest
from baton.engine.sampler import SamplerOutput
from baton.engine.sampler_row import SamplerRow
from baton.engine.speculation import verification
from baton.grammar import StructuredOutputs
from baton.types import Grammar, RequestId, SamplingParams

RESULT = Path(__file__).parent / "results" / "grammar.json"
CACHE = Path.home() / ".cache" / "baton-bench"
RIVALS = {
    # All else, torch and transformers among it, xgrammar takes from this environment.
    "xgrammar": ("--no-deps", "xgrammar==0.2.8", "apache-tvm-ffi"),
    "outlines_core": ("outlines_core==0.2.14",),
}
RIVAL_SCHEMAS = 3
RIVAL_SECONDS = 400
PARTS = ("masks", "steps", "forced", "refusals")
ROWS = 32
CONTEXT = 32
COSTS = {"guided_loss": "guided", "cost_to_rows_beside": "half", "cost_with_masks_first": "half_masks_first"}
"""What is compared with the free batch, by the names of the results."""


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    vocab = 8000 if args.smoke else VOCAB
    tokenizer = tokenizer_folder(args.cache, vocab, 1 << 20 if args.smoke else 48 << 20)
    result: dict[str, Any] = {"benchmark": "grammar", "vocabulary": vocab, "machine": machine()}
    if "masks" in args.parts:
        result["masks"] = measure_masks(args, tokenizer, vocab)
    with tempfile.TemporaryDirectory() as folder:
        if {"steps", "forced"} & set(args.parts):
            write_model(Path(folder), tokenizer, vocab, smoke=args.smoke)
        if "steps" in args.parts:
            core = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
            documents = {row: core.encode(document(1000 + row, row)).ids for row in range(ROWS)}
            newline = core.token_to_id(byte_letters()[ord("\n")])  # which no JSON has that is written without space
            result["steps"] = {}
            for wrong in args.wrong:
                with following(documents, wrong, newline):
                    result["steps"][f"{100 * wrong:g} % refused"] = measure_steps(args, folder)
            result["steps"]["random weights"] = measure_steps(args, folder)
        if "forced" in args.parts:
            result["forced"] = measure_forced(args, folder)
    if "refusals" in args.parts:
        result["refusals"] = measure_refusals(args.calls)
    print(json.dumps(result, indent=1))
    if args.write:
        before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps({**before, **result}, indent=1) + "\n")
        print(f"written to {RESULT}")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="batches of 32 answers, per engine")
    parser.add_argument("--steps", type=int, default=64, help="decode steps per batch")
    parser.add_argument(
        "--wrong", type=float, nargs="*", default=[0.003, 0.03], help="shares of tokens at which a model is refused"
    )
    parser.add_argument("--schemas", type=int, default=40, help="schemas whose first mask is timed")
    parser.add_argument("--answers", type=int, default=16, help="guided answers with and without jump-forward")
    parser.add_argument("--calls", type=int, default=60, help="calls of tools, of each kind at each temperature")
    parser.add_argument("--rivals", action="store_true", help="beside xgrammar and outlines_core")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"default {CACHE}")
    parser.add_argument("--smoke", action="store_true", help="tiny vocabulary and model, to see that it runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    return parser.parse_args()


def grammar_of(number: int) -> Grammar:
    """Return a schema's grammar as the router makes and checks it."""
    return StructuredOutputs(json=schema(number)).to_grammar()


# Masks


def measure_masks(args: argparse.Namespace, folder: Path, vocab: int) -> dict[str, Any]:
    """Time the way to the first mask, and masks along documents."""
    eos = vocab - 1
    began = time.perf_counter()
    compiler = load_compiler("llguidance", folder, vocab_size=vocab, eos_token_ids=frozenset({eos}))
    assert compiler is not None
    table = time.perf_counter() - began
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    compiler.constraint(grammar_of(args.schemas))  # what all of them need is loaded before, as in a router's process
    numbers = range(args.schemas)
    documents = {i: [core.encode(document(i, seed)).ids for seed in range(4)] for i in numbers}
    baton_times = ours_s(compiler, documents)
    result: dict[str, Any] = {
        "schemas": args.schemas,
        "masks": len(baton_times["mask_s"]),
        "forced_share": forced_share(compiler, documents),
        "baton": {"table_s": round(table, 2), **milliseconds(baton_times)},
    }
    if args.rivals:
        few = {i: documents[i] for i in range(min(RIVAL_SCHEMAS, args.schemas))}
        for name in RIVALS:
            result[name] = rival(args, name, core, few, eos)
    return result


def ours_s(compiler: GrammarCompiler, documents: dict[int, list[list[int]]]) -> dict[str, list[float]]:
    router_s, compile_s, first_s, wall_s, mask_s = (list[float]() for _ in range(5))
    for number, each in documents.items():
        wall = time.perf_counter()
        begin = time.thread_time()
        grammar = grammar_of(number)
        checked = time.thread_time()
        compiler.constraint(grammar)  # with its first mask
        compiled = time.thread_time()
        wall_s.append(time.perf_counter() - wall)
        router_s.append(checked - begin)
        compile_s.append(compiled - checked)
        first_s.append(compiled - begin)
        for ids in each:
            matcher = compiler.constraint(grammar).matcher
            assert isinstance(matcher, GuidanceMatcher)
            for token in ids:
                began = time.thread_time()
                matcher.inner.compute_bitmask()
                mask_s.append(time.thread_time() - began)
                matcher.consume([token])
            assert not matcher.error, matcher.error
    result = {"router_s": router_s, "compile_s": compile_s, "first_mask_s": first_s, "mask_s": mask_s}
    return {**result, "first_mask_wall_s": wall_s}


def forced_share(compiler: GrammarCompiler, documents: dict[int, list[list[int]]]) -> float:
    """Return the share of tokens along documents that the grammar forces, and which take no forward pass."""
    forced = total = 0
    for number, each in documents.items():
        for ids in each:
            constraint = compiler.constraint(grammar_of(number))
            for token in ids:
                forced += constraint.forced()[:1] == [token]
                total += 1
                constraint.append(token)
    return round(forced / total, 3)


def rival(
    args: argparse.Namespace, name: str, core: Tokenizer, documents: dict[int, list[list[int]]], eos: int
) -> dict[str, Any]:
    """Measure another library on the same schemas, documents and vocabulary; ``{"failed": why}`` where it cannot."""
    names = [core.id_to_token(token) for token in range(eos + 1)]
    letters = {letter: value for value, letter in byte_letters().items()}
    job = {
        "vocabulary": names,
        "bytes": [bytes(letters.get(letter, 32) for letter in name).hex() for name in names],
        "eos": eos,
        "schemas": [json.dumps(schema(number)) for number in documents],
        "documents": list(documents.values()),
        "site": sysconfig.get_paths()["purelib"],
    }
    worker = Path(__file__).parent / "rivals" / f"rival_{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        try:
            python = environment(args.cache / name, RIVALS[name])
            ran = subprocess.run(
                [python, "-I", worker, path], capture_output=True, text=True, check=True, timeout=RIVAL_SECONDS
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            return {"failed": "".join(last)[:300]}
    line = next(line for line in ran.stdout.splitlines() if line.startswith("RIVAL "))
    result = json.loads(line.removeprefix("RIVAL "))
    table = {"version": result.pop("version"), "table_s": round(result.pop("table_s"), 2)}
    return {**table, "schemas": len(documents), **milliseconds(result)}


def byte_letters() -> dict[int, str]:
    """Return the letter that byte-level BPE writes for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def milliseconds(result: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return quantiles of seconds, in milliseconds, their names ending so."""
    return {
        f"{name.removesuffix('_s')}_ms": quantiles([1e3 * each for each in seconds]) for name, seconds in result.items()
    }


def quantiles(given: list[float]) -> dict[str, float]:
    values = np.array(given)
    marks = {"p50": np.median(values), "p99": np.quantile(values, 0.99), "mean": values.mean(), "max": values.max()}
    return {name: round(float(value), 4) for name, value in marks.items()}


# Steps


def write_model(folder: Path, tokenizer: Path, vocab: int, *, smoke: bool) -> None:
    """Write a random Llama in bfloat16 with the vocabulary's tokenizer."""
    sizes = {**COMMON, **(SMOKE if smoke else FULL), "vocab_size": vocab, "eos_token_id": vocab - 1}
    config = transformers.AutoConfig.for_model("llama", **{**sizes, "tie_word_embeddings": True})
    torch.manual_seed(0)
    with quiet_transformers():
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)


def build(args: argparse.Namespace, folder: str, dtype: str = "bfloat16") -> EngineCore:
    config = EngineConfig(
        model=folder,
        dtype=dtype,
        threads=args.threads,
        kv_blocks=400,
        prefix_caching=False,
        grammar_backend="llguidance",
    )
    return build_engine(config)


def add(engine: EngineCore, name: str, seed: int, sampling: SamplingParams) -> None:
    ids = np.random.default_rng(seed).integers(3, engine.executor.vocab_size - 1, CONTEXT).tolist()
    constraint = None
    if sampling.grammar is not None:
        assert engine.grammars is not None
        constraint = engine.grammars.constraint(sampling.grammar)
    engine.add_request(EngineRequest(RequestId(name), ids, sampling.replace(seed=seed), constraint=constraint))


def begin_batch(engine: EngineCore, number: int, guided: int, tokens: int) -> None:
    """Give an engine rows of which some are guided, and have it compute their prompts."""
    for row in range(ROWS):
        grammar = grammar_of(1000 + row) if row < guided else None
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, grammar=grammar)
        add(engine, f"{number}-{row}", ROWS * number + row, sampling)
    while engine.stats().num_waiting or engine.prompt_queue():
        engine.step()


StepTime = tuple[float, float, float]
"""Of one step: time, CPU time of all threads, and time in which it waited for its masks, in seconds."""


def timed_step(engine: EngineCore) -> StepTime | None:
    """Do one step; return what it took, or ``None`` if a row has ended."""
    assert engine.masks is not None
    began = time.perf_counter()
    cpu = time.process_time()
    waited = engine.masks.mask_wait_seconds
    outputs = engine.step()
    result = time.perf_counter() - began, time.process_time() - cpu, engine.masks.mask_wait_seconds - waited
    if any(output.error for output in outputs):
        raise RuntimeError(next(output.error for output in outputs if output.error))
    return result if len(outputs) == ROWS and not any(output.finish_reason for output in outputs) else None


def measure_steps(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Time decode steps of free, guided and mixed batches, in turns."""
    ways = {"free": 0, "guided": ROWS, "half": ROWS // 2, "half_masks_first": ROWS // 2}
    built = [build(args, folder) for _ in ways]
    all_masks = [masks for engine in built if (masks := engine.masks) is not None]
    late = all_masks[0].come_late
    tried = refused = 0
    rounds: list[dict[str, StepTime]] = []
    turns: list[int] = []
    for repeat in range(args.repeats + 1):  # the first warms up
        turn = {name: (repeat + at) % len(ways) for at, name in enumerate(ways)}
        engines = {name: built[at] for name, at in turn.items()}
        for name, engine in engines.items():
            masks = all_masks[turn[name]]
            masks.jump_forward = False
            masks.come_late = late and name != "half_masks_first"
            begin_batch(engine, repeat, ways[name], args.steps + 2)
        guided = all_masks[turn["guided"]]
        before = guided.tried_tokens, guided.refused_tokens
        for at in range(args.steps - 2):
            names = [*ways][at % len(ways) :] + [*ways][: at % len(ways)]
            result = {name: timed_step(engines[name]) for name in names}
            times = {name: each for name, each in result.items() if each is not None}
            if len(times) < len(ways):
                break
            if repeat:
                rounds.append(times)
                turns.append(repeat % len(ways))
        tried = tried + guided.tried_tokens - before[0]
        refused = refused + guided.refused_tokens - before[1]
        for engine in built:
            while engine.has_work():
                engine.step()
    median = {name: [statistics.median(one[name][at] for one in rounds) for at in (0, 1)] for name in ways}
    return {
        "model": {"layers": "those of the 125M model", "rows": ROWS, "context": CONTEXT, "threads": args.threads},
        "steps": len(rounds),
        "masks_are_computed": "where a token is refused" if late else "beside forward passes",
        "refused_share": round(refused / tried, 4) if tried else None,
        "step_ms": {name: round(1e3 * value, 3) for name, (value, _) in median.items()},
        "step_cpu_ms": {name: round(1e3 * value, 3) for name, (_, value) in median.items()},
        "tokens_per_s": {name: round(ROWS / value, 1) for name, (value, _) in median.items()},
        **{
            f"{what}{unit}": loss(rounds, turns, name, at)
            for what, name in COSTS.items()
            for at, unit in enumerate(("", "_cpu"))
        },
        "mask_wait_ms": {name: quantiles([1e3 * one[name][2] for one in rounds]) for name in COSTS.values()},
    }


def loss(rounds: list[dict[str, StepTime]], turns: list[int], name: str, at: int) -> dict[str, Any]:
    """Return the share of tokens/s lost against the free step beside: the median over steps, its quartiles, the mean.

    The median is taken among the steps in which each engine has the same part, and then the mean over these turns: in
    all of them together each engine has each part, so that what its place in memory makes faster or slower cancels out.
    Rows of a batch begin together and their schemas have one shape, so they come to what is costly in the same steps:
    the median sees few of these, the mean of all but a tenth of the steps at either end sees most.
    """
    shares = np.array([1 - one["free"][at] / one[name][at] for one in rounds])
    own = np.array(turns)
    medians = [float(np.median(shares[own == turn])) for turn in sorted(set(turns))]
    shares.sort()
    low, high = (round(float(each), 4) for each in np.quantile(shares, (0.25, 0.75)))
    tenth = len(shares) // 10
    return {
        "median": round(statistics.mean(medians), 4),
        "medians": [round(each, 4) for each in medians],
        "quartiles": [low, high],
        "mean": round(float(shares[tenth : len(shares) - tenth].mean()), 4),
    }


# Forced tokens


def measure_forced(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Count the forward passes of guided answers with jump-forward and without, and compare the answers."""
    engine = build(args, folder, "float32")
    assert engine.masks is not None
    result: dict[str, Any] = {}
    answers = {}
    for name, jump in (("one_by_one", False), ("jump_forward", True)):
        engine.masks.jump_forward = jump
        passes = 0
        tokens: dict[str, list[int]] = {}
        began = time.perf_counter()
        for number in range(args.answers):  # one after the other: a pass is one answer's
            sampling = SamplingParams(temperature=1.0, max_tokens=200, grammar=grammar_of(2000 + number))
            add(engine, f"{name}-{number}", number, sampling)
            while engine.has_work():
                passes += 1
                for output in engine.step():
                    tokens.setdefault(str(number), []).extend(output.token_ids)
        count = sum(map(len, tokens.values()))
        answers[name] = tokens
        result[name] = {
            "tokens": count,
            "forward_passes": passes,
            "passes_per_token": round(passes / count, 3),
            "seconds": round(time.perf_counter() - began, 2),
        }
    same = sum(answers["one_by_one"][key] == answers["jump_forward"][key] for key in answers["one_by_one"])
    return {**result, "answers": args.answers, "same_answers": same, "forced_tokens": engine.masks.forced_tokens}


# --- workload ---

VOCAB = 128_000
END = "<|end|>"
TRAINED_BYTES = 48 << 20
"""Sources that the vocabulary is trained from, at most."""
KINDS = ("person", "company", "robot")
LANGUAGES = ("de", "en", "fr", "pt-BR")


def tokenizer_folder(cache: Path, vocab: int = VOCAB, most_bytes: int = TRAINED_BYTES) -> Path:
    """Return a folder with ``tokenizer.json``: byte-level BPE of installed packages' sources, trained at first use."""
    folder = cache / f"bpe-{vocab}"
    path = folder / "tokenizer.json"
    if not path.exists():
        print(f"training a vocabulary of {vocab} tokens into {folder}", file=sys.stderr, flush=True)
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - 1, min_frequency=2, initial_alphabet=alphabet, show_progress=False
        )
        core.train_from_iterator(_sources(most_bytes), trainer=trainer)
        core.add_special_tokens([f"<|unused{i}|>" for i in range(vocab - 1 - core.get_vocab_size())])
        core.add_special_tokens([END])
        folder.mkdir(parents=True, exist_ok=True)
        core.save(str(path))
    return folder


def _sources(most_bytes: int) -> Iterator[str]:
    total = 0
    for root in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            total += len(text)
            if total > most_bytes:
                return
            yield text


def schema(number: int) -> dict[str, Any]:
    """Return a nested schema with enums and patterns; its names differ by number, so that none is known yet."""
    part = {
        "type": "object",
        "properties": {
            "street": {"type": "string", "maxLength": 40},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,6}$"},
            "country": {"enum": list(LANGUAGES)},
        },
        "required": ["street", "code", "country"],
        "additionalProperties": False,
    }
    item = {
        "type": "object",
        "properties": {
            f"id_{number}": {"type": "integer", "minimum": 1, "maximum": 99999},
            "kind": {"enum": list(KINDS)},
            "name": {"type": "string", "minLength": 1, "maxLength": 60},
            "mail": {"type": "string", "pattern": "^[a-z]+[.][a-z]+@[a-z]+[.]org$"},
            "active": {"type": "boolean"},
            "address": part,
        },
        "required": [f"id_{number}", "kind", "name", "mail", "active", "address"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"records": {"type": "array", "items": item, "minItems": 1}, "total": {"type": "number"}},
        "required": ["records", "total"],
        "additionalProperties": False,
    }


def document(number: int, seed: int, records: int = 3) -> str:
    """Return JSON that follows a schema."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choice("abcdefghiklmnoprstuvw") for _ in range(rng.randint(3, 9)))

    results = [
        {
            f"id_{number}": rng.randint(1, 99999),
            "kind": rng.choice(KINDS),
            "name": f"{word().title()} {word().title()}",
            "mail": f"{word()}.{word()}@{word()}.org",
            "active": rng.random() < 0.5,
            "address": {
                "street": f"{word().title()} {rng.randint(1, 99)}",
                "code": f"{rng.choice('ABCD')}{rng.choice('XYZ')}-{rng.randint(1000, 999999)}",
                "country": rng.choice(LANGUAGES),
            },
        }
        for _ in range(records)
    ]
    return json.dumps({"records": results, "total": rng.randint(1, 9)})


# --- following ---

RAISED = 30.0
ABOVE = 60.0
"""Logits of a document's next token, and of the one that is wanted in its place. Random models' are about 1."""


@contextmanager
def following(documents: Mapping[int, Sequence[int]], wrong: float, never: int) -> Iterator[None]:
    """Have each row of all engines choose the tokens of a document.

    Args:
        documents: Token ids, by the seed of the request modulo their number.
        wrong: Share of tokens at which the model wants another one, which no grammar allows. A guided row is refused it
            and goes on with the document's.
        never: That token.
    """
    choose = verification.sample

    def raised(logits: torch.Tensor, rows: Sequence[SamplerRow], *args: Any, **options: Any) -> SamplerOutput:
        for at, row in enumerate(rows):
            seed = row.params.seed or 0
            document = documents[seed % len(documents)]
            if row.position < len(document):
                logits[at, document[row.position]] = RAISED
            if wrong and np.random.default_rng((seed, row.position)).random() < wrong:
                logits[at, never] = ABOVE
        return choose(logits, rows, *args, **options)

    verification.sample = raised
    try:
        yield
    finally:
        verification.sample = choose


# --- refusals ---

MODEL = Path(__file__).parents[1] / "models" / "baton-tiny-tools"
RESERVE = {
    "type": "function",
    "function": {
        "name": "reserve_seats",
        "parameters": {
            "type": "object",
            "properties": {
                "guest": {"type": "string"},
                "seats": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
                "class": {"enum": ["first", "second", "sleeper"]},
                "window": {"type": "boolean"},
                "date": {"type": "string", "format": "date"},
            },
            "required": ["guest", "seats", "class", "window", "date"],
            "additionalProperties": False,
        },
    },
}
TEMPERATURES = (0.0, 0.7, 1.0)
SEED = 20
COUNTERS = ("tried", "refused")
_METRICS = re.compile(r"(?:prefill|decode)-\d+ .* metrics (127\.0\.0\.1:\d+)/metrics")


def measure_refusals(calls: int) -> dict[str, Any]:
    """Have the model that Baton ships call tools, about words that were kept from its training.

    As it was taught, and one that it was not taught, with arguments of kinds that it never met. Instances have as many
    threads as there are processors: else no token is chosen before its mask.

    Args:
        calls: Number of calls per kind and temperature.

    Returns:
        By kind and temperature, the tokens that were chosen without a mask, how many of them were refused, and their
        share.
    """
    maker = ConversationMaker(SEED, held_out=True)
    asked = list[Exchange]()
    while len(asked) < calls:
        one = maker.exchange()
        if one.call is not None and len(one.messages) == 1:
            asked.append(one)
    threads = len(os.sched_getaffinity(0))
    flags = ("--ratio", "1P1D", "--model", str(MODEL), "--threads", str(threads))
    result: dict[str, Any] = {"model": MODEL.name, "calls": calls, "threads": threads}
    with running_up(*flags) as up, httpx.Client(base_url=up.url, timeout=240) as client:
        metrics = _METRICS.findall("".join(up.lines))
        before = [_counter(metrics, name) for name in COUNTERS]
        for kind in ("taught", "not_taught"):
            result[kind] = {}
            for temperature in TEMPERATURES:
                for at, one in enumerate(asked):
                    tools = one.tools if kind == "taught" else [RESERVE]
                    fields = {"messages": one.messages, "tools": tools, "tool_choice": "required", "max_tokens": 200}
                    body = {"model": MODEL.name, "temperature": temperature, "seed": at, **fields}
                    client.post("/v1/chat/completions", json=body).raise_for_status()
                now = [_counter(metrics, name) for name in COUNTERS]
                tried, refused = (after - earlier for after, earlier in zip(now, before, strict=True))
                before = now
                share = round(refused / tried, 4)
                result[kind][f"temperature {temperature:g}"] = {"tried": tried, "refused": refused, "share": share}
    return result


def _counter(addresses: list[str], name: str) -> int:
    pattern = re.compile(rf"^baton_grammar_{name}_tokens_total (\S+)$", re.MULTILINE)
    return sum(int(float(pattern.findall(httpx.get(f"http://{one}/metrics").text)[0])) for one in addresses)


if __name__ == "__main__":
    sys.exit(main())
