"""Several sequences of one prompt (``n`` > 1).

Sequence 0 goes first and computes the prompt; when it has its first token the others are queued. They find the prompt's
full blocks in the prefix cache and compute only its tail, which gives each its own first token (without a prefix cache
they compute the prompt again). Each has a seed of its own, see :func:`baton.seeds.sequence_seed`.
"""

from __future__ import annotations

from baton.engine.sequence import RequestGroup, Sequence


def spawn_siblings(group: RequestGroup) -> list[Sequence]:
    """Create the sequences of a request that do not exist yet, and return them."""
    siblings = [Sequence(group, index) for index in range(len(group.sequences), group.sampling.n)]
    group.sequences.extend(siblings)
    return siblings
