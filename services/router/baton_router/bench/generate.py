"""A workload whose requests share prefixes: system prompts, and conversations that grow turn by turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from baton.errors import ConfigError
from baton_router.bench.trace import BLOCK_TOKENS, TraceRequest


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
