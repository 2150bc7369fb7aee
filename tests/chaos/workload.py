"""Requests of every kind with the answers that Hugging Face ``generate`` gives; computed once per machine and kept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tests.chaos.credentials import TENANTS

from baton.client import Generation
from baton.errors import BatonError

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "baton-tiny"
KEPT = ROOT / "build" / "chaos" / "answers.json"
VERSION = 2
"""Of the catalogue: another one is computed anew."""

NEW_TOKENS = 40
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """A prompt, how tokens are chosen, and what comes out.

    Attributes:
        prompt: Token ids.
        options: Of ``AsyncClient.generate``.
        tokens: Per sequence, to its end token or ``NEW_TOKENS``.
        logprobs: Of the first sequence's tokens.
        text: Of the first sequence.
    """

    prompt: list[int]
    options: dict[str, Any]
    tokens: list[list[int]]
    logprobs: list[float]
    text: str


def cases() -> list[Case]:
    """Return the catalogue: computed, or as an earlier run kept it."""
    stamp = {"version": VERSION, "model": (MODEL / "model.safetensors").stat().st_size, "torch": version("torch")}
    if KEPT.exists():
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return [Case(**item) for item in kept["cases"]]
    from tests.chaos.answers import compute  # what it imports takes seconds, and is seldom needed

    found = compute()
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    part = KEPT.with_suffix(".part")
    part.write_text(json.dumps({"stamp": stamp, "cases": [asdict(case) for case in found]}), encoding="utf-8")
    part.replace(KEPT)
    return found


@dataclass
class Request:
    """One request of a seed: a case and everything about it that must not change its answer.

    Attributes:
        router: Which router it goes to.
        kind: ``streamed``, ``http``, ``stop``, ``logprobs`` or ``cancelled``.
        options: For ``AsyncClient.generate``.
        length: Tokens asked for.
        leave_after: Tokens after which a client that leaves does so.
    """

    case: Case
    router: int
    kind: str
    options: dict[str, Any]
    length: int
    leave_after: int = 0
    stop: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    answer: Generation | None = None
    error: BatonError | None = None

    @classmethod
    def drawn(cls, rng: random.Random, catalogue: Sequence[Case], name: str) -> Request:
        """Draw one."""
        case = rng.choice(catalogue)
        kind = rng.choices(("streamed", "http", "stop", "logprobs", "cancelled"), (4, 3, 1, 1, 1))[0]
        length = rng.choice((NEW_TOKENS, 20, 12, 4))
        options: dict[str, Any] = {
            **case.options,
            "max_tokens": length,
            "priority": rng.choice((0, 0, 0, -1, 5)),
            "user": rng.choice(TENANTS),
            "cache_salt": name if rng.random() < 0.6 else "",  # most ignore the caches: there is something to move
            "request_id": name,
        }
        request = cls(case, rng.randrange(2), kind, options, length)
        if "n" in options:
            options["n"] = rng.randint(1, options["n"])
        if kind == "stop" and len(case.text) > 6:
            middle = len(case.text) // 2
            request.stop = options["stop"] = case.text[middle : middle + 3]
            options["max_tokens"] = request.length = NEW_TOKENS
            options.pop("n", None)
        elif kind == "logprobs":
            options["logprobs"] = rng.choice((0, 3))
        elif kind == "cancelled":
            request.leave_after = rng.randrange(1, 12)
        return request

    @property
    def expected(self) -> list[list[int]]:
        """What each sequence's tokens must be."""
        return [tokens[: self.length] for tokens in self.case.tokens[: self.options.get("n", 1)]]

    def wrong(self) -> str:
        """Say what is wrong with its answer; empty: nothing."""
        if self.answer is None:
            return ""
        choices = {choice.index: choice for choice in self.answer.choices}
        if self.kind == "cancelled":
            found = [choices[i].token_ids if i in choices else [] for i in range(len(self.expected))]
            ok = all(one == all_[: len(one)] for one, all_ in zip(found, self.expected, strict=True))
            return "" if ok else f"its beginning is {found}, not {self.expected}"
        if self.stop:
            whole = self.case.text[: self.case.text.index(self.stop)]
            found_text = choices[0].text
            return "" if found_text == whole else f"text {found_text!r}, not {whole!r}"
        found = [choices[i].token_ids for i in sorted(choices)]
        if found != self.expected:
            return f"tokens {found}, not {self.expected}"
        if self.kind == "logprobs":
            logprobs = [item.logprob for item in choices[0].logprobs or ()]
            wanted = self.case.logprobs[: len(self.expected[0])]
            if len(logprobs) != len(wanted) or not np.allclose(logprobs, wanted, atol=LOGPROB_TOLERANCE, rtol=0):
                return f"log probabilities {logprobs}, not {wanted}"
        return ""
