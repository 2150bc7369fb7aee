"""Requests of every kind with the answers that Hugging Face ``generate`` gives; computed once per machine and kept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.chaos.credentials import TENANTS
from tests.support.equality import mixed_prompts
from transformers import AutoModelForCausalLM

from baton.client import Generation
from baton.engine.models.loader import quiet_transformers
from baton.engine.sample.filters import filtered_probs
from baton.engine.sample.sampler import draw, draw_keys
from baton.errors import BatonError
from baton.seeds import sequence_seed
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "baton-tiny"
KEPT = ROOT / "build" / "chaos" / "answers.json"
VERSION = 2
"""Of the catalogue below: another one is computed anew."""

NEW_TOKENS = 40
NUM_PROMPTS = 24
SAMPLED: tuple[dict[str, Any], ...] = ({"temperature": 0.9, "top_p": 0.95}, {"temperature": 1.2, "top_k": 40})
LOGPROB_TOLERANCE = 1e-3
_GREEDY_MARGIN = 1e-3


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


class _Choice:
    """A logits processor that leaves only the token that a seed draws; notes what decided it.

    Attributes:
        close: Whether some choice was closer than floating point can be trusted with: such a case shows nothing.
        logprobs: Log probability of each chosen token, before temperature and filters.
    """

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self._params, self._seed, self._position = params, seed, 0
        self.close = False
        self.logprobs: list[float] = []

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits = scores.float()
        if self._params.greedy:
            best = torch.topk(logits[0], 2)
            self.close = self.close or bool(best.values[0] - best.values[1] < _GREEDY_MARGIN)
            token = int(best.indices[0])
        else:
            keys = draw_keys(np.array([self._seed], np.uint64), np.array([self._position], np.uint64))
            tokens = []
            for scale in (1.0, 1.0 - 1e-4, 1.0 + 1e-4):  # more than other rounding does, also to the filters' borders
                tokens += draw(filtered_probs(logits * scale, [self._params]), keys)
            token = tokens[0]
            self.close = self.close or len(set(tokens)) > 1
        self.logprobs.append(float(torch.log_softmax(logits[0], dim=-1)[token]))
        self._position += 1
        chosen = torch.full_like(scores, float("-inf"))
        chosen[0, token] = 0.0
        return chosen


def cases() -> list[Case]:
    """Return the catalogue: computed, or as an earlier run kept it."""
    stamp = {"version": VERSION, "model": (MODEL / "model.safetensors").stat().st_size, "torch": torch.__version__}
    if KEPT.exists():
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return [Case(**item) for item in kept["cases"]]
    found = _compute()
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    part = KEPT.with_suffix(".part")
    part.write_text(json.dumps({"stamp": stamp, "cases": [asdict(case) for case in found]}), encoding="utf-8")
    part.replace(KEPT)
    return found


def _compute() -> list[Case]:
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-untyped-call]
    model.eval()
    tokenizer = Tokenizer.load(MODEL)
    found = []
    for number, prompt in enumerate(mixed_prompts(11, model.config.vocab_size, count=NUM_PROMPTS, longest=400)):
        for options in ({"temperature": 0.0}, {**SAMPLED[number % len(SAMPLED)], "seed": 1000 + number, "n": 3}):
            case = _answer(model, tokenizer, prompt, options)
            if case is not None:
                found.append(case)
    return found


@torch.inference_mode()
def _answer(model: Any, tokenizer: Tokenizer, prompt: list[int], options: dict[str, Any]) -> Case | None:
    params = SamplingParams(**options)
    tokens: list[list[int]] = []
    logprobs: list[float] = []
    ids = torch.tensor([prompt])
    for index in range(params.n):
        choice = _Choice(params, sequence_seed(params.seed or 0, index))
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            logits_processor=[choice],
        )
        if choice.close:
            return None
        tokens.append(output[0, len(prompt) :].tolist())
        logprobs = logprobs or choice.logprobs
    return Case(prompt, options, tokens, logprobs, tokenizer.decode(tokens[0]))


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
