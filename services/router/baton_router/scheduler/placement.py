"""Requests to place, and their placements: a request's shares of its instances, from placement to its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from baton.api.v1 import common_pb2
from baton.hashing import HashChain
from baton.types import PrefillPath
from baton_router.indexer.prefix_index import PendingChain
from baton_router.registry.instance import Instance
from baton_router.registry.load import LoadReservation
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.speeds import ServedRequest, Speeds
from baton_router.types import RoutedRequest

_NEVER_REMOTE = 2**31 - 1
"""As threshold: above the length of any prompt, so decode never asks a prefill instance."""


class PlacementRequest(msgspec.Struct):
    """A request to place.

    Attributes:
        token_ids: Prompt, and output generated so far.
        cache_salt: Salt that separates tenants' caches.
        num_sequences: Number of sequences generated from this prompt.
        local_only: Whether no prefill instance may be used.
        exclude: Identities of decode instances that must not be used.
        session: Conversation that it belongs to; empty: unknown.
        max_tokens: Maximum number of tokens to generate; ``None``: unknown.
        expected_tokens: Tokens that each sequence is expected to generate yet; ``None``: unknown.
        prefill_only: Whether the decode instance will be chosen again when the prompt is computed: nothing is reserved
            there.
        prefilled: Address of the prefill instance that has computed the prompt already, and the KV match rate that it
            had before; ``None``: it is not computed.
        guided: Whether it has a grammar, so that only instances that accept grammars may be used.
    """

    token_ids: Sequence[int] | npt.NDArray[np.uint32]
    cache_salt: str = ""
    num_sequences: int = 1
    local_only: bool = False
    exclude: Collection[tuple[str, int]] = ()
    session: str = ""
    max_tokens: int | None = None
    expected_tokens: int | None = None
    prefill_only: bool = False
    prefilled: tuple[str, float] | None = None
    guided: bool = False

    @classmethod
    def of(cls, request: RoutedRequest) -> PlacementRequest:
        """Return the request to place for one that has just arrived."""
        sampling = request.sampling
        return cls(
            request.prompt_token_ids,
            request.cache_salt,
            sampling.n,
            local_only=sampling.prompt_logprobs is not None,
            session=request.session,
            max_tokens=sampling.max_tokens,
            expected_tokens=request.expected_tokens,
            guided=sampling.grammar is not None,
        )


@dataclass(eq=False, slots=True)
class Placement:
    """Where a request goes, and its reservations there until :meth:`release`.

    Attributes:
        decode: Decode instance.
        prefill: Prefill instances to ask, best first.
        decision: The decision behind it.
        threshold: ``--remote-prefill-threshold``: missing tokens from which decode asks a prefill instance.
        decode_reservation: Share of the decode instance's load.
        prefill_reservation: Share of the first prefill instance's load.
        decode_pending: Blocks that the decode instance is expected to hold.
        decode_chain: The prompt's blocks that it will hold, from the first token on; ``None``: it counts as holding
            them already, or nothing was reserved.
        prefill_pending: Blocks that the first prefill instance is expected to hold.
        ahead: Work in flight on the prefill instance before this request, in tokens.
        running: Sequences in flight on the decode instance, including this request's.
        speeds: Speeds that learn from the request when it ends; ``None``: they do not.
        trace: Latest trace from the decode instance.
    """

    decode: Instance
    prefill: list[Instance]
    decision: Decision
    threshold: int | None = None
    decode_reservation: LoadReservation | None = None
    prefill_reservation: LoadReservation | None = None
    decode_pending: PendingChain | None = None
    decode_chain: HashChain | None = None
    prefill_pending: PendingChain | None = None
    ahead: float = 0.0
    running: int = 0
    speeds: Speeds | None = None
    trace: common_pb2.RequestTrace | None = None
    _computed: bool = False
    _tokens: int = 0
    _first: tuple[float, int] | None = None
    _last: float = 0.0

    @property
    def remote_threshold(self) -> int | None:
        """Threshold to send to the decode instance: missing tokens from which it asks a prefill instance.

        ``None``: it uses its own.
        """
        path = self.decision.choice.path
        if self.threshold is not None or path is None:
            return self.threshold
        return 1 if path is PrefillPath.REMOTE else _NEVER_REMOTE

    def prefilled(self) -> None:
        """Release the shares of the prefill instance: the first token has arrived, so decode has the prompt's KV."""
        self._computed = True
        if self.decode_chain is not None:
            self.decode_pending = self.decode.events.add_pending(self.decode_chain)
            self.decode_chain = None
        if self.decode_reservation is not None:
            self.decode_reservation.prefilled()
        self._release_prefill()

    def grow(self, num_tokens: int) -> None:
        if self.decode_reservation is not None:
            self.decode_reservation.grow(num_tokens)
        if self.speeds is not None:
            self._last = self.speeds.now()
            self._tokens += num_tokens
            if self._first is None:
                self._first = self._last, num_tokens

    def release(self) -> None:
        """Release all shares; may be called any number of times."""
        self._release_prefill()
        if self.decode_reservation is not None:
            self.decode_reservation.release()
        if self.decode_pending is not None:
            self._release_pending(self.decode, self.decode_pending)
            self.decode_pending = None
        self.decode_chain = None
        speeds = self.speeds
        self.speeds = None
        if speeds is not None and self.trace is not None and self._first is not None:
            speeds.observe(self._served(self.trace))

    def _release_prefill(self) -> None:
        if self.prefill_reservation is not None:
            self.prefill_reservation.release()
        if self.prefill_pending is not None:
            self._release_pending(self.prefill[0], self.prefill_pending)
            self.prefill_pending = None

    def _release_pending(self, instance: Instance, pending: PendingChain) -> None:
        """Release a chain; one that was computed counts on until the instance's events must have reported it."""
        if self._computed:
            instance.events.settle(pending)
        else:
            pending.release()

    def _served(self, trace: common_pb2.RequestTrace) -> ServedRequest:
        began, first = self._first or (0.0, 0)
        sequences = max(1, self.decode_reservation.requests if self.decode_reservation is not None else 1)
        return ServedRequest(
            trace=trace,
            prefill=self.decision.prefill_instance if self.prefill_reservation is not None else "",
            decode=self.decode.instance_id,
            ahead=self.ahead,
            running=self.running,
            tokens=1 + (self._tokens - first) / sequences,
            decode_s=self._last - began,
        )
