"""From logits to tokens, for a whole batch at once, each row with its own parameters.

Order of operations (that of Hugging Face's logits processors): logit bias, banned stop tokens before ``min_tokens``,
repetition, frequency and presence penalty; here log probabilities are taken; then temperature, top-k, top-p, min-p.
Tokens equal to the last one kept are kept too. From what is left a token is drawn by inverse CDF over token ids with
the stateless uniform of :mod:`baton.engine.rng`, in float32 with a float64 sum: the draw depends on the row alone, not
on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.logprobs import token_logprobs
from baton.engine.penalties import LogitEdits, TokenCounts, apply_edits, count_tokens
from baton.engine.rng import uniforms
from baton.types import SamplingParams, TokenLogprob


class SamplerRow:
    """What the sampler knows of one sequence.

    Attributes:
        params: Its parameters.
        seed: Seed of this sequence.
        position: Output tokens so far, resumed ones included.
    """

    __slots__ = ("counts", "edits", "params", "position", "seed", "simple")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        stop_ids: Sequence[int],
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> None:
        """Prepare a row.

        Args:
            params: Sampling parameters.
            seed: Seed of this sequence.
            stop_ids: Tokens that end it: banned before ``min_tokens``.
            prompt: Prompt tokens.
            output: Tokens generated before.
        """
        self.params = params
        self.seed = seed
        self.position = len(output)
        self.edits = LogitEdits(params, stop_ids) if LogitEdits.needed(params) else None
        self.counts: TokenCounts | None = None
        if LogitEdits.counted(params):
            self.counts = count_tokens(params, prompt, output)
        self.simple = params.greedy and self.edits is None and params.logprobs is None

    def append(self, token: int) -> None:
        """Take note of the sequence's next token."""
        self.position += 1
        if self.counts is not None:
            self.counts.add(token)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row.

    Attributes:
        token_ids: The tokens; meaningless for bad rows.
        logprobs: Per row, ``None`` where not asked for; ``None`` if no row asked.
        bad_rows: Rows whose logits held NaN or infinities.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    bad_rows: tuple[int, ...] = ()


class Sampler:
    """Chooses tokens; holds no state."""

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> SamplerOutput:
        """Choose one token per row.

        Args:
            logits: [R, vocab] in any float dtype, on any device; may be changed.
            rows: R rows.
        """
        logits = logits.detach().float()
        if all(row.simple for row in rows):
            tokens, bad = _argmax(logits)
            return SamplerOutput(tokens, bad_rows=bad)
        edited = [(i, row.edits, row.counts, row.position) for i, row in enumerate(rows) if row.edits is not None]
        if edited:
            apply_edits(logits, edited)
        tokens, bad = _argmax(logits)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy and i not in bad]
        if drawn:
            subset = logits if len(drawn) == len(rows) else logits[drawn]
            for i, token in zip(drawn, _draw(subset, [rows[i] for i in drawn]), strict=True):
                tokens[i] = token
        return SamplerOutput(tokens, _logprobs(logits, rows, tokens), bad)


def _argmax(logits: torch.Tensor) -> tuple[list[int], tuple[int, ...]]:
    """Return the first most probable token per row, and the rows whose greatest logit isn't finite."""
    if logits.device.type == "cpu":
        # NumPy's float32 argmax is vectorised, PyTorch's is not: 0.2 ms against 1.5 ms for [32, 32000].
        array = logits.numpy()
        best = array.argmax(axis=-1)
        finite = np.isfinite(array[np.arange(len(best)), best])
        tokens: list[int] = best.tolist()
    else:
        top = logits.max(dim=-1)
        finite = top.values.isfinite().cpu().numpy()
        tokens = top.indices.tolist()
    return tokens, () if finite.all() else tuple(np.flatnonzero(~finite).tolist())


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplerRow], tokens: list[int]) -> list[TokenLogprob | None] | None:
    wanted = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    index = [i for i, _ in wanted]
    subset = logits if len(index) == len(rows) else logits[index]
    found: list[TokenLogprob | None] = [None] * len(rows)
    for i, one in zip(index, token_logprobs(subset, [tokens[i] for i in index], [n for _, n in wanted]), strict=True):
        found[i] = one
    return found


def _draw(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """Draw one token per row [R, vocab] by inverse CDF over the filtered distribution."""
    device = logits.device
    probs = filtered_probs(logits, [row.params for row in rows])
    seeds = np.array([row.seed for row in rows], np.uint64)
    positions = np.array([row.position for row in rows], np.uint64)
    uniform = torch.from_numpy(uniforms(seeds, positions)).to(device)
    cdf = probs.double().cumsum(dim=-1)
    # right=True: the first token whose CDF is above the target, so never one of probability 0.
    target = (uniform * cdf[:, -1])[:, None]
    drawn = torch.searchsorted(cdf, target, right=True)[:, 0]
    tokens: list[int] = drawn.clamp_(max=logits.shape[-1] - 1).tolist()
    return tokens


def filtered_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return probabilities after temperature, top-k, top-p and min-p; what is filtered out is 0, the rest not rescaled.

    Args:
        logits: float32 [R, vocab].
        params: R parameters; rows must not be greedy by temperature 0.
    """
    device, vocab = logits.device, logits.shape[-1]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    logits = logits / temperature[:, None]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    rows = [i for i, k in enumerate(top_k) if k < vocab]
    if rows:
        logits[rows] = _keep_top_k(logits[rows], [top_k[i] for i in rows])
    probs = torch.softmax(logits, dim=-1)
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        probs[rows] = _keep_top_p(probs[rows], [params[i].top_p for i in rows])
    if any(p.min_p > 0.0 for p in params):
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        limit = probs.amax(dim=-1, keepdim=True) * min_p[:, None]
        probs = probs.masked_fill_(probs < limit, 0.0)
    return probs


def _keep_top_k(logits: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    values = torch.topk(logits, max(top_k), dim=-1).values
    last = torch.tensor(top_k, device=logits.device)[:, None] - 1
    return logits.masked_fill(logits < values.gather(1, last), float("-inf"))


def _keep_top_p(probs: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Keep the fewest most probable tokens whose sum reaches top_p (the token that crosses it included)."""
    limits = torch.tensor(top_p, dtype=torch.float64, device=probs.device)[:, None]
    descending = _descending(probs)
    before = descending.double().cumsum(dim=-1) - descending
    kept = (before < limits).sum(dim=-1, keepdim=True).clamp_(min=1)
    return probs.masked_fill(probs < descending.gather(1, kept - 1), 0.0)


def _descending(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        # NumPy sorts float32 with vector instructions: 6 ms against 100 ms for [32, 32000].
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return torch.sort(values, dim=-1, descending=True).values
