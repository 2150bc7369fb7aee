"""From logits to tokens, for a whole batch at once, each row with its own parameters.

Order of operations (that of Hugging Face's logits processors): logit bias, banned stop tokens before ``min_tokens``,
repetition, frequency and presence penalty, the row's mask; here log probabilities are taken; then temperature,
top-k, top-p, min-p (mask, filters and draw by an operator, ``baton_kernels.sampling``: here is its definition).
From what is left a token is drawn as the winner of an exponential race: token ``t`` arrives at ``E_t / p_t``, each
``E_t`` exponentially distributed with mean 1, and the first one wins (the Gumbel-max trick: Gumbel, 1954; Maddison,
Tarlow and Minka, "A* Sampling", 2014). Rounding changes the winner only where the first two arrive
within a rounding error of each other: once in some 10^6 draws in float32, whatever the vocabulary. By inverse CDF every
token has a border to be missed by, and 3 of 4000 draws from a vocabulary of 4096 changed with the batch.

The random numbers have no state: they depend on seed, output position and token alone. So a sequence that is
preempted, handed over or moved to another instance goes on with the numbers it would have had, and nothing but the seed
has to travel; the draw depends on the row alone, not on the rows beside it. They are ``baton_kernels.random_numbers``
of the key ``mix(seed + (position + 1) * GOLDEN)``.

A row under a mask and without filters draws from all tokens first. The token is its, if the mask has it; else it draws
again, from what the mask has, with other random numbers. A token ``t`` that the mask has comes with probability
``p_t + (1 - Z) p_t / Z = p_t / Z`` then, ``Z`` being the sum over the mask: as it would from one draw under it. But to
know that a grammar takes one token costs less than its mask, and a model that knows what it writes is seldom refused
(opportunistic masking: Beurer-Kellner, Fischer and Vechev, "Guiding LLMs The Right Way", ICML 2024).
So where masks cannot be computed beside the forward pass they are computed after it, for rows that were refused.
Which tokens filters keep depends on the mask; there the one draw's token is right if all that they keep without the
mask are allowed, and no mask could have them keep others (``baton_kernels.sampling`` says so of few tokens).
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from baton.config import EngineConfig
from baton.engine.grammar.constraint import StepMasks
from baton.engine.sampler_row import LEAST_TEMPERATURE, SamplerRow, apply_edits, mask_rows
from baton.types import SamplingParams, TokenLogprob
from baton_kernels.cpu import OperatorsMissingError, load_library, runnable_variants
from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary, ThreadTeam
from baton_kernels.random_numbers import Draws, exponentials
from baton_kernels.sampling import MOST_KEPT, CpuSampler, Watch
from baton_kernels.token_mask import CpuTokenMask, TokenMask, Upload, has_token, mask_tokens


def filtered_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return probabilities; what is filtered out is 0, the rest is not rescaled.

    Args:
        logits: float32 [R, vocab], not changed.
        params: R parameters with temperatures above 0.
    """
    if any(p.temperature != 1.0 for p in params):
        # From the maximum down: a temperature next to 0 gives 0 and -inf, not inf.
        temperature = [max(p.temperature, LEAST_TEMPERATURE) for p in params]
        scale = torch.tensor(temperature, dtype=torch.float32, device=logits.device)[:, None]
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(scale)
    if all(p.top_k <= 0 and p.top_p >= 1.0 and p.min_p <= 0.0 for p in params):
        return torch.softmax(logits, dim=-1)
    return filter_batch(logits, params)


def filter_batch(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Filter scaled logits [R, vocab] and return probabilities, with sorts over whole rows."""
    device = logits.device
    vocab = logits.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    rows = [i for i, k in enumerate(top_k) if k < vocab]
    if rows:
        values = torch.topk(logits[rows], max(top_k[i] for i in rows), dim=-1).values
        last = torch.tensor([top_k[i] - 1 for i in rows], device=device)[:, None]
        logits = logits.clone()
        logits[rows] = logits[rows].masked_fill(logits[rows] < values.gather(1, last), float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        limits = torch.tensor([params[i].top_p for i in rows], dtype=torch.float64, device=device)[:, None]
        descending = torch.sort(probs[rows], dim=-1, descending=True).values
        before = descending.double().cumsum(dim=-1) - descending
        kept = (before < limits).sum(dim=-1, keepdim=True).clamp_(min=1)
        probs[rows] = probs[rows].masked_fill(probs[rows] < descending.gather(1, kept - 1), 0.0)
    if any(p.min_p > 0.0 for p in params):
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        probs.masked_fill_(probs < probs.amax(dim=-1, keepdim=True) * min_p[:, None], 0.0)
    return probs


ChooseOnDevice = Callable[..., torch.Tensor]
"""As :class:`baton_kernels.gpu.sampling.TritonSampler` is called."""


_log = logging.getLogger(__name__)


@functools.cache
def _library() -> CpuLibrary | None:
    variants = runnable_variants()
    if not variants:
        return None
    try:
        return load_library(variants[0])
    except OperatorsMissingError as error:
        _log.warning("tokens are sampled in torch, several times slower: %s", error)
        return None


@functools.cache
def cpu_sampler() -> CpuSampler | None:
    """Return the operator of this processor that samples, or ``None`` where it was not built."""
    library = _library()
    return None if library is None else CpuSampler(library)


@functools.cache
def gpu_sampler(device: torch.device) -> ChooseOnDevice | None:
    """Return the operator of a GPU that samples, or ``None`` without Triton. Its tokens are on the device."""
    try:
        from baton_kernels.gpu.sampling import TritonSampler
    except ImportError as error:
        _log.warning("tokens are sampled in torch, several times slower: %s", error)
        return None
    return TritonSampler(device)


def token_sampler(device: torch.device, *, on_gpu: bool = False) -> CpuSampler | ChooseOnDevice | None:
    """Return the operator that samples where logits are, or ``None``.

    Args:
        device: Device of the logits.
        on_gpu: Whether it is to be that of a GPU, which Triton's interpreter runs where logits are on a CPU.
    """
    return gpu_sampler(device) if on_gpu or device.type != "cpu" else cpu_sampler()


@functools.cache
def cpu_token_mask() -> CpuTokenMask | None:
    """Return the operator of this processor that masks logits, or ``None`` where it was not built."""
    library = _library()
    return None if library is None else CpuTokenMask(library)


def crowded_team(config: EngineConfig) -> ThreadTeam | None:
    """Return the threads of forward passes, if these leave no processor to another thread; ``None``: they do."""
    used = config.threads * config.tp * config.pp
    if not config.device.startswith("cpu") or used < len(os.sched_getaffinity(0)) or _library() is None:
        return None
    return ThreadTeam(config.threads)


SAMPLER_VERSION = "race-2"
"""Changes whenever another token may be drawn from the same logits with the same seed."""
CHUNK = 128
"""Tokens of a race's first round."""
_ROWS_AT_ONCE = 64
"""Rows of one pass of log probabilities: bounds the float32 copies."""

TOKENS = np.uint64(1 << 32)
"""Numbers of a draw from here on are tokens', those before chunks'."""


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


Amend: TypeAlias = Callable[[torch.Tensor, list[int], tuple[int, ...]], None]
"""Called with the logits that tokens were chosen from (edited and masked), the tokens, which it may change, and the
rows whose logits are not finite."""


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    rows: Sequence[SamplerRow],
    amend: Amend | None = None,
    *,
    on_gpu: bool = False,
    late: StepMasks | None = None,
) -> SamplerOutput:
    """Choose one token per row.

    Args:
        logits: [R, vocab] in any float dtype, on any device; may be changed.
        rows: R rows.
        amend: May change the chosen tokens before log probabilities are taken.
        on_gpu: Whether the operator of a GPU chooses, wherever the logits are.
        late: Computes masks of rows under a grammar that have none yet; default: these rows may get any token.
    """
    operator = token_sampler(logits.device, on_gpu=on_gpu)
    logits = edit_logits(logits.detach(), rows)
    choice = _Choice(operator, logits, rows, row_draws(rows))
    waiting = [] if late is None else [i for i, row in enumerate(rows) if row.constraint and row.mask is None]
    draws_first = [i for i, row in enumerate(rows) if row.mask is not None and row.unfiltered]
    tokens = choice.choose_before_masks(waiting, late) if late is not None and waiting else choice.choose()
    choice.choose_again([i for i in draws_first if tokens[i] < 0 or not _allows(rows[i], tokens[i])], tokens)
    masked = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if shown := [(i, mask) for i, mask in masked if amend is not None or rows[i].params.logprobs is not None]:
        apply_masks(logits, shown)
    bad = tuple(i for i, token in enumerate(tokens) if token < 0)
    if amend is not None:
        amend(logits, tokens, bad)
    return SamplerOutput(tokens, _logprobs(logits, rows, tokens, bad), bad)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of a token per row.

    Attributes:
        operator: Operator that chooses; ``None``: torch does.
        logits: [R, vocab], edited.
        rows: R rows.
        draws: Draws of the R rows.
    """

    operator: CpuSampler | ChooseOnDevice | None
    logits: torch.Tensor
    rows: Sequence[SamplerRow]
    draws: Draws

    def choose(
        self,
        places: Sequence[int] | None = None,
        *,
        kept: npt.NDArray[np.int64] | None = None,
        watch: Watch | None = None,
    ) -> list[int]:
        """Return a token per row, -1 where the logits that may be chosen are not finite.

        Args:
            places: Indices of rows whose first tokens their masks refused: all masks hold, and rows that drew without
                them do so a second time. Default: all rows, those without filters as if they had no masks.
            kept: Where the tokens may be written that filters leave; -1 everywhere.
            watch: Called with tokens as soon as they are chosen.
        """
        again = places is not None
        logits = self.logits
        rows = self.rows if places is None else [self.rows[i] for i in places]
        filters = [row.filter for row in rows]
        masks = [row.mask if again or not row.unfiltered else None for row in rows]
        if isinstance(self.operator, CpuSampler):
            return self.operator(logits, filters, self.draws, masks, at=places, again=again, kept=kept, watch=watch)
        keys = self.draws.keys(places, [again and row.unfiltered for row in rows])
        if places is not None:
            logits = logits[torch.tensor(places, device=logits.device)]
        if self.operator is None:
            tokens: list[int] = _choose_in_torch(logits, rows, keys, masks).tolist()
        else:
            tokens = self.operator(logits, filters, keys, masks).tolist()
        if watch is not None:
            watch.ready(0, len(watch.rows), tokens)
        return tokens

    def choose_again(self, places: Sequence[int], tokens: MutableSequence[int] | dict[int, int]) -> None:
        """Choose tokens under masks, of the rows at ``places``, which were not to have what was chosen without."""
        if places:
            for i, token in zip(places, self.choose(places), strict=True):
                tokens[i] = token

    def choose_before_masks(self, waiting: Sequence[int], late: StepMasks) -> list[int]:
        """Choose a token per row, again where a grammar refuses it; ``waiting``: the rows whose grammars are asked.

        Those come first: their grammars are asked, and masks computed, while the others' tokens are chosen.
        """
        rows = self.rows
        filtered = any(not (rows[i].unfiltered or rows[i].params.greedy) for i in waiting)
        kept = np.full((len(rows), MOST_KEPT), -1, np.int64) if filtered else None
        again: dict[int, int] = {}

        def ready(begin: int, end: int, tokens: Sequence[int]) -> None:
            places = waiting[begin:end]
            own = mask_rows(rows[i] for i in places)
            refused = late.refused(own, [_tokens_to_allow(rows[i], tokens[i], kept, i) for i in places])
            if refused:
                for at, mask in zip(refused, late.late([own[at] for at in refused]), strict=True):
                    rows[places[at]].mask = mask
                self.choose_again([places[at] for at in refused], again)

        tokens = self.choose(kept=kept, watch=Watch(ready, waiting))
        for i, token in again.items():
            tokens[i] = token
        return tokens


def _tokens_to_allow(row: SamplerRow, token: int, kept: npt.NDArray[np.int64] | None, at: int) -> list[int]:
    """Return the tokens that a mask has to allow for a token chosen without it to be right; that token comes last.

    Args:
        row: Row of the token.
        token: -1: there is none.
        kept: [R, MOST_KEPT], what the filters of the rows that have some left.
        at: Index of the row.
    """
    if token < 0:
        return []
    if kept is None or row.unfiltered or row.params.greedy:
        return [token]
    left = kept[at].tolist()
    return [] if left[0] < 0 else [*(each for each in left if each >= 0 and each != token), token]


def _allows(row: SamplerRow, token: int) -> bool:
    return row.mask is None or has_token(row.mask, token)


def _choose_in_torch(
    logits: torch.Tensor,
    rows: Sequence[SamplerRow],
    keys: npt.NDArray[np.uint64],
    masks: Sequence[TokenMask | None],
) -> npt.NDArray[np.int64]:
    """Return a token per row; arguments parallel to the logits [R, vocab]."""
    logits = logits.float()
    if any(mask is not None for mask in masks):
        logits = logits.clone()
        apply_masks(logits, [(i, mask) for i, mask in enumerate(masks) if mask is not None])
    chosen = _argmax(logits)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy and chosen[i] >= 0]
    if drawn:
        subset = logits if len(drawn) == len(rows) else logits[drawn]
        chosen[drawn] = draw(filtered_probs(subset, [rows[i].params for i in drawn]), keys[drawn])
    return chosen


def edit_logits(logits: torch.Tensor, rows: Sequence[SamplerRow], upload: Upload | None = None) -> torch.Tensor:
    """Change single logits as the rows want it; masks are still to be applied.

    Args:
        logits: [R, vocab]; may be changed.
        rows: R rows.
        upload: To the logits' device; default: copies that the host waits for.
    """
    edited = [(i, row.edits, row.counts, row.position) for i, row in enumerate(rows) if row.edits is not None]
    if edited:
        logits = logits.float()
        apply_edits(logits, edited, upload)
    return logits


def apply_masks(logits: torch.Tensor, rows: Sequence[tuple[int, TokenMask]]) -> None:
    """Forbid tokens in place: logits [R, vocab], and the rows that have a mask."""
    if logits.dtype in DTYPE_CODES and logits.device.type == "cpu" and logits.stride(1) == 1:
        operator = cpu_token_mask()
    else:
        operator = None
    (operator or mask_tokens)(logits, [row for row, _ in rows], [mask for _, mask in rows])


def _argmax(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the first most probable token per row, -1 where the greatest logit isn't finite."""
    tokens: npt.NDArray[np.int64]
    if logits.device.type == "cpu":
        # NumPy's float32 argmax is vectorised, PyTorch's is not: 0.2 ms against 1.5 ms for [32, 32000].
        array = logits.numpy()
        tokens = array.argmax(axis=-1)
        finite = np.isfinite(array[np.arange(len(tokens)), tokens])
    else:
        top = logits.max(dim=-1)
        finite = top.values.isfinite().cpu().numpy()
        tokens = top.indices.cpu().numpy()
    return np.where(finite, tokens, -1)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SamplerRow], tokens: list[int], bad: Sequence[int]
) -> list[TokenLogprob | None] | None:
    wanted = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    wanted = [(i, count) for i, count in wanted if i not in bad]
    index = [i for i, _ in wanted]
    subset = logits if len(index) == len(rows) else logits[index]
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    for i, one in zip(index, token_logprobs(subset, [tokens[i] for i in index], [n for _, n in wanted]), strict=True):
        logprobs[i] = one
    return logprobs


# Drawing


def row_draws(rows: Sequence[SamplerRow]) -> Draws:
    """Return the random draws for the rows' next tokens."""
    return Draws([row.seed for row in rows], [row.position for row in rows])


def draw(probs: torch.Tensor, keys: npt.NDArray[np.uint64]) -> list[int]:
    """Return the token per row that wins the race.

    In two races, of chunks and then of the tokens of the chunk that won, so that a row costs V / 128 + 128 random
    numbers instead of V. A token of probability 0 is never returned (unless all are).

    Args:
        probs: float32 [R, vocab], rows need not sum to 1.
        keys: uint64 [R], of :meth:`Draws.keys`.
    """
    count, vocab = probs.shape
    if vocab % CHUNK:
        probs = torch.nn.functional.pad(probs, (0, CHUNK - vocab % CHUNK))
    chunked = probs.view(count, -1, CHUNK)
    sums = chunked.sum(dim=-1).cpu().numpy()
    chunk = _race(sums, exponentials(keys, np.arange(sums.shape[1], dtype=np.uint64)))
    device = probs.device
    rows = np.arange(count)
    inside = chunked[torch.from_numpy(rows).to(device), torch.from_numpy(chunk).to(device)].cpu().numpy()
    ids = chunk[:, None] * CHUNK + np.arange(CHUNK)
    at = _race(inside, exponentials(keys, ids.astype(np.uint64) + TOKENS))
    tokens: list[int] = np.minimum(chunk * CHUNK + at, vocab - 1).tolist()
    return tokens


def _race(weights: npt.NDArray[np.float32], times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return per row which of its columns arrives first, at ``times / weights``; those of weight 0 never do."""
    arrivals = np.divide(times, weights, out=np.full(times.shape, np.inf), where=weights > 0)
    first: npt.NDArray[np.int64] = arrivals.argmin(axis=-1)
    return first


# Log probabilities


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return the log probability (natural log), rank (1: most probable) and alternatives of one token per row.

    Alternatives that a mask forbids are left out.

    Args:
        logits: [R, vocab], any float dtype; computed in float32.
        token_ids: R tokens.
        num_top: Number of alternatives of each row, at most ``MAX_LOGPROBS``.
    """
    logprobs: list[TokenLogprob] = []
    for at in range(0, len(token_ids), _ROWS_AT_ONCE):
        end = at + _ROWS_AT_ONCE
        logprobs += _token_logprobs(logits[at:end], token_ids[at:end], num_top[at:end])
    return logprobs


def _token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    figures = (part.cpu().numpy() for part in gather_logprobs(logits, ids, max(num_top)))
    return join_logprobs(token_ids, num_top, *figures)


LogprobTensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> LogprobTensors:
    """Return log probabilities of one token per row, on the device: the host does not wait.

    Args:
        logits: [R, vocab].
        token_ids: int64 [R].
        most: Largest number of alternatives of any row.

    Returns:
        Log probabilities [R] and ranks [R], ids and log probabilities [R, most] of the most probable tokens.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = torch.topk(logprobs, min(most, logprobs.shape[-1]), dim=-1)
    return chosen[:, 0], ranks, top.indices, top.values


def join_logprobs(
    token_ids: Sequence[int], num_top: Sequence[int], *figures: npt.NDArray[np.generic]
) -> list[TokenLogprob]:
    """Build the log probabilities of one token per row from the result of :func:`gather_logprobs`."""
    return [
        TokenLogprob(token, value, rank, tuple(one for one in zip(ids, values, strict=True) if one[1] > -math.inf)[:n])
        for token, n, value, rank, ids, values in zip(
            token_ids, num_top, *(part.tolist() for part in figures), strict=True
        )
    ]


class HostLink(Protocol):
    """Copies arrays to a device and back without blocking the host."""

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Return arrays as tensors on the device; they may be changed at once."""

    def download(self, *tensors: torch.Tensor) -> Callable[[], list[npt.NDArray[Any]]]:
        """Queue copies to the host; returns what waits for them."""


@dataclass(frozen=True, slots=True)
class QueuedSample:
    """One token per row, chosen as soon as the device gets there.

    Attributes:
        token_ids: int64 [R], where the logits are; of bad rows any number.
        read: Waits for the tokens.
    """

    token_ids: torch.Tensor
    read: Callable[[], SamplerOutput]


@torch.inference_mode()
def queue_sample(
    logits: torch.Tensor, rows: Sequence[SamplerRow], operator: ChooseOnDevice, link: HostLink
) -> QueuedSample:
    """Queue the choice of one token per row, as :func:`sample` makes it.

    Args:
        logits: [R, vocab] in any float dtype; may be changed. Not needed any more by what is queued later.
        rows: R rows.
        operator: Sampling operator of the device.
        link: Copies to and from the device.
    """
    logits = edit_logits(logits.detach(), rows, link.upload)
    draws = row_draws(rows)
    filters = [row.filter for row in rows]
    masks = [None if row.unfiltered else row.mask for row in rows]
    tokens = operator(logits, filters, draws.keys(), masks, upload=link.upload)
    again = [i for i, row in enumerate(rows) if row.mask is not None and row.unfiltered]
    shown = [i for i, row in enumerate(rows) if row.mask is not None and row.params.logprobs is not None]
    if forbidden := sorted({*again, *shown}):
        mask_tokens(logits, forbidden, [mask for i in forbidden if (mask := rows[i].mask) is not None], link.upload)
    if again:
        (at,) = link.upload(np.array(again, np.int64))
        masked = logits[at]
        first = tokens[at]
        keys = draws.keys(again, [True] * len(again))
        second = operator(masked, [filters[i] for i in again], keys, upload=link.upload)
        allowed = masked.gather(1, first.clamp(min=0)[:, None])[:, 0] > float("-inf")
        tokens[at] = torch.where((first >= 0) & allowed, first, second)
    scored = [(i, count) for i, row in enumerate(rows) if (count := row.params.logprobs) is not None]
    index = [i for i, _ in scored]
    num_top = [count for _, count in scored]
    figures: tuple[torch.Tensor, ...] = ()
    if scored:
        chosen = tokens.clamp(min=0)
        if len(index) < len(rows):
            (at,) = link.upload(np.array(index, np.int64))
            logits = logits[at]
            chosen = chosen[at]
        figures = gather_logprobs(logits, chosen, max(num_top))
    read = link.download(tokens, *figures)

    def finish() -> SamplerOutput:
        chosen_ids, *parts = read()
        bad = tuple(np.flatnonzero(chosen_ids < 0).tolist())
        token_ids: list[int] = chosen_ids.tolist()
        if not scored:
            return SamplerOutput(token_ids, None, bad)
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        for i, one in zip(index, join_logprobs([token_ids[i] for i in index], num_top, *parts), strict=True):
            logprobs[i] = None if i in bad else one
        return SamplerOutput(token_ids, logprobs, bad)

    return QueuedSample(tokens, finish)
