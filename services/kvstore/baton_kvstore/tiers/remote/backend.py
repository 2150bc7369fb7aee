"""What a tier asks of the thing that keeps its blocks on other machines."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import xxhash

from baton.types import BlockHash
from baton_kvstore.types import MAX_BLOCK_BYTES, KvFormat, digest_of


class RemoteError(Exception):
    """A backend is away, too slow, or answered with an error."""


class Backend(Protocol):
    """Values by kind and block hash. Every method may be called from any thread, blocks it, but not for ever.

    Attributes:
        on_new_server: Called, in any thread, when another server answers than before: blocks may be lost.

    Raises:
        RemoteError: By every method.
    """

    on_new_server: Callable[[], None]

    def get(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        """Return values; ``None``: there is none."""

    def put(self, kind: KvFormat, hashes: Sequence[BlockHash], values: Sequence[bytes]) -> list[bool]:
        """Write values and return which were taken; one that is there already is replaced, at once as a whole."""

    def has(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bool | None]:
        """Return which are there. ``None``: not looked for, because an earlier block of the chain is not there."""

    def delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> None:
        """Delete values (``None``: all of the kind)."""

    def scan(self) -> Iterator[tuple[KvFormat, list[BlockHash]]]:
        """Yield what is there, little by little, in any order."""

    def used_bytes(self) -> int | None:
        """Return the memory that everything there takes; ``None``: unknown."""

    def close(self) -> None:
        """Close connections; running calls fail."""


VERSION = 1
_HEADER = struct.Struct("<4sHHQ32s32s32s16s")
_MAGIC = b"BBLK"
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _SUM.size


def encode_header(kind: KvFormat, block_hash: BlockHash, payload: memoryview) -> bytes:
    """Return what comes before a block's bytes."""
    body = _HEADER.pack(_MAGIC, VERSION, 0, len(payload), kind.key, kind.content_key, block_hash, digest_of(payload))
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_kind(header: bytes) -> KvFormat | None:
    """Return what kind of block a value is, from its first bytes; ``None``: it is none."""
    body = header[: _HEADER.size]
    if len(header) < HEADER_BYTES or _SUM.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    magic, version, _, num_bytes, key, content_key, _, _ = _HEADER.unpack(body)
    if magic != _MAGIC or version != VERSION or not 0 < num_bytes <= MAX_BLOCK_BYTES:
        return None
    return KvFormat(key, content_key, num_bytes)


def decode_block(value: bytes, kind: KvFormat, block_hash: BlockHash) -> memoryview | None:
    """Return a block's bytes; ``None``: the value is not that very block, whole."""
    if len(value) != HEADER_BYTES + kind.block_bytes or decode_kind(value[:HEADER_BYTES]) != kind:
        return None
    *_, name, digest = _HEADER.unpack_from(value)
    payload = memoryview(value)[HEADER_BYTES:]
    return payload if name == block_hash and digest_of(payload) == digest else None
