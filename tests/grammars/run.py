"""Many schemas through a real engine, and very many broken ones through check and compiler.

python -m tests.grammars.run answers                  # 300 schemas, 2,100 answers: all validate, or were cut
python -m tests.grammars.run mutated --count 30000    # each is taken or refused by its place, and nothing else
python -m tests.grammars.run http --count 1000        # the same over HTTP, to 1P1D: 200 or 400, nobody dies
python -m tests.grammars.run costly                   # CPU time of what is too large, too deep or too costly
python -m tests.grammars.run beside                   # the same through real services, and what others' streams feel
python -m tests.grammars.run folder PATH --count 600  # of a folder's schemas: taken, or refused by which keyword

A folder may be JSONSchemaBench's ``data``, a schema per file, or its ``maskbench/data``, whose files have values, too:
no invalid one may be written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import psutil
from llguidance import LLMatcher
from tests.grammars.beside import deep
from tests.grammars.beside import report as report_beside
from tests.grammars.schemas import UNSUPPORTED, Maker
from tests.support.servers.up import start, stop

from baton.engine.grammar.constraint import GrammarCompiler, load_compiler
from baton.engine.llm import LLM
from baton.errors import InvalidRequestError
from baton.grammar import StructuredOutputs, choice_grammar, json_schema_grammar, regex_grammar
from baton.grammar.validation import LIMITS, _bytes_tokenizer
from baton.types import FinishReason, Grammar, SamplingParams
from baton_kernels.token_mask import unpack_mask
from baton_router.processor.grammar_process import GrammarProcesses

MODEL = Path(__file__).parents[2] / "models" / "baton-tiny"
TEMPERATURES = (0.0, 1.0, 1.5)
VOCAB, EOS = 4096, frozenset({2, 4})


@dataclass
class Report:
    """What came of many schemas."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    complete: int = 0
    wrong: list[str] = field(default_factory=list)


def accept(seeds: Iterable[int], report: Report) -> list[tuple[dict[str, Any], Grammar]]:
    """Make schemas and their grammars; a refusal must name what the schema has."""
    found = []
    for seed in seeds:
        schema = Maker(seed).schema()
        try:
            found.append((schema, json_schema_grammar(schema, "s")))
        except InvalidRequestError as error:
            keyword = (error.field or "").rpartition(".")[2]
            report.refused[keyword if keyword in UNSUPPORTED else error.message.partition(":")[2].strip()[:60]] += 1
            if keyword in UNSUPPORTED and f"'{keyword}'" not in error.message:
                report.wrong.append(f"the refusal of seed {seed} does not name its keyword: {error.message}")
        else:
            report.accepted += 1
            if any(f'"{keyword}"' in json.dumps(schema) for keyword in UNSUPPORTED):
                report.wrong.append(f"seed {seed} was taken in spite of its keyword: {schema}")
    return found


def answer(llm: LLM, grammars: list[tuple[dict[str, Any], Grammar]], report: Report, max_tokens: int, n: int) -> None:
    """Have an engine answer by each grammar at each temperature; what ends by itself must be valid."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jobs = [(schema, grammar, t) for schema, grammar in grammars for t in TEMPERATURES]
    params = [
        SamplingParams(temperature=t, seed=at, max_tokens=max_tokens, grammar=grammar, n=n if t else 1)
        for at, (_, grammar, t) in enumerate(jobs)
    ]
    outputs = llm.generate(["Some JSON: "] * len(jobs), params)
    for (schema, _, t), output in zip(jobs, outputs, strict=True):
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for one in output.outputs:
            report.answers += 1
            if one.finish_reason is FinishReason.LENGTH:
                continue
            report.complete += 1
            try:
                validator.validate(json.loads(one.text))
            except (ValueError, jsonschema.ValidationError) as error:
                report.wrong.append(f"temperature {t}: {one.text!r} for {schema}: {str(error)[:300]}")


def mutate(seeds: Iterable[int], compiler: GrammarCompiler, report: Report) -> None:
    """Check and compile broken schemas, and follow each for a few tokens."""
    masks = np.empty((1, -(-VOCAB // 32)), np.uint32)
    for seed in seeds:
        maker = Maker(seed)
        schema = maker.mutated()
        try:
            grammar = json_schema_grammar(schema, "s")
            constraint = compiler.constraint(grammar)
        except InvalidRequestError as error:
            report.refused[(error.field or "").rpartition(".")[2][:20]] += 1
            if not error.field or not error.message or len(error.message) > 1000:
                report.wrong.append(f"seed {seed}: {error.field!r} {error.message!r}")
            continue
        report.accepted += 1
        for _ in range(6):
            compiler.backend.fill_masks([constraint.matcher], masks)
            allowed = np.flatnonzero(unpack_mask(masks[0], VOCAB))
            if constraint.matcher.error or constraint.complete:
                break
            if not len(allowed):
                report.wrong.append(f"seed {seed}: nothing may follow, and nobody says why: {schema}")
                break
            token = int(maker.rng.choice(list(allowed)))
            if token in EOS:
                break
            constraint.append(token)
            if constraint.error:
                report.wrong.append(f"seed {seed}: a token of the mask does not follow: {constraint.error}")
                break


def over_http(seeds: Iterable[int], report: Report) -> None:
    """Send broken schemas to real services: 200, or 400 with the field (or as it is no JSON), and nobody is lost."""
    running = start("--ratio", "1P1D", "--dtype", "float32", "--model", str(MODEL))
    try:
        before = {child.pid for child in psutil.Process(running.process.pid).children()}
        with httpx.Client(base_url=running.url, timeout=60) as client, ThreadPoolExecutor(4) as pool:

            def send(seed: int) -> tuple[int, httpx.Response]:
                form = {"type": "json_schema", "json_schema": {"name": "s", "schema": Maker(seed).mutated()}}
                headers = {"Content-Type": "application/json"}
                body = {"model": "baton-tiny", "messages": [{"role": "user", "content": "JSON: "}], "max_tokens": 3}
                text = json.dumps({**body, "response_format": form})  # as it is, lone surrogates too
                return seed, client.post("/v1/chat/completions", content=text, headers=headers)

            for seed, answer in pool.map(send, seeds):
                if answer.status_code == 200:
                    report.accepted += 1
                elif answer.status_code == 400 and answer.json()["error"]["param"]:
                    report.refused["400"] += 1
                elif answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]:
                    report.refused["400, no JSON"] += 1  # numbers beyond a double, lone surrogates: of no field
                else:
                    report.wrong.append(f"seed {seed}: {answer.status_code} {answer.text[:300]}")
        after = {child.pid for child in psutil.Process(running.process.pid).children()}
        if not before <= after:
            report.wrong.append(f"processes {before - after} are gone")
    finally:
        stop(running)
        running.process.kill()


def folder(path: Path, count: int, report: Report) -> None:
    """Compile schemas of a folder, evenly chosen, in processes as a router does."""
    files = sorted(path.rglob("*.json"))
    processes = GrammarProcesses(1)
    for at in range(min(count, len(files))):
        file = files[at * len(files) // min(count, len(files))]
        content = json.loads(file.read_bytes())
        tests = content.get("tests", ()) if "schema" in content else ()
        try:
            grammar, _ = processes.make(StructuredOutputs(json=content.get("schema", content), field="s"))
        except InvalidRequestError as error:
            keyword = (error.field or "").rpartition(".")[2]
            reason = error.message.partition("compile JSON schema: ")[2] or error.message.partition(": ")[2]
            report.refused[keyword if "the keyword" in error.message else reason[:60]] += 1
            continue
        report.accepted += 1
        for test in tests:
            report.answers += 1
            matcher = byte_matcher(grammar)
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":")).encode()
            written = matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()
            report.complete += written
            if written and not jsonschema.Draft202012Validator(content["schema"]).is_valid(test["data"]):
                report.wrong.append(f"{file.name}: {text[:200]!r} is written")
    processes.close()


def byte_matcher(grammar: Grammar) -> LLMatcher:
    """Return a matcher whose tokens are bytes."""
    return LLMatcher(_bytes_tokenizer(), grammar.text, log_level=0, limits=LIMITS)


def costly() -> list[str]:
    """Return the CPU time that each of some hostile grammars takes until it is refused or taken."""
    names = [f"name {i}" for i in range(100_000)]
    cases: dict[str, Callable[[], object]] = {
        "enum of 100,000 strings": lambda: json_schema_grammar({"enum": names}, "s"),
        "choice of 100,000 strings": lambda: choice_grammar(names),
        "enum of 25,000 strings": lambda: json_schema_grammar({"enum": [str(i) for i in range(25_000)]}, "s"),
        "schema 500 deep": lambda: json_schema_grammar(deep(), "s"),
        "(a|b)*a(a|b){20}": lambda: regex_grammar("(a|b)*a(a|b){20}"),
        "(a+)+b": lambda: regex_grammar("(a+)+b"),
        "((a{100}){100}){100}": lambda: regex_grammar("((a{100}){100}){100}"),
        "300 KiB of regular expression": lambda: regex_grammar("ab" * 150_000),
    }
    found = []
    for name, make in cases.items():
        began = time.thread_time()
        try:
            make()
            outcome = "taken"
        except InvalidRequestError as error:
            outcome = f"refused: {error.message[:90]}"
        found.append(f"{1e3 * (time.thread_time() - began):8.1f} ms of CPU  {name}: {outcome}")
    return found


def beside() -> list[str]:
    """Measure costly schemas through real services, and streams beside them."""
    running = start("--ratio", "1P1D", "--dtype", "float32", "--model", str(MODEL))
    try:
        found = asyncio.run(report_beside(running.url, running.process.pid))
        stop(running)
    finally:
        running.process.kill()
    return found


def tiny_compiler() -> GrammarCompiler:
    """Return a compiler for the demo model's tokenizer."""
    compiler = load_compiler("llguidance", MODEL, vocab_size=VOCAB, eos_token_ids=EOS)
    assert compiler is not None
    return compiler


def main() -> int:
    """Run, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "mutated", "http", "costly", "beside", "folder"))
    parser.add_argument("path", type=Path, nargs="?", help="the folder")
    parser.add_argument("--count", type=int, help="schemas; default: 300, 30,000 mutated ones")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--max-tokens", type=int, default=150)
    args = parser.parse_args()
    report, started = Report(), time.monotonic()
    if args.what in ("costly", "beside"):
        print("\n".join(costly() if args.what == "costly" else beside()))  # noqa: T201
        return 0
    if args.what == "answers":
        seeds = range(args.first, args.first + (args.count or 300))
        with LLM(str(MODEL), dtype="float32", kv_blocks=2000, max_num_seqs=64) as llm:
            answer(llm, accept(seeds, report), report, args.max_tokens, 3)
    elif args.what == "folder":
        folder(args.path, args.count or 600, report)
    elif args.what == "http":
        over_http(range(args.first, args.first + (args.count or 1000)), report)
    else:
        mutate(range(args.first, args.first + (args.count or 30_000)), tiny_compiler(), report)
    print(  # noqa: T201
        f"{report.accepted} schemas taken, refused: {dict(report.refused.most_common(30))}",
        f"{report.answers} answers, {report.complete} complete; {time.monotonic() - started:.0f} s",
        *(report.wrong[:20] or ["nothing was wrong"]),
        sep="\n",
    )
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
