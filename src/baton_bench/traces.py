"""Traces and data sets: JSON lines; a trace's requests name the blocks of their prompts (``hash_ids``)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from baton.errors import ConfigError, shown

BLOCK_TOKENS = 512
"""Tokens that an id in ``hash_ids`` stands for."""
_MAX_ID = 2**32


def read_lines(path: Path, limit: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, ``limit`` at most, each with its file and line number.

    Raises:
        ConfigError: The file cannot be read, or a line is no JSON object.
    """
    count = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and count >= limit:
                    return
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    value = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ConfigError(f"{where} is no JSON: {error}", field="trace") from error
                if not isinstance(value, dict):
                    raise ConfigError(f"{where} is no JSON object", field="trace")
                count += 1
                yield where, value
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="trace") from error


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
    """One line.

    Attributes:
        at_ms: When it arrives.
        input_tokens: Prompt tokens.
        output_tokens: That it generates.
        blocks: Names of the prompt's blocks: equal names stand for equal tokens after equal blocks.
        session: Conversation that it belongs to; empty: the trace does not say.
    """

    at_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str = ""

    def to_line(self) -> bytes:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "timestamp": round(self.at_ms),
            "input_length": self.input_tokens,
            "output_length": self.output_tokens,
            "hash_ids": self.blocks,
        }
        if self.session:
            line["session_id"] = self.session
        return orjson.dumps(line)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace in order of arrival.

    Args:
        path: The file.
        limit: Requests to read at most.

    Raises:
        ConfigError: The file cannot be read, or a line is not what it should be; names line and field.
    """
    requests = [_request(value, where) for where, value in read_lines(path, limit)]
    if not requests:
        raise ConfigError(f"{path} has no request", field="trace")
    return sorted(requests, key=lambda request: request.at_ms)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests as a trace.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_bytes(b"".join(request.to_line() + b"\n" for request in requests))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="save") from error


def _request(value: dict[str, Any], where: str) -> TraceRequest:
    at = value.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, (int, float)) or at < 0:
        raise ConfigError(f"{where}: timestamp must be a number of milliseconds, got {shown(at)}", field="timestamp")
    blocks = whole_numbers(value.get("hash_ids"), f"{where}: hash_ids", "hash_ids")
    length = _length(value, "input_length", where)
    if not (len(blocks) - 1) * BLOCK_TOKENS < length <= len(blocks) * BLOCK_TOKENS:
        raise ConfigError(
            f"{where}: {len(blocks)} hash_ids are not the blocks of {length} tokens ({BLOCK_TOKENS} each)",
            field="hash_ids",
        )
    session = value.get("session_id", "")
    return TraceRequest(float(at), length, _length(value, "output_length", where), blocks, str(session))


def _length(value: dict[str, Any], name: str, where: str) -> int:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{where}: {name} must be a number above 0, got {shown(number)}", field=name)
    return number


def draw_length(rng: np.random.Generator, mean: int, spread: float) -> int:
    """Draw a number of tokens, at least 1, evenly from (1 - spread) to (1 + spread) times the mean."""
    return max(1, int(rng.integers(round(mean * (1 - spread)), round(mean * (1 + spread)) + 1)))


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
