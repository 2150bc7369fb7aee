"""The answers that Hugging Face ``generate`` gives to the requests of ``workload.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.chaos.workload import MODEL, NEW_TOKENS, Case
from tests.support.equality import mixed_prompts
from transformers import AutoModelForCausalLM

from baton.engine.models.loader import quiet_transformers
from baton.engine.sampler import draw, filtered_probs
from baton.seeds import sequence_seed
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import SamplingParams
from baton_kernels.random_numbers import draw_keys

_NUM_PROMPTS = 24
_SAMPLED: tuple[dict[str, Any], ...] = ({"temperature": 0.9, "top_p": 0.95}, {"temperature": 1.2, "top_k": 40})
_GREEDY_MARGIN = 1e-3


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


def compute() -> list[Case]:
    """Compute the catalogue; ``workload.VERSION`` is its version."""
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-untyped-call]
    model.eval()
    tokenizer = Tokenizer.load(MODEL)
    found = []
    for number, prompt in enumerate(mixed_prompts(11, model.config.vocab_size, count=_NUM_PROMPTS, longest=400)):
        for options in ({"temperature": 0.0}, {**_SAMPLED[number % len(_SAMPLED)], "seed": 1000 + number, "n": 3}):
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
