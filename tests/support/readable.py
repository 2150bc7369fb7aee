"""Whether descriptors can be read, whatever their numbers: ``select`` takes none above 1023, a long run has such."""

from __future__ import annotations

import select


def readable(*descriptors: int, timeout_s: float | None = None) -> list[int]:
    """Return those of some descriptors that can be read, or are at their end; waits for the first one.

    Args:
        descriptors: Of pipes and sockets.
        timeout_s: The longest wait; ``None``: there is none.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1e3 * timeout_s)]
