"""``baton demo``: 1P1D, router and KV store here, one chat answer, and the proof that its tokens are right."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient
from baton.client.types import Trace
from baton.config import EngineConfig
from baton.config.demo_model import DEMO_DRAFTS, default_draft, default_model
from baton.config.pipes import AUTO, PIPES_HELP, check_pipes
from baton.errors import BatonError, ConfigError, InternalError
from baton.tokenizer.model_files import check_model_path
from baton.types import SamplingParams

PROMPT = "Write a function `read_config` that reads a configuration file and returns a dictionary of its sections."


@dataclass
class Answer:
    """Answer of the deployment."""

    token_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    seconds: float = 0.0
    trace: Trace = field(default_factory=Trace)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="start 1P1D, stream a chat answer, compare it with Hugging Face")
    parser.add_argument("--model", default="", help="model (default: the demo model models/baton-tiny)")
    parser.add_argument("--prompt", default=PROMPT, help="what to say to it")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens to generate at most (default: 96)")
    parser.add_argument("--pipe", default=AUTO, help=f"{PIPES_HELP} (default: {AUTO})")
    who = "who drafts: none, ngram, suffix, mtp; for the demo model without --speculative-model too"
    parser.add_argument("--speculative", default="none", help=f"{who}: {', '.join(DEMO_DRAFTS)} (default: none)")
    parser.add_argument("--speculative-model", default="", help="model or heads that draft (default: the demo model's)")
    parser.add_argument("--speculative-tokens", type=int, default=4, help="draft tokens per step (default: 4)")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    parser.add_argument("--logs", action="store_true", help="show the processes' log lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status: 0 if every token is right."""
    return asyncio.run(_demo(args))


async def _demo(args: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True, quiet=args.json)
    lines: list[str] = []

    def emit(name: str, line: str) -> None:
        lines.append(f"{name:>10} | {line}")
        if args.logs:
            console.print(lines[-1], markup=False, style="dim")

    model = args.model or default_model()
    check_model_path(model)
    drafting = _drafting(args, model)
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1, got {args.max_tokens}", field="max_tokens")
    check_pipes(tuple(args.pipe.split(",")))
    plan = make_plan(
        ratio=Ratio(1, 1),
        pipes=args.pipe,
        kvstore=True,
        extra=ExtraArgs(
            # bfloat16 results depend on what else is in the batch: only float32 can be compared token for token.
            worker=("--model", model, "--dtype", "float32", *drafting),
            # The demo shows the hand-over, so even a short prompt is prefilled remotely.
            decode=("--remote-prefill-threshold", "1"),
        ),
    )
    console.print(f"starting 1P1D, router and KV store for {model} ...")
    started = time.perf_counter()
    try:
        async with contextlib.AsyncExitStack() as stack:
            with console.status("loading the model ..."):
                supervisor = await stack.enter_async_context(Supervisor(plan, emit, restart=False))
            names = ", ".join(f"{name} (pid {p.pid})" for name, p in sorted(supervisor.processes.items()))
            console.print(f"up after {time.perf_counter() - started:.1f} s: {names}\n")
            answer = await _chat(console, plan.grpc_address, args.prompt, args.max_tokens)
    except BatonError:
        Console(stderr=True, soft_wrap=True).print("\n".join(lines[-40:]), markup=False, highlight=False)
        raise
    console.print("\ncomputing the same with Hugging Face generate ...")
    with console.status("computing ..."):
        expected = await asyncio.to_thread(_hugging_face, model, args.prompt, args.max_tokens)
    if args.json:
        print(json.dumps(_as_json(answer, expected), indent=2))
    return _report(console, answer, expected)


def _drafting(args: argparse.Namespace, model: str) -> tuple[str, ...]:
    """Return the instances' flags for speculative decoding.

    Raises:
        ConfigError: A flag is invalid, or the method needs weights that Baton does not include.
    """
    method = args.speculative
    drafter = args.speculative_model
    if method in DEMO_DRAFTS and not drafter:
        if args.model:
            raise ConfigError(f"speculative {method} for {model} needs --speculative-model", field="speculative_model")
        drafter = default_draft(method)
    tokens = args.speculative_tokens
    EngineConfig(model=model, speculative=method, speculative_model=drafter, speculative_tokens=tokens)
    if method == "none":
        return ()
    named = ("--speculative-model", drafter) if drafter else ()
    return ("--speculative", method, *named, "--speculative-tokens", str(tokens))


async def _chat(console: Console, address: str, prompt: str, max_tokens: int) -> Answer:
    answer = Answer()
    async with AsyncClient(address) as client:
        console.print(f"user: {prompt}\nassistant:", markup=False)
        started = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        messages = [{"role": "user", "content": prompt}]
        async with await client.generate(messages, stream=True, sampling=sampling) as stream:
            async for chunk in stream:
                if not answer.token_ids:
                    answer.ttft_s = time.perf_counter() - started
                answer.token_ids += chunk.token_ids
                console.print(chunk.text, end="", markup=False, style="green")
        answer.seconds = time.perf_counter() - started
        console.print()
        if stream.trace is None:
            raise InternalError("the answer came without a trace")
        answer.trace = stream.trace
    return answer


def _hugging_face(model: str, prompt: str, max_tokens: int) -> list[int]:
    """Generate greedily with transformers' own tokenizer, template and model code from the same files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from baton.engine.models.loader import quiet_transformers

    with quiet_transformers(), torch.inference_mode():
        tokenizer = AutoTokenizer.from_pretrained(model)
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        network.train(False)
        inputs = torch.tensor([ids])
        output = network.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_tokens, do_sample=False
        )
    return [int(token) for token in output[0, len(ids) :]]


def _as_json(answer: Answer, expected: list[int]) -> dict[str, Any]:
    return {
        "equal": answer.token_ids == expected,
        "token_ids": answer.token_ids,
        "expected_token_ids": expected,
        "ttft_ms": 1000 * answer.ttft_s,
        "seconds": answer.seconds,
        "trace": dataclasses.asdict(answer.trace),
    }


def _report(console: Console, answer: Answer, expected: list[int]) -> int:
    equal = answer.token_ids == expected
    trace = answer.trace
    table = Table(title="What happened", show_header=False)
    rows = [
        ("tokens equal to Hugging Face generate", "yes" if equal else "NO"),
        ("tokens generated", f"{len(answer.token_ids)} in {answer.seconds:.2f} s"),
        ("prefill", f"{trace.path or 'unknown'} ({trace.prefill_instance or '-'} -> {trace.decode_instance})"),
        ("pipe", trace.pipe or "-"),
        ("KV bytes moved", f"{trace.kv_bytes:,} in {trace.transfer_us / 1000:.2f} ms"),
        ("prompt tokens transferred / recomputed", f"{trace.transferred_tokens} / {trace.recomputed_tokens}"),
        ("TTFT", f"{1000 * answer.ttft_s:.1f} ms"),
    ]
    if trace.drafted_tokens:
        # The first token is the prefill instance's.
        decoded = len(answer.token_ids) - 1
        per_step = decoded / max(1, decoded - trace.accepted_tokens)
        drafts = f"{trace.drafted_tokens} / {trace.accepted_tokens}, {per_step:.2f} tokens per step"
        rows.append(("draft tokens / accepted", drafts))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if not equal:
        console.print(f"ours:  {answer.token_ids}\ntheirs: {expected}")
    return 0 if equal and trace.transferred_tokens > 0 else 1
