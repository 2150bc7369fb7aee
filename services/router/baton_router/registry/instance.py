"""One prefill or decode instance as the router knows it, and the check of its identity."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from baton.api.v1 import router_pb2, worker_pb2, worker_pb2_grpc
from baton.errors import ConfigError, FingerprintMismatchError
from baton.hashing import HASH_SCHEME
from baton.kv_cache.fingerprint import Fingerprint
from baton.rpc.convert import fingerprint_from_pb, role_from_pb, role_to_pb
from baton.rpc.http2.message_stream import Dialer
from baton.types import Epoch, InstanceId, Role
from baton.version import __version__, works_with
from baton_router.indexer.events import EventApplier
from baton_router.registry.load import LoadTracker

log = logging.getLogger(__name__)

_EPOCH_BYTES = 16
_MAX_MODEL_NAMES = 256


class Status(enum.StrEnum):
    """Whether an instance can be used."""

    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"
    """It answers, but has another role, other KV or another model than it should."""
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance's description of itself; see ``GetInfoResponse``.

    Attributes:
        kvstore: Configured nodes of the KV store that it loads from; empty: none.
        grammars: Whether it accepts requests with a grammar.
        sampler: Version of its sampler; empty: unknown.
        content_key: Root of its block hash chains, from its fingerprint. Instances whose blocks have the same number
            of tokens share it, however many ranks they have.
        kind: Part of its KV dtype that decides which KV it can use, see ``Fingerprint.kind``.
    """

    instance_id: InstanceId
    role: Role
    epoch: Epoch
    fingerprint: Fingerprint
    num_blocks: int
    max_model_len: int
    model_names: tuple[str, ...]
    model_path: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer_digest: str = ""
    max_num_seqs: int = 0
    kvstore: str = ""
    grammars: bool = False
    version: str = ""
    sampler: str = ""
    content_key: bytes = field(init=False)
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content_key", self.fingerprint.content_key())
        object.__setattr__(self, "kind", self.fingerprint.kind)

    @classmethod
    def from_pb(cls, message: worker_pb2.GetInfoResponse) -> InstanceInfo:
        """Parse an instance's answer.

        Raises:
            InvalidRequestError: Role or fingerprint cannot be read.
        """
        return cls(
            instance_id=InstanceId(message.instance_id),
            role=role_from_pb(message.role),
            epoch=Epoch(message.epoch),
            fingerprint=fingerprint_from_pb(message.fingerprint),
            num_blocks=message.num_blocks,
            max_model_len=message.max_model_len,
            model_names=tuple(message.model_names) or (message.served_model_name,),
            model_path=message.model_path,
            vocab_size=message.vocab_size,
            eos_token_ids=frozenset(message.eos_token_ids),
            tokenizer_digest=message.tokenizer_digest,
            max_num_seqs=message.max_num_seqs,
            kvstore=message.kvstore,
            grammars=message.grammars,
            version=message.version,
            sampler=message.sampler,
        )


class CallState(enum.Enum):
    """State of a ticket's call, as its instance reports it; ``LOST``: the instance's session has ended."""

    BEGUN = "begun"
    ENDED = "ended"
    LOST = "lost"


class Lost(Protocol):
    """A running request that can be broken off."""

    def lose(self) -> None:
        """Handle that the instance does not answer any more."""


class Instance:
    """One instance: address, identity, health, load and its part of the index.

    Changed only by its monitor (health, identity), by placements (load) and by the registry (removal).

    Attributes:
        admitted: Whether a session is open and the instance's identity was accepted.
        silent: Whether it has not answered a probe in time: it may hang, and gets new requests only if all do.
        drained: Whether its last session ended while it was draining, as when it is shut down.
        generation: Number of sessions so far.
        open_tickets: Called when the state of a ticket's call changes; by nonce.
    """

    def __init__(
        self, address: str, role: Role, channel: grpc.aio.Channel, dialer: Dialer, events: EventApplier
    ) -> None:
        self.address = address
        self.role = role
        self.channel = channel
        self.dialer = dialer
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.events = events
        self.load = LoadTracker(role)
        self.info: InstanceInfo | None = None
        self.status = Status.CONNECTING
        self.reason = ""
        self.admitted = False
        self.silent = False
        self.drained = False
        self.generation = 0
        self.open_tickets: dict[bytes, Callable[[CallState], None]] = {}
        self._running: set[Lost] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def instance_id(self) -> InstanceId:
        """Name of the instance; its address until it was reached for the first time."""
        return self.info.instance_id if self.info else InstanceId(self.address)

    @property
    def ready(self) -> bool:
        """Whether it may get new requests."""
        return self.status is Status.READY and not self.load.draining

    @property
    def leaving(self) -> bool:
        """Whether it said that it takes no more requests, so that its end is no loss."""
        return self.load.draining or self.drained

    @property
    def identity(self) -> tuple[str, int]:
        """Address and session: an instance that failed a request counts as new after a reconnection."""
        return self.address, self.generation

    def report_calls(self, nonces: Iterable[bytes], state: CallState) -> None:
        """Record the state of tickets' calls; unknown ones are another router's."""
        for nonce in list(nonces):
            on_change = self.open_tickets.get(nonce)
            if state is not CallState.BEGUN:
                self.open_tickets.pop(nonce, None)
            if on_change is not None:
                on_change(state)

    def add_call(self, call: Lost) -> None:
        """Add a running request; ``lose`` is called if the instance hangs while its connections are open."""
        self._running.add(call)
        self._idle.clear()

    def remove_call(self, call: Lost) -> None:
        """Remove a running request; may be called any number of times."""
        self._running.discard(call)
        if not self._running:
            self._idle.set()

    def lose(self) -> None:
        """Break off every running request: the instance does not answer any more."""
        for call in list(self._running):
            call.lose()

    async def close(self) -> None:
        """Close every connection to it."""
        self.dialer.close()
        await self.channel.close(None)

    async def wait_idle(self) -> None:
        """Wait until none of this router's requests runs there."""
        await self._idle.wait()

    def describe(self) -> router_pb2.InstanceStatus:
        """Return its state for ``ListInstances``."""
        return router_pb2.InstanceStatus(
            instance_id=self.instance_id,
            address=self.address,
            role=role_to_pb(self.role),
            healthy=self.status is Status.READY,
            index_state=self.events.state,
            load=self.load.report,
            in_flight=self.load.requests,
            indexed_blocks=self.events.num_blocks,
            refused=self.reason if self.status is Status.REFUSED else "",
            max_num_seqs=0 if self.info is None else self.info.max_num_seqs,
        )


def epochs_by_applier(instances: Iterable[Instance]) -> dict[EventApplier, Epoch]:
    """Return each instance's epoch by its part of the index."""
    return {x.events: x.info.epoch for x in instances if x.info is not None}


class IdentityCheck:
    """Compares instances with the router and with the first of them, before they get a request or feed the index.

    Args:
        tokenizer: Digest of the router's own tokenizer; empty: the instances' is used.
        block_size: Tokens per block that all instances must have; ``None``: any, each size forms a group.
    """

    def __init__(self, tokenizer: str = "", block_size: int | None = None) -> None:
        self._own_tokenizer = tokenizer
        self._block_size = block_size
        self._tokenizer = tokenizer
        self._fingerprint: Fingerprint | None = None
        self._kinds: dict[Role, dict[str, Fingerprint]] = {Role.PREFILL: {}, Role.DECODE: {}}
        """One fingerprint of each kind of KV dtype that was admitted, by role."""

    def admit(self, info: InstanceInfo, role: Role, *, first: bool) -> None:
        """Check an instance.

        Args:
            info: Description of the instance by itself.
            role: Expected role.
            first: Whether there is no other instance: this one decides which model is served.

        Raises:
            ConfigError: It has another role than expected, an incompatible version, or numbers that fit no instance.
            FingerprintMismatchError: Its KV, hashes or token ids differ from the other instances'; names the field.
        """
        if not works_with(info.version):
            raise ConfigError(
                f"version is {info.version!r:.40}; this router takes {__version__} and the minor releases beside it",
                field="version",
            )
        _require_sane(info)
        if info.role is not role:
            raise ConfigError(f"role is {info.role}, expected {role}", field="role")
        served = self._fingerprint
        offered = info.fingerprint
        if served is not None and not first:
            served.require_akin(offered, who="instance")
            self._require_partner(offered, role)
        if offered.hash_scheme != HASH_SCHEME:
            raise _differs("hash_scheme", HASH_SCHEME, offered.hash_scheme)
        if offered.block_size < 1 or self._block_size not in (None, offered.block_size):
            raise _differs("block_size", self._block_size or "1 or more", offered.block_size)
        tokenizer = self._own_tokenizer if first else self._tokenizer
        if tokenizer and info.tokenizer_digest and tokenizer != info.tokenizer_digest:
            raise _differs("tokenizer", tokenizer[:16], info.tokenizer_digest[:16])
        if served is None or first:
            self._fingerprint = offered
            self._kinds = {Role.PREFILL: {}, Role.DECODE: {}}
        elif offered.block_size != served.block_size:
            log.info(
                "%s has blocks of %d tokens, others of %d", info.instance_id, offered.block_size, served.block_size
            )
        self._kinds[role][offered.kind] = offered
        self._tokenizer = tokenizer or info.tokenizer_digest

    def _require_partner(self, offered: Fingerprint, role: Role) -> None:
        """Refuse an instance that could not exchange KV with any known one.

        Decode instances use the KV of prefill instances. While there is no instance of the other role, those of the
        same role are compared.

        Raises:
            FingerprintMismatchError: Names ``kv_dtype`` or ``kv_cast``.
        """
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        partners = list(self._kinds[other].values())
        if not partners:
            partners = list(self._kinds[role].values())
            if any(x.takes(offered) or offered.takes(x) for x in partners):
                return
        if role is Role.DECODE:
            if not any(offered.takes(x) for x in partners):
                partners[0].require_reader(offered, who="instance")
        elif not any(x.takes(offered) for x in partners):
            partners[0].require_source(offered, who="instance")


def _require_sane(info: InstanceInfo) -> None:
    """Refuse an instance that can serve nothing: its bounds would be those of all requests, its names in every log.

    Raises:
        ConfigError: Names the field.
    """
    least = {"num_blocks": 1, "max_model_len": 2, "vocab_size": 1}
    for name, number in least.items():
        if getattr(info, name) < number:
            raise ConfigError(f"{name} must be at least {number}, got {getattr(info, name)}", field=name)
    if len(info.epoch) != _EPOCH_BYTES:
        raise ConfigError(f"epoch must have {_EPOCH_BYTES} bytes, got {len(info.epoch)}", field="epoch")
    if not _is_name(info.instance_id):
        raise ConfigError("instance_id must have 1 to 256 printable characters", field="instance_id")
    if len(info.model_names) > _MAX_MODEL_NAMES or not all(map(_is_name, info.model_names)):
        raise ConfigError(
            f"model_names must be 1 to {_MAX_MODEL_NAMES}, of 1 to 256 printable characters each", field="model_names"
        )


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= 256 and text.isprintable()


def _differs(field: str, here: object, there: object) -> FingerprintMismatchError:
    return FingerprintMismatchError(f"{field} of the instance differs: {here!r} here, {there!r} there", field=field)
