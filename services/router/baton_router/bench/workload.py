"""Workloads to replay: traces in Mooncake's format, and generated ones whose requests share prefixes.

A trace is JSON lines with arrival, lengths, and a name per block of 512 tokens. Generated requests have system prompts,
and belong to conversations that grow turn by turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from baton.bench.core.traces import BLOCK_TOKENS, TraceRequest
from baton.errors import ConfigError

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
    """Let what arrives in a minute arrive in its first part, ``factor`` times as fast; then comes nothing."""
    minutes = ((request, *divmod(request.at_ms, _MINUTE_MS)) for request in requests)
    return [replace(request, at_ms=number * _MINUTE_MS + rest / factor) for request, number, rest in minutes]


@dataclass(frozen=True)
class Workload:
    """What to generate.

    Attributes:
        requests: How many.
        prefixes: System prompts; the k-th is chosen with weight 1/k.
        prefix_blocks: Length of each, in blocks of 512 tokens.
        turns: Mean turns of a conversation (geometric); each turn's prompt holds all earlier ones.
        turn_blocks: Mean new blocks per turn (geometric).
        output_tokens: Mean output (exponential).
        rate: Requests per second (Poisson).
        think_s: Mean pause between two turns of a conversation (exponential).
        seed: Of everything.

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


def generate(workload: Workload) -> list[TraceRequest]:
    """Return the workload's requests in order of arrival."""
    rng, names = random.Random(workload.seed), count()
    prefixes = [tuple(next(names) for _ in range(workload.prefix_blocks)) for _ in range(workload.prefixes)]
    weights = [1 / rank for rank in range(1, workload.prefixes + 1)]
    requests: list[TraceRequest] = []
    began, conversation = 0.0, 0
    while len(requests) < workload.requests:
        began += 1000 * rng.expovariate(workload.rate / workload.turns)
        conversation += 1
        prefix = rng.choices(prefixes, weights)[0]
        requests += _conversation(workload, rng, names, (began, f"s{conversation}", prefix))
    requests.sort(key=lambda request: request.at_ms)
    return requests[: workload.requests]


def _conversation(
    workload: Workload, rng: random.Random, names: Iterator[int], start: tuple[float, str, tuple[int, ...]]
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
