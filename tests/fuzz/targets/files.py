"""Files that a crash, another program or a bad disk has changed: the store's disk, and KV files that several share."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import xxhash
from tests.fuzz.choices import Choices
from tests.support.transport.named_blocks import name_of

from baton.errors import BatonError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.connector.store.files import BlockFolder, BlockFormat
from baton_kvstore.tiers.disk.directory import decode_checkpoint, encode_store
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.segment import VERSION
from baton_kvstore.tiers.remote import decode_block, decode_kind, encode_header
from baton_kvstore.types import KvFormat

_KIND = KvFormat(b"k" * 32, b"c" * 32, 600)
_SECRET = 7


def _content(label: object) -> bytes:
    return (name_of(label) * 19)[:600]


@functools.cache
def _shm() -> str:
    """A folder in memory, where there is such a place."""
    return tempfile.mkdtemp(prefix="baton-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@functools.cache
def _store() -> dict[str, bytes]:
    """The files of a store of eight blocks, two of them deleted."""
    path = Path(_shm(), "made")
    path.mkdir(mode=0o700)
    (path / "store").write_bytes(encode_store(_SECRET))
    log = DiskLog(str(path), max_bytes=1 << 20, segment_bytes=1 << 15, direct=False)
    for label in range(8):
        log.write(_KIND, [name_of(label)], [memoryview(_content(label))], set())
        if label == 4:
            log.sync()
            log.checkpoint()
    log.append_tombstones(_KIND, [name_of(1), name_of(6)])
    log.sync()
    log.close()
    found = {each.name: each.read_bytes() for each in path.iterdir()}
    assert sum(name.startswith("segment-") for name in found) >= 2, found.keys()
    shutil.rmtree(path)
    return found


def disk(data: bytes) -> None:
    """A store's folder with damage anywhere opens, serves right bytes or none, and takes more."""
    choices, files = Choices(data), dict(_store())
    for _ in range(choices.number(0, 3)):
        name = choices.pick(sorted(files))
        change = choices.number(0, 4)
        if change == 0:
            files[name] = files[name][: choices.number(0, len(files[name]))]
        elif change == 1:
            files.pop(name)
            if not files:
                break
        elif change == 2:
            files[f"segment-{choices.number(0, 12):016x}"] = files[name]
        elif change == 3:
            at = choices.number(0, max(0, len(files[name]) // 4096)) * 4096
            files[name] = files[name][:at] + choices.mutated(files[name][at : at + 128]) + files[name][at + 128 :]
        else:
            files[name] = choices.mutated(files[name])
    if choices.number(0, 3) == 0:  # a checkpoint that its checksum vouches for
        body = struct.pack("<8sIQI", b"BATONIDX", VERSION, choices.number(0, 99), choices.number(0, 3)) + choices.take(
            200
        )
        body += struct.pack("<Q", xxhash.xxh3_64_intdigest(body, seed=_SECRET))
        decode_checkpoint(body, _SECRET)
        files[choices.pick(["checkpoint", "index"])] = body
    path = Path(_shm(), "store")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    for name, content in files.items():
        (path / name).write_bytes(content)
    with contextlib.suppress(BatonError):
        log = DiskLog(str(path), max_bytes=1 << 20, segment_bytes=1 << 15, direct=False)
        try:
            for label in range(8):
                into = bytearray(600)
                if (
                    log.index.find(_KIND, name_of(label))
                    and log.index.read(_KIND, [name_of(label)], [memoryview(into)])[0]
                ):
                    assert into == _content(label)
            log.write(_KIND, [name_of("new")], [memoryview(_content("new"))], set())
            into = bytearray(600)
            assert log.index.read(_KIND, [name_of("new")], [memoryview(into)]) == [True]
            assert into == _content("new")
        finally:
            log.close()


_LAYOUT = KVLayout((LayerShape(2, 4, 6), LayerShape(1, 8, 0)), 4, "float32")
_WHOLE = Fingerprint.of(model="m", model_digest="d", rope="", layout=_LAYOUT)


@functools.cache
def _folder() -> tuple[BlockFolder, Path, bytes]:
    path = Path(_shm(), "kv")
    folder = BlockFolder(path, _WHOLE, max_bytes=100 * BlockFormat(_WHOLE).file_bytes, sync=False)
    folder.write(name_of("a"), np.frombuffer((b"abcdefg" * 1000)[: _WHOLE.block_bytes], np.uint8))
    (file,) = path.glob("**/*.safetensors")
    return folder, file, file.read_bytes()


def kv_files(data: bytes) -> None:
    """A KV file, or the value of a remote store, that was changed in any way is a miss, never other bytes."""
    choices, (folder, file, right) = Choices(data), _folder()
    content = choices.mutated(right)
    if choices.number(0, 3) == 0:  # another header of safetensors in front
        header = choices.take(choices.number(0, 200))
        size = len(header) if choices.flag() else choices.number(0, 2**64 - 1)
        content = struct.pack("<Q", size) + header + right[choices.number(0, len(right)) :]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    into = np.zeros(_WHOLE.block_bytes, np.uint8)
    if folder.read(name_of("a"), into):
        assert into.tobytes() == (b"abcdefg" * 1000)[: _WHOLE.block_bytes]
    payload = memoryview(_content("r"))
    value = encode_header(_KIND, name_of("r"), payload) + payload
    changed = choices.mutated(value)
    found = decode_block(changed, _KIND, name_of("r"))
    assert found is None or bytes(found) == payload
    decode_kind(choices.rest())
