"""A checkpoint's files: whether they are whole, which checkpoint they are, and their tensors one by one.

Whether two instances may exchange KV depends on ``model_digest``: it has to differ wherever weights do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.errors import ConfigError
from baton.tokenizer.model_files import read_json
from baton.tokenizer.weight_files import WeightFile

log = logging.getLogger(__name__)

WHOLE_BYTES = 256 * 1024
"""Tensors of at most this size are hashed whole: norms, biases, scales, sinks, small adapters."""
SAMPLE_BYTES = 4096
SAMPLES_PER_TENSOR = 32
DIGESTS_NAME = ".baton-digests.json"
STORED_FROM_BYTES = 1 << 30
"""Digests of checkpoints of at least this size are stored for the next start."""
_SCHEME = 2


def model_digest(folder: Path, files: list[WeightFile]) -> str:
    """Return a SHA-256 (hex) over the config, and per weight file its name, size, header and data.

    Small tensors are hashed whole, large ones by 32 samples of 4 KiB that are spread evenly and include the first and
    last bytes. So fine-tunes differ, also those of norms or biases alone, and a checkpoint of 100 GB takes some ten
    thousand small reads. A change of single rows of a large matrix may go unseen: the digest identifies a checkpoint,
    it does not prove that no bit flipped.

    The digests of a large checkpoint's files are stored beside them (``.baton-digests.json``, if the folder can be
    written), and are valid as long as size, inode and times of change are the same.
    """
    digest = hashlib.sha256()
    config = read_json(folder / "config.json")
    for name in ("transformers_version", "_name_or_path"):
        config.pop(name, None)
    _add_field(digest, json.dumps(config, sort_keys=True).encode())
    large = sum(file.size for file in files) >= STORED_FROM_BYTES
    stored = _read_digests(folder) if large else {}
    entries = {file.path.name: _file_entry(file, stored.get(file.path.name)) for file in files}
    for name, entry in entries.items():
        _add_field(digest, name.encode())
        _add_field(digest, bytes.fromhex(entry["digest"]))
    if large and entries != stored:
        _write_digests(folder, entries)
    return digest.hexdigest()


def _add_field(digest: Any, data: bytes | memoryview) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _file_entry(file: WeightFile, stored: Any) -> dict[str, Any]:
    """Return a file's digest and the state it is valid for; ``stored`` is used if it is of this very file."""
    status = file.path.stat()
    state = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    if isinstance(stored, dict) and stored.get("state") == state and _is_digest(stored.get("digest")):
        return {"state": state, "digest": stored["digest"]}
    return {"state": state, "digest": _file_digest(file)}


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _file_digest(file: WeightFile) -> str:
    digest = hashlib.sha256()
    _add_field(digest, file.size.to_bytes(8, "little"))
    _add_field(digest, file.header)
    tensors = json.loads(file.header)
    spans = sorted(item["data_offsets"] for name, item in tensors.items() if name != "__metadata__")
    with file.path.open("rb") as handle:
        for begin, end in spans:
            for offset, size in _pieces(begin, end):
                _add_field(digest, os.pread(handle.fileno(), size, file.data_start + offset))
    return digest.hexdigest()


def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """Return the offsets and sizes of the parts of a tensor that are hashed."""
    size = end - begin
    if size <= WHOLE_BYTES:
        return [(begin, size)]
    last = size - SAMPLE_BYTES
    return [(begin + last * i // (SAMPLES_PER_TENSOR - 1), SAMPLE_BYTES) for i in range(SAMPLES_PER_TENSOR)]


def _read_digests(folder: Path) -> dict[str, Any]:
    try:
        stored = json.loads((folder / DIGESTS_NAME).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.debug("%s cannot be read, digests are computed again: %s", folder / DIGESTS_NAME, error)
        return {}
    files = stored.get("files") if isinstance(stored, dict) and stored.get("scheme") == _SCHEME else None
    return files if isinstance(files, dict) else {}


def _write_digests(folder: Path, files: dict[str, Any]) -> None:
    """Write the digests for the next start; several processes may do so at once."""
    path = folder / DIGESTS_NAME
    draft = path.with_name(f"{DIGESTS_NAME}.{os.getpid()}")
    try:
        try:
            draft.write_text(json.dumps({"scheme": _SCHEME, "files": files}, indent=1), encoding="ascii")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:  # a read-only volume: each start computes them again
        log.debug("digests are not stored in %s: %s", folder, error)


def rope_digest(text_config: dict[str, Any]) -> str:
    """Return a digest (16 hex digits) of the rotary embedding's parameters in the text model's resolved config."""
    names = sorted(
        name
        for name in text_config
        if name.startswith(("rope", "rotary", "partial_rotary", "original_max_position")) or name == "no_rope_layers"
    )
    text = json.dumps({name: text_config[name] for name in names}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Tensors


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
"""Dtypes of torch by the names in safetensors headers."""
MAPPED_BYTES = 1 << 16
"""Tensors of at least so many bytes are mapped, if they may be."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor's place; ``name`` is its name in its file, if that is another one."""

    file: WeightFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int
    name: str = ""


class TensorFiles:
    """The tensors of a checkpoint's files; a :class:`baton.engine.quantization.base.TensorSource`.

    A tensor that is read is in memory once, until it is dropped. A mapped one is pages of its file: the system reads
    them on access, and drops them when it needs memory, or in :meth:`drop_pages`.

    Args:
        files: Files whose headers were checked.

    Raises:
        ConfigError: A tensor is in two files, of an unknown dtype, or of another size than its shape says.
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
        return self._metadata

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def file_of(self, name: str) -> str:
        """Return the name of a tensor's file, and the tensor's name there if that is another one."""
        entry = self._entries[name]
        return f"{entry.file.path.name}: {entry.name}" if entry.name else entry.file.path.name

    def renamed(self, names: Mapping[str, str]) -> TensorFiles:
        """Return some of the tensors under other names: ``names`` has their names here by the new ones."""
        view = TensorFiles(())
        view._metadata = self._metadata
        view._entries = {name: replace(self._entries[own], name=own) for name, own in names.items()}
        return view

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """See :meth:`.TensorSource.read`.

        Raises:
            ConfigError: The file ended before its header says.
        """
        entry = self._entries[name]
        begin = entry.begin
        size = entry.size
        shape = entry.shape
        if index is not None:
            size //= shape[0]
            begin = begin + index * size
            shape = shape[1:]
        data = np.empty(size, dtype=np.uint8)
        with entry.file.path.open("rb", buffering=0) as file:
            done = 0
            while done < size:
                count = os.preadv(file.fileno(), [data[done:]], begin + done)  # type: ignore[list-item]
                if not count:
                    raise ConfigError(f"{entry.file.path}: {name}: the file ends in it", field="model")
                done += count
        return torch.from_numpy(data).view(entry.dtype).view(shape) if size else torch.empty(shape, dtype=entry.dtype)

    def read_or_map(self, name: str) -> torch.Tensor:
        """Return a tensor that must not be written to: pages of its file if it is large.

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
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,  # torch has no read-only tensors
                    offset=entry.begin - skip,
                )
            except ValueError as error:
                raise ConfigError(f"{entry.file.path}: {name}: the file ends in it", field="model") from error
        self._mappings.append(mapping)
        data = torch.frombuffer(mapping, dtype=torch.uint8, offset=skip)
        return data.view(entry.dtype).view(entry.shape)

    def drop_pages(self) -> None:
        """Drop the pages of all mapped tensors from memory; the system reads them again on access."""
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)


def _entry(file: WeightFile, name: str, item: dict[str, object]) -> _Entry:
    dtype = DTYPES.get(str(item.get("dtype")))
    if dtype is None:
        raise ConfigError(f"{file.path.name}: {name}: dtype {item.get('dtype')} is not known", field="model")
    shape = item.get("shape")
    offsets = item.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ConfigError(f"{file.path.name}: {name}: has no shape or data_offsets", field="model")
    begin, end = offsets
    wanted = prod(shape) * dtype.itemsize
    if begin < 0 or end - begin != wanted or file.data_start + end > file.size:
        why = f"{shape} of {item['dtype']} takes {wanted} bytes, data_offsets name {end - begin}"
        raise ConfigError(f"{file.path.name}: {name}: {why}", field="model")
    return _Entry(file, dtype, tuple(shape), file.data_start + begin, wanted)
