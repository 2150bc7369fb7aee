"""A KV block as a safetensors file: K and V of every layer as tensors, in the metadata what they are and a checksum.

The bytes after the header are the block's own, undivided and without padding, so reading and writing copy nothing. The
header of a block is known before its file is read, all but the checksum: a file that begins otherwise is damaged, or
somebody else's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout
from baton.types import BlockHash

FORMAT = "baton-kv-block-1"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_CHECKSUM = "xxh3_128"
_NO_CHECKSUM = "0" * 32


class DamagedFileError(Exception):
    """A file does not hold what its name says."""


class BlockFormat:
    """How the blocks of one kind of KV are written.

    Args:
        whole: Their fingerprint, undivided.

    Attributes:
        num_bytes: Of a block's tensors.
    """

    def __init__(self, whole: Fingerprint) -> None:
        layout = KVLayout(whole.layer_shapes, whole.block_size, whole.kv_dtype)
        tensors: dict[str, Any] = {}
        at = 0
        for layer, shape in enumerate(layout.layers):
            for name, dim in (("k", shape.k_dim), ("v", shape.v_dim)):
                size = shape.kv_heads * layout.block_size * dim * layout.dtype_bytes
                if size:
                    tensors[f"layers.{layer}.{name}"] = {
                        "dtype": _DTYPES[layout.dtype],
                        "shape": [shape.kv_heads, layout.block_size, dim],
                        "data_offsets": [at, at + size],
                    }
                at += size
        self.num_bytes = at
        self._template = _template(whole.digest().hex(), tensors)
        self._header_bytes = len(self._header(BlockHash(bytes(32)), _NO_CHECKSUM))

    @property
    def file_bytes(self) -> int:
        """Size of a file."""
        return self._header_bytes + self.num_bytes

    def read(self, path: Path, name: BlockHash, into: npt.NDArray[np.uint8]) -> float:
        """Fill a slot from a file and return when the file was used last, in seconds of the epoch.

        Args:
            path: The file.
            name: Hash of the block that it should hold.
            into: uint8 [block bytes]; if this raises, it may hold anything.

        Raises:
            DamagedFileError: Size, header or checksum are not what they must be.
            OSError: It is not there, or cannot be read.
        """
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != self.file_bytes:
                raise DamagedFileError(f"{status.st_size} bytes instead of {self.file_bytes}")
            header = file.read(self._header_bytes)
            data = into[: self.num_bytes].data
            at = 0
            while at < self.num_bytes and (count := file.readinto(data[at:])):
                at += count
        if at != self.num_bytes or header != self._header(name, xxhash.xxh3_128_hexdigest(data)):
            raise DamagedFileError("header or checksum are wrong")
        return status.st_mtime

    def write(self, path: Path, name: BlockHash, block: npt.NDArray[np.uint8], *, sync: bool) -> None:
        """Write a new file, which other processes do not see as long as its name is not known.

        Args:
            path: The file, which must not be there.
            name: Hash of the block.
            block: uint8 [block bytes].
            sync: Return when it would survive a loss of power.

        Raises:
            OSError: It could not be written whole.
        """
        data = block[: self.num_bytes].data
        pieces = [memoryview(self._header(name, xxhash.xxh3_128_hexdigest(data))), data]
        with open(path, "xb", buffering=0) as file:
            for piece in pieces:
                at = 0
                while at < len(piece):
                    at += file.write(piece[at:])
            if sync:
                os.fsync(file.fileno())

    def _header(self, name: BlockHash, checksum: str) -> bytes:
        return self._template % (name.hex().encode(), checksum.encode())


def _template(digest: str, tensors: dict[str, Any]) -> bytes:
    """Return a header with places for the block hash and the checksum, 64 and 32 characters of hexadecimal."""
    metadata = {"format": FORMAT, "fingerprint": digest, "block_hash": "%b", _CHECKSUM: "%b"}
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    length = len(text % (b"0" * 64, b"0" * 32))
    padding = -length % 8
    return (length + padding).to_bytes(8, "little").replace(b"%", b"%%") + text + b" " * padding
