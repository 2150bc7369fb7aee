"""Reads tensors of safetensors files one by one, each into memory of its own; or maps those that stay as they are."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from baton.engine.models.checkpoint import WeightFile
from baton.errors import ConfigError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Types of safetensors that torch has."""
MAPPED_BYTES = 1 << 16
"""Bytes of a tensor from which on it is mapped, if it may be."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: WeightFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int


class TensorFiles:
    """The tensors of a checkpoint's files; a :class:`baton.engine.quantization.base.TensorSource`.

    What is read is in memory once, and gone when it is dropped. What is mapped is pages of its file: the system reads
    them when they are looked at, and takes them back when it needs memory, or here (:meth:`drop_pages`).

    Args:
        files: With headers that were checked.

    Raises:
        ConfigError: A tensor is in two files, of a type that torch has not, or of another size than its shape says.
    """

    def __init__(self, files: Iterable[WeightFile]) -> None:
        self._entries: dict[str, _Entry] = {}
        self._metadata: dict[str, str] = {}
        self._mappings: list[mmap.mmap] = []
        for file in files:
            header = json.loads(file.header)
            metadata = header.pop("__metadata__", None) or {}
            self._metadata.update({str(key): str(value) for key, value in metadata.items()})
            for name, item in header.items():
                if name in self._entries:
                    other = self._entries[name].file.path.name
                    raise ConfigError(f"{file.path.name}: {name}: is in {other} too", field="model")
                self._entries[name] = _entry(file, name, item)

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the files' headers say beside their tensors."""
        return self._metadata

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._entries.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._entries[name].shape

    def file_of(self, name: str) -> str:
        """The name of the file in which a tensor is."""
        return self._entries[name].file.path.name

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a tensor, or one of those that are stacked in it, into memory of its own.

        Raises:
            ConfigError: The file ended before its header says.
        """
        entry = self._entries[name]
        begin, size, shape = entry.begin, entry.size, entry.shape
        if index is not None:
            size //= shape[0]
            begin, shape = begin + index * size, shape[1:]
        data = np.empty(size, dtype=np.uint8)
        with entry.file.path.open("rb", buffering=0) as file:
            done = 0
            while done < size:
                count = os.preadv(file.fileno(), [data[done:]], begin + done)  # type: ignore[list-item]
                if not count:
                    raise ConfigError(f"{entry.file.path}: {name}: the file ends in it", field="model")
                done += count
        return torch.from_numpy(data).view(entry.dtype).view(shape) if size else torch.empty(shape, dtype=entry.dtype)

    def keep(self, name: str) -> torch.Tensor:
        """Return a tensor that stays as it is: pages of the file if it is large. It must not be written to.

        Raises:
            ConfigError: As :meth:`read`.
        """
        entry = self._entries[name]
        if entry.size < MAPPED_BYTES or entry.begin % entry.dtype.itemsize:
            return self.read(name)
        skip = entry.begin % mmap.ALLOCATIONGRANULARITY
        with entry.file.path.open("rb") as file:
            try:
                mapping = mmap.mmap(
                    file.fileno(),
                    skip + entry.size,
                    flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,  # torch has no tensors that cannot be written to
                    offset=entry.begin - skip,
                )
            except ValueError as error:
                raise ConfigError(f"{entry.file.path}: {name}: the file ends in it", field="model") from error
        self._mappings.append(mapping)
        data = torch.frombuffer(mapping, dtype=torch.uint8, offset=skip)
        return data.view(entry.dtype).view(entry.shape)

    def drop_pages(self) -> None:
        """Have no page of what :meth:`keep` mapped in memory, until it is looked at again."""
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)


def _entry(file: WeightFile, name: str, item: dict[str, object]) -> _Entry:
    dtype = DTYPES.get(str(item.get("dtype")))
    if dtype is None:
        raise ConfigError(f"{file.path.name}: {name}: dtype {item.get('dtype')} is not known", field="model")
    shape, offsets = item.get("shape"), item.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ConfigError(f"{file.path.name}: {name}: has no shape or data_offsets", field="model")
    begin, end = offsets
    wanted = prod(shape) * dtype.itemsize
    if begin < 0 or end - begin != wanted or file.data_start + end > file.size:
        why = f"{shape} of {item['dtype']} takes {wanted} bytes, data_offsets name {end - begin}"
        raise ConfigError(f"{file.path.name}: {name}: {why}", field="model")
    return _Entry(file, dtype, tuple(shape), file.data_start + begin, wanted)
