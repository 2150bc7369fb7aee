"""A request in the router's queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.errors import BatonError
from baton_router.types import RoutedRequest


@dataclass(eq=False, slots=True)
class Waiting:
    """One request that waits.

    Attributes:
        request: What waits.
        number: Rises with every request: order of arrival.
        arrived: When it came.
        deadline: When its first token is due; infinite: nobody said.
        start_by: When it must start at the latest; afterwards it is refused.
        cost: What it counts in the queue's fairness: prompt tokens that nobody holds, and output tokens expected.
        future: Ends the wait: with ``None`` it may start, with an error it may not.
        queued: Whether it is in the queue.
        granted: Whether it was told to start.
    """

    request: RoutedRequest
    number: int
    arrived: float
    deadline: float
    start_by: float
    cost: float
    future: asyncio.Future[BatonError | None]
    queued: bool = False
    granted: bool = False

    @property
    def tokens(self) -> int:
        """Prompt tokens that it keeps in memory."""
        return len(self.request.prompt_token_ids)

    @property
    def order(self) -> tuple[float, int]:
        """Its place among those of its tenant: by deadline, then by arrival."""
        return self.deadline, self.number
