"""The container: a GGUF file's metadata and where its tensors are, with everything bounded before memory is taken.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian throughout::

    "GGUF" | version uint32 | tensors uint64 | pairs uint64
    pairs:   key string | type uint32 | value             a string is its length uint64, then UTF-8
    tensors: name string | dims uint32 | shape uint64 x dims, innermost first | type uint32 | offset uint64
    padding to the alignment | data, each tensor at its offset from here

Nothing in a file is trusted: counts and lengths are compared with the bytes that remain, and tensors must be inside the
file, aligned, and must not overlap.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 26
"""Bytes of one string; some files have a whole ``tokenizer.json`` in one."""
MAX_STRINGS = 1 << 22
"""Strings in all arrays of a file together; each takes about ten times its eight bytes of length."""
MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a tensor's values are stored.

    Attributes:
        name: Name of the type, such as ``Q4_K``.
        block: Number of values in a block.
        nbytes: Bytes of a block.
    """

    name: str
    block: int
    nbytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""Supported types by their number in the file."""

_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Types that are not supported, for errors."""

_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_FLOAT32 = 6
_BOOL = 7
_STRING = 8
_ARRAY = 9

Value = bool | int | float | str | list[str] | npt.NDArray[Any]
"""A value of the metadata; arrays of numbers are NumPy arrays of their own dtype."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        name: Name of the tensor.
        shape: Shape, outermost dimension first.
        type: How values are stored.
        offset: Offset of the tensor's bytes in the file.
        nbytes: Number of bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The content of a file without its tensors' data.

    Attributes:
        path: The file.
        metadata: Values by key.
        tensors: Tensors by name, in the file's order.
        header_bytes: Bytes before the data, padding included.
        size: Length of the file in bytes.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    header_bytes: int
    size: int


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins as GGUF files do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Read and check a file's metadata and its table of tensors.

    Raises:
        ConfigError: The file is no GGUF file, damaged or truncated, or a tensor has an unsupported type; one line that
            names the file and the key or tensor.
    """
    try:
        size = path.stat().st_size
        if size < 24:
            raise ConfigError(f"{path}: not a GGUF file, or truncated ({size} bytes)", field="model")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, size).read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", field="model") from error


class _Reader:
    """Reads one file from front to back; :attr:`_at` never passes its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = 0
        self._strings_left = MAX_STRINGS
        self._where = "its header"

    def read(self) -> GgufFile:
        if self._data[:4] != MAGIC:
            self._refuse("not a GGUF file")
        version = int.from_bytes(self._data[4:8], "little")
        if version not in VERSIONS:
            swapped = int.from_bytes(self._data[4:8], "big") in VERSIONS
            self._refuse("a big-endian GGUF file" if swapped else f"GGUF version {version}; Baton reads 2 and 3")
        self._at = 8
        num_tensors = self._number("<Q")
        num_pairs = self._number("<Q")
        if num_pairs > MAX_PAIRS or num_tensors > MAX_TENSORS:
            self._refuse(f"{num_tensors} tensors and {num_pairs} metadata pairs are more than a model has")
        metadata: dict[str, Value] = {}
        for index in range(num_pairs):
            self._where = f"metadata pair {index}"
            key = self._string(MAX_NAME_BYTES)
            if key in metadata:
                self._refuse(f"the key {shown(key)} twice")
            self._where = shown(key)
            metadata[key] = self._value()
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {shown(alignment)}, not a power of two from 8 to {MAX_ALIGNMENT}")
        infos = [self._tensor(index) for index in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, self._place(infos, start, alignment), start, self._size)

    def _place(self, infos: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
        """Check the places of tensors; return these by name, with offsets in the file."""
        placed: dict[str, TensorInfo] = {}
        for info in infos:
            self._where = f"tensor {shown(info.name)}"
            if info.name in placed:
                self._refuse("stands twice in the table")
            if info.offset % alignment:
                self._refuse(f"its offset {info.offset} is not aligned to {alignment}")
            offset = start + info.offset
            if offset + info.nbytes > self._size:
                self._refuse(f"truncated: its data ends at byte {offset + info.nbytes} of {self._size}")
            placed[info.name] = TensorInfo(info.name, info.shape, info.type, offset, info.nbytes)
        end = start
        before = ""
        for info in sorted(placed.values(), key=lambda each: each.offset):
            if info.offset < end:
                self._where = f"tensor {shown(info.name)}"
                self._refuse(f"overlaps {shown(before)}")
            end = info.offset + info.nbytes
            before = info.name
        return placed

    def _tensor(self, index: int) -> TensorInfo:
        self._where = f"tensor {index}"
        name = self._string(MAX_NAME_BYTES)
        self._where = f"tensor {shown(name)}"
        dims = self._number("<I")
        if not 1 <= dims <= MAX_DIMS:
            self._refuse(f"has {dims} dimensions, not 1 to {MAX_DIMS}")
        shape = [self._number("<Q") for _ in range(dims)]
        number = self._number("<I")
        offset = self._number("<Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            self._refuse(f"is of type {_OTHER_TYPES.get(number, number)}, which Baton does not read")
        count = 1
        for length in shape:
            count *= length
        if not 1 <= count <= self._size * kind.block:  # a block of any type takes at least a byte
            self._refuse(f"shape {shape[::-1]} has more values than the file has room for, or none")
        if shape[0] % kind.block:
            self._refuse(f"rows of {shape[0]} values are not whole blocks of {kind.block} ({kind.name})")
        return TensorInfo(name, tuple(shape[::-1]), kind, offset, count // kind.block * kind.nbytes)

    def _value(self) -> Value:
        kind = self._number("<I")
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array()
        dtype = self._scalar_type(kind)
        scalar = np.frombuffer(self._read_bytes(dtype.itemsize), dtype)[0]
        if kind == _FLOAT32:
            return float(str(scalar))  # 1e-05 rather than 9.999999747378752e-06
        value: int | float = scalar.item()
        if kind != _BOOL:
            return value
        if value > 1:
            self._refuse(f"a bool of {value}")
        return bool(value)

    def _array(self) -> Value:
        kind = self._number("<I")
        count = self._number("<Q")
        if kind == _ARRAY:
            self._refuse("arrays of arrays are not supported")
        if kind == _STRING:
            if count > self._strings_left or count > self._remaining // 8:
                self._refuse(f"an array of {count} strings is more than the file has room for, or than a model has")
            self._strings_left -= count
            return [self._string(MAX_STRING_BYTES) for _ in range(count)]
        dtype = self._scalar_type(kind)
        if count > self._remaining // dtype.itemsize:
            self._refuse(f"truncated: an array of {count} values, and {self._remaining} bytes left")
        return np.frombuffer(self._read_bytes(count * dtype.itemsize), dtype)

    def _scalar_type(self, kind: int) -> np.dtype[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            self._refuse(f"a value of the unknown type {kind}")
        return dtype

    def _string(self, most: int) -> str:
        length = self._number("<Q")
        if length > most:
            self._refuse(f"a string of {length} bytes")
        try:
            return self._read_bytes(length).decode()
        except UnicodeDecodeError:
            self._refuse("a string that is not UTF-8")

    def _number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._read_bytes(struct.calcsize(layout)))[0]
        return value

    @property
    def _remaining(self) -> int:
        return self._size - self._at

    def _read_bytes(self, count: int) -> bytes:
        if count > self._remaining:
            self._refuse(f"truncated: {count} bytes wanted at byte {self._at} of {self._size}")
        data = self._data[self._at : self._at + count]
        self._at += count
        return data

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self._path}: {self._where}: {why}", field="model")


def shown(value: object) -> str:
    """Return a value of a file for an error: in one line, shortened."""
    value = value.tolist() if isinstance(value, np.ndarray) else value  # an array's own text has several lines
    return repr(value if len(str(value)) <= 80 else f"{str(value)[:77]}...")
