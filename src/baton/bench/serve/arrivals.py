"""When requests are sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.bench.serve.options import ServeOptions
from baton.bench.serve.prompts import PlannedRequest


def arrival_times(
    options: ServeOptions, requests: Sequence[PlannedRequest], rate: float | None, draw: int
) -> list[float] | None:
    """Return when each request is sent, in seconds after the first; ``None``: each as soon as there is room.

    Args:
        options: What kind of arrival.
        requests: Those to send; a trace says itself when.
        rate: Requests per second.
        draw: Different draws have different random pauses.
    """
    kind = options.arrival_kind
    if kind == "trace":
        return [request.at_s for request in requests]
    if kind == "closed" or rate is None:
        return None
    count = len(requests)
    rng = np.random.default_rng([options.seed, 4, draw])
    if kind == "constant":
        pauses = np.full(count, 1.0 / rate)
    else:
        shape = options.burstiness if kind == "gamma" else 1.0
        pauses = rng.gamma(shape, 1.0 / (rate * shape), count)
    times = np.concatenate(([0.0], np.cumsum(pauses)[:-1]))
    if count > 1 and kind != "constant":
        # The same number of requests in the same time for every seed: few pauses would give another rate than asked.
        times *= (count - 1) / rate / times[-1]
    found: list[float] = times.tolist()
    return found
