"""Training of what drafts for the demo model: it learns that model's probabilities, over training text and answers."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from .batches import Dataset, RowSource
from .drafts import Draft, Read, read
from .evaluation import held_out_rows
from .tokenizer import IntArray
from .training import learning_rate, make_optimizer

LOGGER = logging.getLogger(__name__)
GO_FURTHER = 0.6
"""Probability that a step trains one place more: place i counts ``GO_FURTHER ** i``, at that share of its cost."""
OWN_FRACTION = 0.5
"""Share of the training rows that are the demo model's own answers."""
LOG_EVERY, MEASURE_EVERY = 20, 100
HELD_OUT_ROWS, HELD_OUT_CONTEXT = 16, 256


@dataclass(frozen=True)
class Plan:
    """How it is trained.

    Attributes:
        minutes: Of processor time per thread, so that a busy machine trains as much as an idle one.
        rows: Per step.
        context: Tokens of a row.
        rate: The highest learning rate.
        vocabulary: Tokens that it drafts.
        own: Rows of the demo model's own answers.
    """

    minutes: float
    threads: int
    rows: int
    context: int
    rate: float
    warmup: int
    seed: int
    vocabulary: int
    own: int


@dataclass
class Progress:
    """How far training is.

    Attributes:
        seconds: Spent on steps.
        log: Lines for the log.
    """

    step: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


def frequent_tokens(dataset: Dataset, size: int, count: int) -> tuple[torch.Tensor, float]:
    """Return the ``count`` most frequent tokens, rising, and their share of the training text."""
    counts = np.bincount(np.concatenate([*dataset.train_documents, *dataset.train_chats]), minlength=size)
    found = np.sort(np.argsort(-counts, kind="stable")[:count])
    return torch.from_numpy(found), float(counts[found].sum() / counts.sum())


def losses(draft: Draft, known: Read, places: int) -> list[torch.Tensor]:
    """Return the cross-entropy of each place with the demo model's probabilities, in nats."""
    found = []
    for said in draft(known, places):
        wanted = known.wanted[:, -said.shape[1] :]
        found.append(-(wanted * functional.log_softmax(said, -1)).sum(-1).mean())
    return found


@torch.no_grad()
def right_at_places(draft: Draft, target: Any, drafted: torch.Tensor, rows: IntArray) -> list[float]:
    """Return how often each place's likeliest token is the demo model's, over held-out rows [R, T].

    The tokens before are the text's: it is the share that is right given that all before it were.
    """
    right, count = [0] * draft.places, [0] * draft.places
    for row in torch.from_numpy(rows).split(4):
        known = read(target, row, drafted)
        for place, said in enumerate(draft(known, draft.places)):
            right[place] += int((said.argmax(-1) == known.right[:, -said.shape[1] :]).sum())
            count[place] += said[..., 0].numel()
    return [round(a / b, 4) for a, b in zip(right, count, strict=True)]


def held_out(dataset: Dataset, seed: int) -> IntArray:
    """Return rows of held-out modules."""
    rows = held_out_rows(dataset, HELD_OUT_CONTEXT)[:-1, :-1]  # the last one is padded
    return rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:HELD_OUT_ROWS])]


def train(
    draft: Draft,
    target: Any,
    drafted: torch.Tensor,
    dataset: Dataset,
    own: torch.Tensor,
    plan: Plan,
    state: Path,
    stopped: Callable[[], bool],
) -> Progress | None:
    """Train in place until the minutes are spent.

    Args:
        draft: What is trained.
        target: The demo model, which is not.
        drafted: The draft's tokens.
        dataset: The text.
        own: Rows of the demo model's own answers, int64 [n, context].
        plan: How.
        state: File in which a run that is stopped is kept; if it is there, training goes on from it.
        stopped: Whether to stop now.

    Returns:
        How it went; ``None``: it was stopped, and is kept.
    """
    progress = Progress()
    optimizer = make_optimizer(draft, plan.rate)
    if state.exists():
        kept = torch.load(state, weights_only=True)
        if kept["plan"] != dataclasses.asdict(plan):
            raise SystemExit(f"{state} is of a run with other settings, {kept['plan']}: remove it to begin anew")
        draft.load_state_dict(kept["draft"])
        optimizer.load_state_dict(kept["optimizer"])
        progress = Progress(**kept["progress"])
        LOGGER.info("going on from step %d, %.1f min", progress.step, progress.seconds / 60)
    rows, recent = held_out(dataset, plan.seed), list[list[float]]()
    batches = itertools.islice(_batches(dataset, plan, own), progress.step, None)
    while (spent := progress.seconds / (60 * plan.minutes)) < 1.0:
        if stopped():
            saved = {"draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"plan": dataclasses.asdict(plan), "progress": dataclasses.asdict(progress)}
            torch.save(saved, state)
            LOGGER.info("stopped at step %d; the run is kept in %s", progress.step, state)
            return None
        tokens, drawn = next(batches)
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * learning_rate(progress.step, plan.warmup, spent)
        found = losses(draft, read(target, tokens, drafted), min(drawn, draft.places))
        torch.autograd.backward(torch.stack(found).sum())
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        draft.zero_grad()
        progress.seconds += (time.process_time() - began) / plan.threads
        progress.step += 1
        recent.append([float(each.detach()) for each in found])
        last = progress.seconds >= 60 * plan.minutes
        if progress.step % LOG_EVERY == 0 or last:
            line: dict[str, Any] = {"step": progress.step, "minutes": round(progress.seconds / 60, 2)}
            line["loss"] = _means(recent)
            if progress.step % MEASURE_EVERY == 0 or last:
                line["held_out_right"] = right_at_places(draft, target, drafted, rows)
            LOGGER.info("%s", line)
            progress.log.append(line)
            recent.clear()
    state.unlink(missing_ok=True)
    return progress


def _batches(dataset: Dataset, plan: Plan, own: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield rows of tokens, and how many places are trained on them; the same whenever a run is resumed."""
    source, draws = RowSource(dataset, plan.seed), random.Random(plan.seed)
    while True:
        places = 1
        while draws.random() < GO_FURTHER:
            places += 1
        rows, _ = source.batch(plan.rows, plan.context)
        for at in range(plan.rows):
            if len(own) and draws.random() < OWN_FRACTION:
                rows[at] = own[draws.randrange(len(own))]
        yield rows, places


def _means(recent: list[list[float]]) -> list[float]:
    """Return the mean loss of each place, over the steps that trained it."""
    columns = itertools.zip_longest(*recent)
    return [round(float(np.mean([x for x in column if x is not None])), 3) for column in columns]
