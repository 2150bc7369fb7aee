"""What a decode step takes by the size of its batch, learnt from looks: which part of it fewer instances would stretch.

A step reads the weights once, whatever the batch, and the KV of each sequence: ``a + b * batch``. With one instance
fewer the others' batches grow, and the second part with them.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 900
_LEAST_SAMPLES = 20
_LEAST_SPREAD = 1.0
"""Standard deviation of the batches, in sequences, below which a slope would be noise."""


class StepTime:
    """Fits a line to looks, by least squares."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def see(self, batch: float, itl_ms: float) -> None:
        """Take a look: sequences per instance, and milliseconds between tokens."""
        self._seen.append((batch, itl_ms))

    def growing_share(self, batch: float, itl_ms: float) -> float:
        """Return the part of a step's time that grows with its batch, from 0 to 1.

        Args:
            batch: Sequences per instance now.
            itl_ms: Milliseconds between tokens now.

        Returns:
            ``b * batch / itl_ms``; 1, the most careful guess, while too little was seen, or always the same.
        """
        count = len(self._seen)
        if count < _LEAST_SAMPLES or itl_ms <= 0:
            return 1.0
        mean_batch = sum(x for x, _ in self._seen) / count
        mean_itl = sum(y for _, y in self._seen) / count
        spread = sum((x - mean_batch) ** 2 for x, _ in self._seen) / count
        if spread < _LEAST_SPREAD**2:
            return 1.0
        slope = sum((x - mean_batch) * (y - mean_itl) for x, y in self._seen) / count / spread
        return min(1.0, max(0.0, slope * batch / itl_ms))
