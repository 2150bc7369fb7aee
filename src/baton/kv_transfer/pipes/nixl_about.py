"""What a NIXL agent tells a peer of itself: its name, NIXL's metadata, and a digest of both.

NIXL does not check what it loads. Of metadata that was cut short it keeps half, so that the whole of it is refused
afterwards, or it takes the process down; so nothing gets there whose digest is not right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from baton.kv_transfer.protocol.frames import BadFrameError

MAX_METADATA_BYTES = 64 << 10
"""Bound on what a peer says about its memory; a machine with eight network cards needs a few KiB."""
MAX_NAME = 64


def describe_agent(name: str, metadata: bytes) -> dict[str, Any]:
    """Return the JSON-ready fields that tell a peer of an agent.

    Args:
        name: The agent's.
        metadata: Of the region that the peer may read.
    """
    return {"agent": name, "metadata": metadata.hex(), "digest": _digest(name, metadata)}


def parse_agent(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    """Read what a peer said of its agent: its name and metadata.

    Raises:
        BadFrameError: A field is missing, malformed or too long, or this is not what the peer made a digest of.
    """
    name, text, digest = fields.get("agent"), fields.get("metadata"), fields.get("digest")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isascii():
        raise BadFrameError("the peer's agent name is malformed", field="agent")
    if not isinstance(text, str) or not 0 < len(text) <= 2 * MAX_METADATA_BYTES:
        raise BadFrameError("the peer's NIXL metadata is missing or too long", field="metadata")
    try:
        metadata = bytes.fromhex(text)
    except ValueError as error:
        raise BadFrameError("the peer's NIXL metadata is malformed", field="metadata") from error
    if digest != _digest(name, metadata):
        raise BadFrameError("the peer's NIXL metadata is not what it made a digest of", field="metadata")
    return name, metadata


def _digest(name: str, metadata: bytes) -> str:
    return hashlib.sha256(b"%d %s %s" % (len(name), name.encode(), metadata)).hexdigest()
