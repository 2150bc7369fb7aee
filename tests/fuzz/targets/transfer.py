"""Bytes of peers of pipes: the handshake from both ends, frames and reads on a stream, descriptions of KV."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash
from tests.fuzz.choices import Choices

from baton.errors import BatonError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVShards
from baton.kv_transfer import wire
from baton.kv_transfer.pipes import nixl, nixl_agent, torch_distributed
from baton.kv_transfer.pipes.base import ServeLimits
from baton.kv_transfer.pipes.read_server import serve_reads
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads
from baton.kv_transfer.wire import FrameKind, pack_header
from baton.rpc.service_token import Token

LAYOUT = KVLayout((LayerShape(2, 4, 6), LayerShape(1, 8, 0)), 4, "float32")
KIND = Fingerprint.of(model="m", model_digest="d", rope="", layout=LAYOUT)
EPOCH = b"e" * 16
FACTS = wire.Facts(EPOCH, KIND, 4)
TOKEN = Token("token-of-this-target")
_KEY = wire._keys(TOKEN)[0]
_NONCE = b"\1" * wire.NONCE_BYTES
_NAMES = list(KIND.__dataclass_fields__)
_SHARDS = KVShards([HostArena(4, KIND.block_bytes, private=True)])
_LIMITS = ServeLimits(frame_s=2.0, idle_s=2.0)
wire.secrets = SimpleNamespace(token_bytes=lambda size: b"\1" * size)  # type: ignore[attr-defined]
"""The nonce is known, so that right proofs can be made and what stands behind them is reached."""


def _frame(choices: Choices, kind: FrameKind, fields: dict[str, Any]) -> bytes:
    with contextlib.suppress(ValueError):
        payload = json.dumps(fields).encode("utf-8", "surrogatepass")
        frame = pack_header(kind, len(payload)) + payload
        return choices.mutated(frame) if choices.number(0, 3) == 0 else frame
    return b""


def _facts(choices: Choices) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(FACTS.to_fields()))
    if choices.flag():
        fields["fingerprint"].update(choices.fields(_NAMES, 3))
    if choices.flag():
        shapes = [choices.fields(["kv_heads", "k_dim", "v_dim"], 3) for _ in range(choices.number(0, 3))]
        fields["fingerprint"]["layer_shapes"] = [{"kv_heads": 1, "k_dim": 1, "v_dim": 1, **each} for each in shapes]
    return {**fields, **choices.fields(["epoch", "digest", "fingerprint", "num_blocks"], 2)}


def handshake(data: bytes) -> None:
    """Either end of a handshake is done, or refuses with an error of Baton's."""
    choices = Choices(data)
    ours, theirs = socket.socketpair()
    stream = Stream(ours, peer="peer")
    with theirs:
        server = choices.flag()
        role = b"client" if server else b"server"
        proof = wire._proof(_KEY, role, _NONCE, _NONCE) if choices.number(0, 3) else choices.text()
        word = {"nonce": _NONCE.hex(), "proof": proof, "purpose": wire.PURPOSE_READ, **_facts(choices)}
        word.update(choices.fields(["nonce", "proof", "purpose"], 1))
        said = b"" if server else _frame(choices, FrameKind.CHALLENGE, {"nonce": _NONCE.hex()})
        said += _frame(choices, FrameKind.HELLO if server else FrameKind.WELCOME, word)
        if choices.number(0, 3) == 0:
            said = choices.rest()
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        greet = wire.greet_as_server if server else wire.greet_as_client
        with contextlib.suppress(BatonError):
            greet(stream, TOKEN, Wait(time.monotonic() + 5), purpose=wire.PURPOSE_READ, facts=FACTS)
            assert word["proof"] == wire._proof(_KEY, role, _NONCE, _NONCE)
        stream.close()


def _read(choices: Choices) -> bytes:
    blocks = [
        choices.number(0, 5) if choices.flag() else choices.number(0, 2**32 - 1) for _ in range(choices.number(0, 6))
    ]
    generations = [choices.number(0, 1) if choices.flag() else choices.number(0, 2**64 - 1) for _ in blocks]
    pairs = []
    for _ in range(choices.number(0, 6)):
        small = choices.flag()
        pairs += [choices.number(0, KIND.block_bytes) if small else choices.number(0, 2**64 - 1) for _ in range(2)]
    steps = []
    for _ in range(choices.number(0, 3)):
        steps += [choices.number(0, 2), choices.number(0, 3) if choices.flag() else choices.number(0, 2**64 - 1)]
    counts = [len(blocks), len(pairs) // 2, choices.number(0, 1), choices.number(0, 2**16 - 1), len(steps) // 2]
    if choices.number(0, 7) == 0:
        counts = [choices.number(0, 2**32 - 1) for _ in counts]
    body = struct.pack(f"<5I{len(blocks)}I", *counts, *blocks)
    words = (*generations, *pairs, *steps)
    body += struct.pack(f"<{len(words)}Q", *words)
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def reads(data: bytes) -> None:
    """Whoever has shaken hands gets blocks or an error, and nothing else happens; answers that come are checked."""
    choices, said = Choices(data), b""
    for _ in range(choices.number(0, 4)):
        kind = choices.number(0, 3)
        payload = _read(choices) if kind else choices.take(8).ljust(8, b"\0")
        payload = choices.mutated(payload) if choices.number(0, 7) == 0 else payload
        said += pack_header(FrameKind.READ if kind else FrameKind.WAIT, len(payload)) + payload
    said = choices.mutated(said) if choices.number(0, 7) == 0 else said
    ours, theirs = socket.socketpair()
    stream = Stream(ours, peer="peer")
    with theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(BatonError):
            serve_reads(stream, _SHARDS, _LIMITS)
        stream.close()
    ids = np.arange(choices.number(1, 40))
    asked = BlockReads(ids, ids.astype(np.uint64), ids)
    checksums, sent = choices.flag(), choices.number(0, len(ids))
    size = wire.tail_bytes(asked, sent, checksums=checksums)
    tail = choices.rest().ljust(size, b"\0")[:size]
    if checksums and size % 2:
        tail = tail[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(b"sent" + tail[:-8]))
    with contextlib.suppress(BatonError):
        assert len(wire.parse_tail(asked, b"sent", tail, checksums=checksums).unchanged) == len(ids)


def layouts(data: bytes) -> None:
    """Descriptions of KV and of pipes' endpoints from JSON: read, or refused by an error of Baton's."""
    choices = Choices(data)
    fields = _facts(choices)["fingerprint"]
    with contextlib.suppress(BatonError):
        found = wire.fingerprint_from_fields(fields)
        found.digest()
        found.content_key()
        KIND.require_source(found, who="peer")
        found.require_reader(KIND, who="peer")
    entry = choices.fields(["agent", "metadata", "digest", "arenas", "devices", "key", "value"], 5)
    for parse in (
        nixl_agent.parse_agent,
        lambda value: nixl.parse_arenas(value.get("arenas"), value.get("devices")),
        torch_distributed._parse_entry,
    ):
        with contextlib.suppress(BatonError):
            parse(entry)
