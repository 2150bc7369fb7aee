"""A stand-in for a model that knows what its grammar wants: a document's next token raised in any logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from baton.engine.sampler import SamplerOutput
from baton.engine.sampler_row import SamplerRow
from baton.engine.speculation import verification

RAISED = 30.0
ABOVE = 60.0
"""Logits of a document's next token, and of the one that is wanted in its place. Random models' are about 1."""


@contextmanager
def following(documents: Mapping[int, Sequence[int]], wrong: float, never: int) -> Iterator[None]:
    """Have each row of all engines choose the tokens of a document.

    Args:
        documents: Token ids, by the seed of the request modulo their number.
        wrong: Share of tokens at which the model wants another one, which no grammar allows. A guided row is refused it
            and goes on with the document's.
        never: That token.
    """
    choose = verification.sample

    def raised(logits: torch.Tensor, rows: Sequence[SamplerRow], *args: Any, **options: Any) -> SamplerOutput:
        for at, row in enumerate(rows):
            seed = row.params.seed or 0
            document = documents[seed % len(documents)]
            if row.position < len(document):
                logits[at, document[row.position]] = RAISED
            if wrong and np.random.default_rng((seed, row.position)).random() < wrong:
                logits[at, never] = ABOVE
        return choose(logits, rows, *args, **options)

    verification.sample = raised
    try:
        yield
    finally:
        verification.sample = choose
