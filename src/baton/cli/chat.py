"""``baton generate``, which streams the answer to one prompt, and ``baton chat``, a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cli.printable import escaped, lines, plain
from baton.cli.router import add_grpc_flags, open_client
from baton.client import Client, Generation
from baton.errors import BatonError, ConfigError

_HELP = """/reset       forget the conversation
/undo        forget the last question and its answer
/system TEXT start over with this instruction
/save FILE   write the conversation as JSON; --load FILE continues it
/quit        end, as Ctrl-D does; Ctrl-C ends an answer"""
_MAX_INPUT_CHARS = 1 << 20


SAMPLING = {
    "max_tokens": (int, "N", "tokens to generate at most (default: the rest of the context)"),
    "temperature": (float, "X", "0: the most likely token each time (default: 1)"),
    "top_p": (float, "X", "draw from the most likely tokens that have so much of the probability"),
    "seed": (int, "N", "seed of what is drawn"),
}
"""Flags that are passed to the SDK as keywords of the same name."""


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the sampling flags."""
    for name, (kind, metavar, text) in SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--model", default="", help="model to ask for; default: the one that is served")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given sampling flags as keywords of the SDK."""
    return {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}


def add_generate_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="let a prompt be continued; the text comes as it is made")
    parser.add_argument("prompt", metavar="PROMPT", help="the text; -: from standard input")
    add_sampling_flags(parser)
    parser.add_argument("--stop", action="append", default=[], help="end before this text; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object, at its end")
    add_grpc_flags(parser)
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Generate and print the answer; returns the exit status."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ConfigError("PROMPT must not be empty", field="prompt")
    options = sampling_of(args) | ({"stop": args.stop} if args.stop else {})
    with open_client(args) as client:
        if args.json:
            answer = client.generate(prompt, model=args.model, **options)
            print(escaped(json.dumps(as_json(answer), indent=2, ensure_ascii=False)))
            return 0
        show = lines if sys.stdout.isatty() else str  # files and pipes get the text as it is
        with client.generate(prompt, model=args.model, stream=True, **options) as stream:
            for chunk in stream:
                print(show(chunk.text), end="", flush=True)
    print()
    return 0


def as_json(answer: Generation) -> dict[str, Any]:
    """Return an answer as JSON fields."""
    return {
        "request_id": answer.request_id,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "trace": None if answer.trace is None else dataclasses.asdict(answer.trace),
    }


def add_chat_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chat", help="talk to the model; it remembers the conversation")
    parser.add_argument("--system", default="", metavar="TEXT", help="instruction that the conversation begins with")
    parser.add_argument("--load", default="", metavar="FILE", help="go on with a conversation that /save wrote")
    add_sampling_flags(parser)
    parser.add_argument("--stats", action="store_true", help="a line after each answer: tokens, times, way")
    add_grpc_flags(parser)
    parser.set_defaults(run=run_chat)


def run_chat(args: argparse.Namespace) -> int:
    """Chat until the input ends; returns the exit status."""
    conversation = Conversation(Console(highlight=False, soft_wrap=True), args)
    if args.load:
        conversation.load(Path(args.load))
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # line editing and history, where Python has them
            importlib.import_module("readline")
    with open_client(args) as client:
        model = args.model or next((each.name for each in client.models()), "")
        if interactive:
            conversation.console.print(f"{plain(model)}; /help lists commands, Ctrl-D ends", style="dim", markup=False)
        while (line := _read(interactive)) is not None:
            if not line.strip():
                continue
            try:
                if not conversation.run_line(client, line.strip()):
                    break
            except BatonError as error:
                if not interactive:
                    raise
                conversation.console.print(lines(error.message), style="red", markup=False)
    return 0


def _read(interactive: bool) -> str | None:
    """Return the next line; ``None``: end of input."""
    try:
        if interactive:
            return input("> ")
        return sys.stdin.readline(_MAX_INPUT_CHARS) or None
    except EOFError:
        return None


class Conversation:
    """A conversation with a model.

    Args:
        console: Console that answers are printed to.
        args: Arguments of the command.
    """

    def __init__(self, console: Console, args: argparse.Namespace) -> None:
        self.console = console
        self._args = args
        self.messages: list[dict[str, str]] = []
        self._system = args.system
        self._begin()

    def _begin(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def run_line(self, client: Client, line: str) -> bool:
        """Answer a line or run its command; returns whether the conversation continues.

        Raises:
            BatonError: The router refuses or does not answer; the line is not kept.
        """
        if not line.startswith("/"):
            self._answer(client, line)
            return True
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._begin()
        elif command == "/system":
            self._system = rest
            self._begin()
        elif command == "/undo":
            del self.messages[max(len(self.messages) - 2, 1 if self._system else 0) :]
        elif command == "/save":
            self.save(Path(rest.strip()))
        elif command == "/help":
            self.console.print(_HELP, markup=False)
        else:
            raise ConfigError(f"there is no {command}; /help lists commands", field="command")
        return True

    def _answer(self, client: Client, line: str) -> None:
        messages = [*self.messages, {"role": "user", "content": line}]
        text = ""
        tokens = 0
        first = 0.0
        started = time.perf_counter()
        with client.generate(messages, model=self._args.model, stream=True, **sampling_of(self._args)) as stream:
            try:
                for chunk in stream:
                    first = first or time.perf_counter()
                    text += chunk.text
                    tokens += len(chunk.token_ids)
                    self.console.print(lines(chunk.text), end="", markup=False)
            except KeyboardInterrupt:  # the text so far stays part of the conversation
                stream.cancel()
        self.console.print()
        self.messages = [*messages, {"role": "assistant", "content": text}]
        if self._args.stats:
            self._print_stats(tokens, first - started, time.perf_counter() - first, stream.trace)

    def _print_stats(self, tokens: int, ttft_s: float, rest_s: float, trace: Any) -> None:
        speed = f"{(tokens - 1) / rest_s:.1f} tokens/s" if tokens > 1 and rest_s > 0 else ""
        way = "" if trace is None else f"{trace.prefill_instance or 'local'} -> {trace.decode_instance}"
        cached = "" if trace is None else f"{trace.cached_tokens} of {trace.prompt_tokens} prompt tokens cached"
        facts = (f"{tokens} tokens", f"TTFT {1000 * ttft_s:.0f} ms", speed, cached, way)
        self.console.print(plain(", ".join(filter(None, facts))), style="dim", markup=False)

    def save(self, path: Path) -> None:
        """Write the conversation to a file.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", field="save") from error

    def load(self, path: Path) -> None:
        """Continue a conversation from a file.

        Raises:
            ConfigError: The file cannot be read, or is no conversation.
        """
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="load") from error
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}", field="load") from error
        valid = isinstance(messages, list) and all(
            isinstance(item, dict)
            and set(item) == {"role", "content"}
            and all(isinstance(x, str) for x in item.values())
            for item in messages
        )
        if not valid:
            raise ConfigError(f"{path} is no list of messages with role and content", field="load")
        self.messages = messages
