"""The handshake on every new connection: both sides prove that they know the token, and compare what their KV is.

::

    server -> CHALLENGE  nonce
    client -> HELLO      nonce, proof, purpose; for reads: epoch, fingerprint, num_blocks
    server -> WELCOME    proof, the same facts of the server           (or ERROR, and the connection ends)

The proof is an HMAC of both nonces under a key derived from the shared token: the token never crosses the wire, proofs
cannot be replayed, and both sides show that they know it. Where several tokens are accepted, the client proves the
first one it has, and the server the same. Facts are compared only after the proof, and before any block moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, FingerprintMismatchError, StaleBlockError, UnauthenticatedError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import LayerShape
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError, FrameKind, recv_control, send_control, send_error
from baton.kv_transfer.protocol.sockets import Stream
from baton.rpc.service_token import Token

log = logging.getLogger(__name__)
HANDSHAKE_S = 5.0
"""Seconds a new peer has for its handshake."""
NONCE_BYTES = 32
PURPOSE_READ = "read"
PURPOSE_MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Facts:
    """What two sides of a block transfer compare.

    Attributes:
        epoch: Of the source.
        fingerprint: This side's KV; the other side's may be cut up otherwise.
        num_blocks: In the source's arenas.
        source: Reader's side: how the source was described; it must say the same of itself.
    """

    epoch: bytes
    fingerprint: Fingerprint
    num_blocks: int
    source: Fingerprint | None = None

    def to_fields(self) -> dict[str, Any]:
        """Write as JSON-ready fields."""
        return {
            "epoch": self.epoch.hex(),
            "digest": self.fingerprint.digest().hex(),
            "fingerprint": dataclasses.asdict(self.fingerprint),
            "num_blocks": self.num_blocks,
        }

    def require(self, fields: Mapping[str, Any], *, who: str) -> Fingerprint:
        """Compare with what the other side said; returns its fingerprint.

        Raises:
            StaleBlockError: Another epoch: the instance was restarted.
            FingerprintMismatchError: Names the field that differs.
            BadFrameError: A field is missing or malformed.
        """
        if fields.get("epoch") != self.epoch.hex():
            raise StaleBlockError("the blocks belong to another epoch: their instance was restarted", field="epoch")
        theirs = fingerprint_from_fields(fields.get("fingerprint"))
        if self.source is not None:
            self.fingerprint.require_source(theirs, who=who)
        else:
            self.fingerprint.require_reader(theirs, who=who)
        if fields.get("digest") != theirs.digest().hex():
            raise FingerprintMismatchError(
                f"the {who}'s fingerprint is not the one it made a digest of", field="digest"
            )
        if self.source is not None and self.source.digest() != theirs.digest():
            raise FingerprintMismatchError(
                f"the {who} was described otherwise than it says itself", field="fingerprint"
            )
        if fields.get("num_blocks") != self.num_blocks:
            there = f"{fields.get('num_blocks')!r:.80}"
            raise FingerprintMismatchError(
                f"KV of the {who} differs in num_blocks: {self.num_blocks} here, {there} there", field="num_blocks"
            )
        return theirs


def greet_as_client(
    stream: Stream, token: Token | None, wait: Wait, *, purpose: str, facts: Facts | None
) -> Fingerprint | None:
    """Introduce this side and check the server; returns its fingerprint where ``facts`` are compared.

    Raises:
        UnauthenticatedError: The tokens differ.
        StaleBlockError, FingerprintMismatchError: As :meth:`Facts.require` says, whichever side finds it first.
    """
    challenge = _nonce(recv_control(stream, FrameKind.CHALLENGE, wait))
    mine = secrets.token_bytes(NONCE_BYTES)
    key = _keys(token)[0]
    fields = {"nonce": mine.hex(), "proof": _proof(key, b"client", challenge, mine), "purpose": purpose}
    send_control(stream, FrameKind.HELLO, fields | (facts.to_fields() if facts else {}), wait)
    welcome = recv_control(stream, FrameKind.WELCOME, wait)
    _check_proof(welcome, [key], b"server", challenge, mine)
    return facts.require(welcome, who="source") if facts is not None else None


def greet_as_server(stream: Stream, token: Token | None, wait: Wait, *, purpose: str, facts: Facts | None) -> None:
    """Challenge a client, check what it says and answer.

    Raises:
        UnauthenticatedError: The tokens differ.
        BadFrameError: The peer said something else.
        StaleBlockError, FingerprintMismatchError: As :meth:`Facts.require` says.
    """
    challenge = secrets.token_bytes(NONCE_BYTES)
    send_control(stream, FrameKind.CHALLENGE, {"nonce": challenge.hex()}, wait)
    hello = recv_control(stream, FrameKind.HELLO, wait)
    theirs = _nonce(hello)
    key = _check_proof(hello, _keys(token), b"client", challenge, theirs)
    if hello.get("purpose") != purpose:
        raise BadFrameError(f"this endpoint serves {purpose}", field="purpose")
    if facts is not None:
        facts.require(hello, who="reader")
    answer = {"proof": _proof(key, b"server", challenge, theirs)}
    send_control(stream, FrameKind.WELCOME, answer | (facts.to_fields() if facts else {}), wait)


def greet_or_refuse(stream: Stream, token: Token | None, wait: Wait) -> bool:
    """Shake hands with a new peer that wants to exchange messages; ``False``: it was sent away."""
    try:
        greet_as_server(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
    except BatonError as error:
        log.warning("%s was sent away: %s", stream.peer, str(error))
        with contextlib.suppress(BatonError):  # it may not even listen
            send_error(stream, error, Wait(time.monotonic() + 1.0))
        stream.close()
        return False
    return True


def fingerprint_from_fields(fields: object) -> Fingerprint:
    """Rebuild a fingerprint from JSON fields.

    Raises:
        BadFrameError: A field is missing, unknown or of another type.
    """
    types = {"str": str, "int": int, "bool": bool}
    declared = {item.name: types.get(str(item.type)) for item in dataclasses.fields(Fingerprint)}
    if not isinstance(fields, dict) or set(fields) != set(declared):
        raise BadFrameError("the peer's fingerprint has other fields", field="fingerprint")
    values: dict[str, Any] = dict(fields)
    for name, kind in declared.items():
        if kind is not None and (type(values[name]) is not kind or not _is_plain(values[name])):
            raise BadFrameError(f"the peer's fingerprint is malformed in {name}", field=name)
    shapes = values["layer_shapes"]
    names = {item.name for item in dataclasses.fields(LayerShape)}
    if not isinstance(shapes, list) or not all(
        isinstance(s, dict) and set(s) == names and all(type(v) is int and _is_plain(v) for v in s.values())
        for s in shapes
    ):
        raise BadFrameError("the peer's fingerprint is malformed in layer_shapes", field="layer_shapes")
    values["layer_shapes"] = tuple(LayerShape(**shape) for shape in shapes)
    for name in ("unsplit_layers", "layer_groups"):
        numbers = values[name]
        if not isinstance(numbers, list) or not all(type(number) is int and _is_plain(number) for number in numbers):
            raise BadFrameError(f"the peer's fingerprint is malformed in {name}", field=name)
        values[name] = tuple(numbers)
    return Fingerprint(**values)


def _is_plain(value: str | int) -> bool:
    """Whether a value is one that a digest can be made of: JSON has halves of characters, and numbers of any size."""
    if isinstance(value, int):
        return 0 <= value < 1 << 63
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _nonce(fields: Mapping[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(fields["nonce"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadFrameError("the peer's nonce is malformed", field="nonce") from error
    if len(nonce) != NONCE_BYTES:
        raise BadFrameError("the peer's nonce has another length", field="nonce")
    return nonce


def _keys(token: Token | None) -> Sequence[bytes]:
    return (b"none",) if token is None else token.keys(b"pipe")


def _proof(key: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> str:
    return hmac.new(key, role + server_nonce + client_nonce, hashlib.sha256).hexdigest()


def _check_proof(
    fields: Mapping[str, Any], keys: Sequence[bytes], role: bytes, server_nonce: bytes, client_nonce: bytes
) -> bytes:
    """Return the key that a peer's proof was made with."""
    proof = fields.get("proof")
    if isinstance(proof, str):
        given = proof.encode("utf-8", "surrogatepass")
        for key in keys:
            if hmac.compare_digest(given, _proof(key, role, server_nonce, client_nonce).encode()):
                return key
    raise UnauthenticatedError("the peer does not know this side's shared token", field="token")
