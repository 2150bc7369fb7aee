"""Traces and data sets: files in one of several forms, recognised by their first line, or generated workloads.

A trace's requests name the blocks of their prompts: equal names stand for equal tokens after equal blocks.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from baton.errors import ConfigError, shown

BLOCK_TOKENS = 512
"""Tokens that an id in ``hash_ids`` stands for."""
_LONGEST_LINE = 64 << 20
_MAX_ID = 2**32


def read_lines(path: Path, limit: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, ``limit`` at most, each with its file and line number.

    Raises:
        ConfigError: The file cannot be read, or a line is no JSON object.
    """
    for where, line in _text_lines(path, limit):
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{where} is no JSON: {error}", field="trace") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is no JSON object", field="trace")
        yield where, value


def _text_lines(path: Path, limit: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file that are not blank, each with its file and number; unpacks gzip."""
    count = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
                if len(line) > _LONGEST_LINE:
                    raise ConfigError(f"{path}:{number} is longer than {_LONGEST_LINE >> 20} MiB", field="trace")
                if limit is not None and count >= limit:
                    return
                if line.strip():
                    count += 1
                    yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", field="trace") from error


def whole_numbers(value: object, what: str, field: str) -> tuple[int, ...]:
    """Check a list of 32-bit numbers.

    Raises:
        ConfigError: It is none; says ``what`` and names ``field``.
    """
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < _MAX_ID for item in value):
        raise ConfigError(f"{what} must be a list of numbers from 0 to 2**32 - 1, got {shown(value)}", field=field)
    return tuple(value)


def best_hit_rate(chains: Sequence[Sequence[int]]) -> float:
    """Return the share of the prompts' blocks that one cache with endless memory would find.

    Args:
        chains: Per request, names of its prompt's blocks.
    """
    seen: set[int] = set()
    hits = 0
    for chain in chains:
        hits += next((at for at, block in enumerate(chain) if block not in seen), len(chain))
        seen.update(chain)
    return hits / sum(map(len, chains))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at_ms: Time of arrival in milliseconds, where it does not follow an answer.
        input_tokens: Prompt tokens.
        output_tokens: Tokens to generate.
        blocks: Names of the prompt's blocks of 512 tokens: equal names stand for equal tokens after equal blocks.
        session: Conversation that it belongs to; empty: the trace does not say.
        delay_ms: Milliseconds from the end of its session's last answer to this request; ``None``: unknown.
    """

    at_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str = ""
    delay_ms: float | None = None

    def to_line(self) -> bytes:
        """Return the line of Mooncake's form, without its end."""
        line: dict[str, Any] = {
            "timestamp": round(self.at_ms),
            "input_length": self.input_tokens,
            "output_length": self.output_tokens,
            "hash_ids": self.blocks,
        }
        if self.session:
            line["session_id"] = self.session
        if self.delay_ms is not None:
            line["delay_ms"] = round(self.delay_ms)
        return orjson.dumps(line)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace of any form, in order of arrival; docs/bench/router.md describes the forms.

    Args:
        path: The file, plain or packed by gzip.
        limit: Requests to read at most.

    Raises:
        ConfigError: The file cannot be read, its form is unknown, a line is not what it should be, or its time is
            before the last one's; names line and field.
    """
    requests: list[TraceRequest] = []
    last_ms = 0.0
    for where, request in trace_form(path)(path, limit):
        if request.at_ms < last_ms and not (request.session and request.delay_ms is not None):
            raise ConfigError(
                f"{where}: timestamp is {last_ms - request.at_ms:g} ms before the last", field="timestamp"
            )
        last_ms = max(last_ms, request.at_ms)
        requests.append(request)
    if not requests:
        raise ConfigError(f"{path} has no request", field="trace")
    return sorted(requests, key=lambda request: request.at_ms)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests as a trace of Mooncake's form.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_bytes(b"".join(request.to_line() + b"\n" for request in requests))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="save") from error


Located = Iterator[tuple[str, TraceRequest]]
"""Requests, each with its file and line number."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AGENT_TOKEN_BYTES = 4
_SESSION_EVERY_MS = 10_000.0
_TOKEN_MS = 20.0


def trace_form(path: Path) -> Callable[[Path, int | None], Located]:
    """Return the loader of a file, by its first line.

    Raises:
        ConfigError: The file cannot be read, is empty, or of no known form.
    """
    where, first = next(_text_lines(path), ("", b""))
    if not where:
        raise ConfigError(f"{path} has no request", field="trace")
    if first.lstrip().startswith((b"{", b"[")):
        _, value = next(read_lines(path, 1))
        return _read_agent_messages if "input" in value and "pre_gap" in value else _read_block_names
    if first.decode(errors="replace").strip().lstrip("\ufeff").split(",") == list(_AZURE):
        return _read_azure
    raise ConfigError(
        f"{where}: the form is unknown: neither JSON lines with hash_ids (Mooncake), nor with input and pre_gap "
        f"(LMCache's agents), nor {','.join(_AZURE)} (Azure)",
        field="trace",
    )


def _read_block_names(path: Path, limit: int | None) -> Located:
    """Read Mooncake's form, with ``session_id`` and ``delay_ms`` where a line has them."""
    for where, value in read_lines(path, limit):
        blocks = whole_numbers(value.get("hash_ids"), f"{where}: hash_ids", "hash_ids")
        length = _length(value, "input_length", where)
        if not (len(blocks) - 1) * BLOCK_TOKENS < length <= len(blocks) * BLOCK_TOKENS:
            raise ConfigError(
                f"{where}: {len(blocks)} hash_ids are not the blocks of {length} tokens ({BLOCK_TOKENS} each)",
                field="hash_ids",
            )
        session = str(value.get("session_id", ""))
        delay = None if value.get("delay_ms") is None else _milliseconds(value, "delay_ms", where)
        if delay is not None and not session:
            raise ConfigError(f"{where}: delay_ms needs a session_id", field="session_id")
        at = _milliseconds(value, "timestamp", where)
        yield where, TraceRequest(at, length, _length(value, "output_length", where), blocks, session, delay)


def _read_azure(path: Path, limit: int | None) -> Located:
    """Read Azure's form (2023): times and lengths; prompts share nothing."""
    names = count()
    first: datetime | None = None
    lines = _text_lines(path, None if limit is None else limit + 1)
    next(lines)
    for where, line in lines:
        row = dict(zip(_AZURE, next(csv.reader([line.decode(errors="replace").strip()])), strict=False))
        for name in _AZURE:
            if not row.get(name):
                raise ConfigError(f"{where} has no {name}", field=name)
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of a second, of which six fit
        except ValueError:
            text = shown(row["TIMESTAMP"])
            raise ConfigError(f"{where}: TIMESTAMP must be a date and a time, got {text}", field="TIMESTAMP") from None
        first = first or at
        numbers = {name: int(row[name]) if row[name].isdigit() else row[name] for name in _AZURE[1:]}
        prompt, output = (_length(numbers, name, where) for name in _AZURE[1:])
        blocks = tuple(next(names) for _ in range(-(-prompt // BLOCK_TOKENS)))
        yield where, TraceRequest((at - first).total_seconds() * 1000, prompt, output, blocks)


def _read_agent_messages(path: Path, limit: int | None) -> Located:
    """Read LMCache's form of agents' traces: messages, and seconds from one answer to the next request (``pre_gap``).

    A token counts as four bytes of text. The form has no times: sessions begin every ten seconds, and for replays that
    do not wait for answers a token is assumed to take 20 ms.
    """
    names: dict[tuple[int, bytes], int] = {}
    ends: dict[str, float] = {}
    for where, value in read_lines(path, limit):
        session = value.get("session_id")
        if not isinstance(session, str) or not session:
            raise ConfigError(f"{where}: session_id must be a text, got {shown(session)}", field="session_id")
        messages = value.get("input")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ConfigError(f"{where}: input must be a list of messages", field="input")
        text = b"".join(orjson.dumps(message) for message in messages)
        parent = -1
        blocks = []
        step = BLOCK_TOKENS * _AGENT_TOKEN_BYTES
        for start in range(0, len(text), step):
            parent = names.setdefault((parent, text[start : start + step]), len(names))
            blocks.append(parent)
        tokens = -(-len(text) // _AGENT_TOKEN_BYTES)
        if not tokens:
            raise ConfigError(f"{where}: input has no message", field="input")
        output = _length(value, "output_length", where)
        delay = 1000 * _milliseconds(value, "pre_gap", where)
        began = ends[session] + delay if session in ends else _SESSION_EVERY_MS * len(ends)
        ends[session] = began + _TOKEN_MS * output
        yield where, TraceRequest(began, tokens, output, tuple(blocks), session, delay)


def _milliseconds(value: dict[str, Any], name: str, where: str) -> float:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
        raise ConfigError(f"{where}: {name} must be a time of at least 0, got {shown(number)}", field=name)
    return float(number)


def _length(value: Mapping[str, Any], name: str, where: str) -> int:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{where}: {name} must be a number above 0, got {shown(number)}", field=name)
    return number


def draw_length(rng: np.random.Generator, mean: int, spread: float) -> int:
    """Draw a number of tokens, at least 1, evenly from (1 - spread) to (1 + spread) times the mean."""
    return max(1, int(rng.integers(round(mean * (1 - spread)), round(mean * (1 + spread)) + 1)))


def scaled_block(lengths: float) -> int:
    """Return the tokens of a block whose trace is scaled by ``lengths``."""
    return max(1, round(lengths * BLOCK_TOKENS))


def scaled(requests: Sequence[TraceRequest], lengths: float = 1.0, times: float = 1.0) -> list[TraceRequest]:
    """Return a trace with other lengths and times; what prompts share, they share still.

    Args:
        requests: Requests in order of arrival.
        lengths: Factor of prompts and answers, above 0; blocks have :func:`scaled_block` tokens then.
        times: Factor of times of arrival and of delays, above 0.
    """
    block = scaled_block(lengths)
    results = []
    for request in requests:
        tokens = max(1, min(round(lengths * request.input_tokens), block * len(request.blocks)))
        results.append(
            replace(
                request,
                at_ms=times * request.at_ms,
                input_tokens=tokens,
                output_tokens=max(1, round(lengths * request.output_tokens)),
                blocks=request.blocks[: -(-tokens // block)],
                delay_ms=None if request.delay_ms is None else times * request.delay_ms,
            )
        )
    return results


_MINUTE_MS = 60_000


def with_sessions(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Guess conversations where a trace names none: a prompt with two leading blocks of an earlier one continues it."""
    if any(request.session for request in requests):
        return list(requests)
    owners: dict[int, str] = {}
    named = []
    for number, request in enumerate(requests):
        known = [block for block in request.blocks[1:] if block in owners]
        session = owners[known[-1]] if known else f"s{number}"
        for block in request.blocks[1:]:
            owners.setdefault(block, session)
        named.append(replace(request, session=session))
    return named


def in_bursts(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Compress each minute's arrivals into its first part, ``factor`` times as fast."""
    minutes = ((request, *divmod(request.at_ms, _MINUTE_MS)) for request in requests)
    return [replace(request, at_ms=number * _MINUTE_MS + rest / factor) for request, number, rest in minutes]


@dataclass(frozen=True)
class GeneratorOptions:
    """Parameters of a generated workload.

    Attributes:
        requests: How many.
        prefixes: System prompts; the k-th is chosen with weight 1/k.
        prefix_blocks: Length of each, in blocks of 512 tokens.
        turns: Mean turns of a conversation (geometric); each turn's prompt holds all earlier ones.
        turn_blocks: Mean new blocks per turn (geometric).
        output_tokens: Mean output (exponential).
        rate: Requests per second (Poisson).
        think_s: Mean pause between two turns of a conversation (exponential).
        seed: Seed of all random choices.

    Raises:
        ConfigError: A number is out of range; names the field.
    """

    requests: int = 1000
    prefixes: int = 1
    prefix_blocks: int = 20
    turns: float = 1.0
    turn_blocks: float = 4.0
    output_tokens: float = 200.0
    rate: float = 5.0
    think_s: float = 20.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("prefixes", 1), ("prefix_blocks", 0), ("turns", 1), ("turn_blocks", 1)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}", field=name)
        for name in ("output_tokens", "rate", "think_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}", field=name)


def generate(workload: GeneratorOptions) -> list[TraceRequest]:
    """Return the workload's requests in order of arrival."""
    rng = random.Random(workload.seed)
    names = count()
    prefixes = [tuple(next(names) for _ in range(workload.prefix_blocks)) for _ in range(workload.prefixes)]
    weights = [1 / rank for rank in range(1, workload.prefixes + 1)]
    requests: list[TraceRequest] = []
    began = 0.0
    conversation = 0
    while len(requests) < workload.requests:
        began += 1000 * rng.expovariate(workload.rate / workload.turns)
        conversation += 1
        prefix = rng.choices(prefixes, weights)[0]
        requests += _conversation(workload, rng, names, (began, f"s{conversation}", prefix))
    requests.sort(key=lambda request: request.at_ms)
    return requests[: workload.requests]


def _conversation(
    workload: GeneratorOptions, rng: random.Random, names: Iterator[int], start: tuple[float, str, tuple[int, ...]]
) -> Iterator[TraceRequest]:
    at, session, blocks = start
    for _ in range(_geometric(rng, workload.turns)):
        blocks += tuple(next(names) for _ in range(_geometric(rng, workload.turn_blocks)))
        tokens = len(blocks) * BLOCK_TOKENS
        yield TraceRequest(at, tokens, 1 + round(rng.expovariate(1 / workload.output_tokens)), blocks, session)
        at += 1000 * rng.expovariate(1 / workload.think_s)


def _geometric(rng: random.Random, mean: float) -> int:
    """Return a number from 1 on with this mean."""
    number = 1
    while rng.random() > 1 / mean:
        number += 1
    return number


def generate_clients(count: int, *, clients: int = 40, rate: float = 3.0, seed: int = 0) -> list[TraceRequest]:
    """Return the requests of many unequal clients, after the findings of ServeGen (arXiv 2505.09999).

    A few clients send most requests (weights 1/k); each arrives in bursts of its own (gamma, shape 0.1 to 1), has its
    own lengths (log-normal prompts, exponential outputs) and a system prompt that all of its requests share.

    Args:
        count: Requests.
        clients: Number of clients.
        rate: Requests per second of all clients together.
        seed: Seed of all random choices.
    """
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, clients + 1)
    weights /= weights.sum()
    names = 0
    requests: list[TraceRequest] = []
    for client, weight in enumerate(weights.tolist()):
        own = math.ceil(count * weight)
        shape = rng.uniform(0.1, 1.0)
        times = np.cumsum(rng.gamma(shape, 1000 / (rate * weight * shape), own))
        system = range(names, names + int(rng.integers(0, 9)))
        names = system.stop
        prompts = np.minimum(rng.lognormal(rng.uniform(6.0, 8.5), 0.7, own), 60_000)
        outputs = rng.exponential(rng.uniform(50, 600), own)
        for at, prompt, output in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            fresh = range(names, names + math.ceil(prompt / BLOCK_TOKENS))
            names = fresh.stop
            tokens = len(system) * BLOCK_TOKENS + max(1, int(prompt))
            blocks = (*system, *fresh)[: -(-tokens // BLOCK_TOKENS)]
            requests.append(TraceRequest(at, tokens, 1 + round(output), blocks, f"c{client}"))
    return sorted(requests, key=lambda request: request.at_ms)[:count]


GENERATED: Mapping[str, Callable[[int, int], list[TraceRequest]]] = MappingProxyType(
    {
        "shared_prefix": lambda count, seed: generate(
            GeneratorOptions(requests=count, prefixes=20, prefix_blocks=20, turns=4, turn_blocks=3, rate=4, seed=seed)
        ),
        "servegen": lambda count, seed: generate_clients(count, seed=seed),
    }
)
"""Workloads by name: made from a number of requests and a seed."""
GENERATED_REQUESTS = 3000
"""Requests of a generated workload where nothing says how many."""
