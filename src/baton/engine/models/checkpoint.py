"""A checkpoint's files: whether they are whole, and which checkpoint they are, without loading it.

Whether two instances may exchange KV hangs on ``model_digest``: it has to differ wherever weights do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.gguf import open_gguf
from baton.tokenizer.model_files import read_json

log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
WHOLE_BYTES = 256 * 1024
"""Tensors of up to this size count with every byte: norms, biases, scales, sinks, small adapters."""
SAMPLE_BYTES = 4096
SAMPLES_PER_TENSOR = 32
DIGESTS_NAME = ".baton-digests.json"
KEPT_FROM_BYTES = 1 << 30
"""Weights of a checkpoint from which on its digests are kept: less is read at once."""
_SCHEME = 2


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of weights: the JSON header of safetensors, and where its data begins and ends (bytes)."""

    path: Path
    header: bytes
    data_start: int
    size: int


def weight_files(folder: Path) -> list[WeightFile]:
    """Return the checkpoint's safetensors files, or its GGUF file, each checked to be as long as its header says.

    Raises:
        ConfigError: No safetensors file, a shard of the index is missing, or a file is truncated or corrupt.
    """
    if folder.is_file():
        return [_gguf_header(folder)]
    index = folder / INDEX_NAME
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index}: has no weight_map", field="model")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not (folder / name).exists():
                raise ConfigError(
                    f"model folder {str(folder)!r} lacks the weight file {name!r} of its index", field="model"
                )
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ConfigError(f"model folder {str(folder)!r} has no safetensors weights", field="model")
    return [read_header(folder / name) for name in names]


def read_header(path: Path) -> WeightFile:
    """Read and check a safetensors file's header: 8 bytes of length, JSON, then exactly the data that it describes.

    Raises:
        ConfigError: The file is truncated or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path}: not a safetensors file, or truncated ({size} bytes)", field="model")
        header = file.read(length)
    try:
        tensors = json.loads(header)
        end = max((item["data_offsets"][1] for name, item in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path}: corrupt safetensors header", field="model") from error
    if 8 + length + end != size:
        raise ConfigError(
            f"{path}: truncated or corrupt: {size} bytes, but its header describes {8 + length + end}", field="model"
        )
    return WeightFile(path, header, 8 + length, size)


def _gguf_header(path: Path) -> WeightFile:
    """Return a GGUF file with the header that it would have as safetensors, so that both are identified alike."""
    file = open_gguf(path).file
    start = file.header_bytes
    tensors = {
        name: {
            "dtype": info.type.name,
            "shape": info.shape,
            "data_offsets": [info.offset - start, info.offset - start + info.nbytes],
        }
        for name, info in file.tensors.items()
    }
    return WeightFile(path, json.dumps(tensors).encode(), start, file.size)


def model_digest(folder: Path, files: list[WeightFile]) -> str:
    """Return a SHA-256 (hex) over the config, and per weight file its name, size, header and data.

    Of its data every tensor counts: small ones with every byte, large ones with 32 samples of 4 KiB that are spread
    evenly, first and last bytes among them. So fine-tunes differ, also those of norms or biases alone, and a checkpoint
    of 100 GB costs some ten thousand small reads. A change of single rows of a large matrix may go unseen: it
    identifies a checkpoint and does not prove that no bit flipped.

    Those of files of a large checkpoint are kept beside them (``.baton-digests.json``, if the folder may be written),
    and hold as long as size, inode and times of change are the same.
    """
    digest = hashlib.sha256()
    config = read_json(folder / "config.json")
    for name in ("transformers_version", "_name_or_path"):
        config.pop(name, None)
    _add(digest, json.dumps(config, sort_keys=True).encode())
    large = sum(file.size for file in files) >= KEPT_FROM_BYTES
    kept = _kept_digests(folder) if large else {}
    found = {file.path.name: _file_entry(file, kept.get(file.path.name)) for file in files}
    for name, entry in found.items():
        _add(digest, name.encode())
        _add(digest, bytes.fromhex(entry["digest"]))
    if large and found != kept:
        _keep_digests(folder, found)
    return digest.hexdigest()


def _add(digest: Any, data: bytes | memoryview) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _file_entry(file: WeightFile, kept: Any) -> dict[str, Any]:
    """Return a file's digest and what it holds for: from ``kept`` if that is of this very file."""
    status = file.path.stat()
    state = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    if isinstance(kept, dict) and kept.get("state") == state and _is_digest(kept.get("digest")):
        return {"state": state, "digest": kept["digest"]}
    return {"state": state, "digest": _file_digest(file)}


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _file_digest(file: WeightFile) -> str:
    digest = hashlib.sha256()
    _add(digest, file.size.to_bytes(8, "little"))
    _add(digest, file.header)
    tensors = json.loads(file.header)
    spans = sorted(item["data_offsets"] for name, item in tensors.items() if name != "__metadata__")
    with file.path.open("rb") as handle:
        for begin, end in spans:
            for offset, size in _pieces(begin, end):
                _add(digest, os.pread(handle.fileno(), size, file.data_start + offset))
    return digest.hexdigest()


def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """Return offsets and sizes of what is read of a tensor."""
    size = end - begin
    if size <= WHOLE_BYTES:
        return [(begin, size)]
    last = size - SAMPLE_BYTES
    return [(begin + last * i // (SAMPLES_PER_TENSOR - 1), SAMPLE_BYTES) for i in range(SAMPLES_PER_TENSOR)]


def _kept_digests(folder: Path) -> dict[str, Any]:
    try:
        kept = json.loads((folder / DIGESTS_NAME).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.debug("%s cannot be read, digests are made anew: %s", folder / DIGESTS_NAME, error)
        return {}
    files = kept.get("files") if isinstance(kept, dict) and kept.get("scheme") == _SCHEME else None
    return files if isinstance(files, dict) else {}


def _keep_digests(folder: Path, files: dict[str, Any]) -> None:
    """Write the digests for the next start; several processes may do so at once."""
    path = folder / DIGESTS_NAME
    draft = path.with_name(f"{DIGESTS_NAME}.{os.getpid()}")
    try:
        try:
            draft.write_text(json.dumps({"scheme": _SCHEME, "files": files}, indent=1), encoding="ascii")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:  # a volume that may only be read: each start makes them anew
        log.debug("digests are not kept in %s: %s", folder, error)


def rope_digest(text_config: dict[str, Any]) -> str:
    """Return a digest (16 hex digits) of what decides the rotary embedding, from the text model's resolved config."""
    names = sorted(
        name
        for name in text_config
        if name.startswith(("rope", "rotary", "partial_rotary", "original_max_position")) or name == "no_rope_layers"
    )
    text = json.dumps({name: text_config[name] for name in names}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
