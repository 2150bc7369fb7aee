"""What a simulation asks of a router. The router's own code answers (``baton_router.bench.planning``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.bench.core.traces import TraceRequest
from baton.types import Role


@dataclass(frozen=True, slots=True)
class Fleet:
    """What there is to choose from.

    Attributes:
        prefills: Prefill instances.
        decodes: Decode instances.
        kv_bytes_per_token: All layers.
        max_num_seqs: Sequences that an instance batches.
        policy: Name of the router's policy.
        threshold: ``--remote-prefill-threshold`` of the router; ``None``: the policy says who computes a prompt.
        seed: Of its choices.
    """

    prefills: int
    decodes: int
    kv_bytes_per_token: float
    max_num_seqs: int = 64
    policy: str = "match_minus_load"
    threshold: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        decode: Number of the decode instance.
        prefill: Number of the prefill instance; ``None``: the decode instance computes the prompt.
        threshold: Missing prompt tokens from which prefill is asked; ``None``: the decode instance's own threshold.
        ticket: The router's own note of it.
    """

    decode: int
    prefill: int | None
    threshold: int | None = None
    ticket: Any = None


@dataclass(frozen=True, slots=True)
class Served:
    """What instances say of a request with its first token, from which routers learn.

    Attributes:
        remote: Whether a prefill instance computed the prompt.
        computed: Prompt tokens computed.
        cached: Prompt tokens that the computing instance had.
        moved: Prompt tokens whose KV travelled.
        exposed_s: Seconds that this took after the computation.
        ttft_s: Since its arrival.
    """

    remote: bool
    computed: int
    cached: int
    moved: int
    exposed_s: float
    ttft_s: float


class Routing(Protocol):
    """A router on virtual time."""

    def place(self, request: TraceRequest) -> Route | None:
        """Choose instances and reserve a share of them; ``None``: none has room."""

    def changed(self, role: Role, number: int, new: Sequence[int], gone: Sequence[int]) -> None:
        """An instance's prefix cache has changed: names of blocks of 512 tokens."""

    def first_token(self, route: Route, served: Served) -> None:
        """A request has its first token."""

    def finished(self, route: Route, tokens: int) -> None:
        """A request has ended, with so many tokens."""


MakeRouting = Callable[[Fleet, Callable[[], float]], Routing]
"""Makes a router for a fleet; the second argument returns the virtual time in seconds."""
