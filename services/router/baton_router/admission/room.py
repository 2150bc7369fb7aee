"""How much room the cluster has, as far as the router knows.

A decode instance has room up to its slots, unless it says that requests wait there already (it is out of KV blocks, or
others send it work). Prompts have room up to a second of work per prefill instance, or per decode instance where there
is no prefill instance; as long as that is not known, without bound. So the workers' own queues are short, but never
empty while requests wait here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from baton.types import Role
from baton_router.registry.instance import Instance
from baton_router.registry.load import NO_LIMIT
from baton_router.scheduler.speeds import Speeds

_FRESH_S = 0.01
_AGAIN_S = 0.001
"""How long a look at all instances is good for, while there is room and while there is none. It costs as much as a
placement; what starts and ends in between is counted here."""
_QUEUE_MS = 1000.0
_LEAST_TOKENS = 4096.0
"""Two of the steps that an engine makes by default: less could leave it idle between two of them."""
_SLACK = 8
"""A decode instance gets an eighth more than it can batch, so that another is there when a sequence ends."""


class Ready(Protocol):
    """Where instances come from; the registry is one."""

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role that take new requests."""


class Room:
    """Counts the sequences and prompt tokens that may start now.

    Args:
        fleet: The instances.
        speeds: How fast they compute prompts.
        slots: Sequences per decode instance; 0: any number; ``None``: what it can batch, and an eighth more.
        prompt_tokens: Prompt tokens per prefill instance; 0: any number; ``None``: a second of work.
        now: Monotonic clock, in seconds.

    Attributes:
        num_decodes: Decode instances that were ready at the latest look.
    """

    def __init__(
        self, fleet: Ready, speeds: Speeds, slots: int | None, prompt_tokens: int | None, now: Callable[[], float]
    ) -> None:
        self._fleet, self._speeds, self._now = fleet, speeds, now
        self._slots, self._prompt_tokens = slots, prompt_tokens
        self._sequences = self._tokens = 0.0
        self._due_sequences = self._due_tokens = 0
        self._at = -math.inf
        self.num_decodes = 0

    def is_free(self) -> bool:
        """Whether a request could start; looks at the instances if that was not done just now."""
        now = self._now()
        age = now - self._at
        if age > _FRESH_S or (age > _AGAIN_S and (self._sequences <= 0 or self._tokens <= 0)):
            self._look(now)
        return self._sequences > 0 and self._tokens > 0

    def take(self, sequences: int, tokens: int) -> bool:
        """Take room for a request that is placed at once; ``False``: there is none.

        One that needs more than there is gets it if there is any: else it might never.
        """
        if not self.is_free():
            return False
        self._sequences -= sequences
        self._tokens -= tokens
        return True

    def give_back(self, sequences: int, tokens: int) -> None:
        """Sequences have ended, or a prompt was computed."""
        self._sequences += sequences
        self._tokens += tokens

    def promise(self, sequences: int, tokens: int) -> None:
        """Keep room for a request that was told to start, but has no place yet: no instance's books know of it."""
        self._due_sequences += sequences
        self._due_tokens += tokens
        self._sequences -= sequences
        self._tokens -= tokens

    def kept(self, sequences: int, tokens: int) -> None:
        """Such a request is being placed now, or has gone."""
        self._due_sequences -= sequences
        self._due_tokens -= tokens

    def _look(self, now: float) -> None:
        decodes = self._fleet.ready(Role.DECODE)
        self.num_decodes = len(decodes)
        self._at = now
        self._sequences = sum(self._free_slots(x) for x in decodes) - self._due_sequences
        self._tokens = self._free_tokens(decodes) - self._due_tokens

    def _free_slots(self, instance: Instance) -> float:
        book, info = instance.load, instance.info
        slots = self._slots
        if slots is None:
            batch = info.max_num_seqs if info is not None else 0
            slots = batch + max(1, batch // _SLACK) if batch else 0
        if not slots:
            return max(0, book.limit - book.requests) if book.limit < NO_LIMIT else math.inf
        if book.report.num_waiting - book.ended > max(1, slots // _SLACK):
            return 0
        return max(0, min(slots - book.shared_requests, book.limit) - book.requests)

    def _free_tokens(self, decodes: list[Instance]) -> float:
        if self._prompt_tokens == 0:
            return math.inf
        prefills = self._fleet.ready(Role.PREFILL)
        if prefills:
            work = [x.load.work for x in prefills]
            fits = self._speeds.prefill.known([x.instance_id for x in prefills])
        else:
            work = [float(x.load.prompts_waiting) for x in decodes]
            fits = self._speeds.local.known([x.instance_id for x in decodes])
        if self._prompt_tokens is not None:
            limits = [float(self._prompt_tokens)] * len(work)
        else:
            slopes = [fit.slope if fit is not None else 0.0 for fit in fits]
            limits = [max(_LEAST_TOKENS, _QUEUE_MS / slope) if slope > 0 else math.inf for slope in slopes]
        return sum(max(0.0, limit - busy) for limit, busy in zip(limits, work, strict=True))
