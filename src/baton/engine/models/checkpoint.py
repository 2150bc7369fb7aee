"""A model's files on disk: where they are, whether they are whole, and what identifies them. Loads no weights."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 256
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file: its JSON header as it stands in the file, and where its data begins and ends (bytes)."""

    path: Path
    header: bytes
    data_start: int
    size: int


def find_model(model: str) -> Path:
    """Return the folder of a model: a local path, or a hub name, whose files are fetched unless they are cached.

    Raises:
        ConfigError: There is no such folder, and the hub has no such model or cannot be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model {model!r} is a file, not a folder with a config.json", field="model")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"model {model!r}: no such folder", field="model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"model {model!r}: no such folder, and not available from the hub ({reason})", field="model"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        ConfigError: The file is missing, or is not a JSON object; names the file.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"model folder {str(path.parent)!r} has no {path.name}", field="model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})", field="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object", field="model")
    return value


def weight_files(folder: Path) -> list[WeightFile]:
    """Return the checkpoint's safetensors files, each checked to be as long as its header says.

    Raises:
        ConfigError: No safetensors file, a shard of the index is missing, or a file is truncated or corrupt.
    """
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


def model_digest(folder: Path, files: list[WeightFile]) -> str:
    """Return a SHA-256 (hex) over the config, and per weight file its name, size, header and samples of its data.

    The samples are spread evenly, 1 MiB in all per file, so that fine-tunes of one architecture differ and a
    checkpoint of 100 GB costs milliseconds. It identifies a checkpoint; it does not prove that no bit flipped.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    config = read_json(folder / "config.json")
    for name in ("transformers_version", "_name_or_path"):
        config.pop(name, None)
    add(json.dumps(config, sort_keys=True).encode())
    for file in files:
        add(file.path.name.encode())
        add(file.size.to_bytes(8, "little"))
        add(file.header)
        for sample in _samples(file):
            add(sample)
    return digest.hexdigest()


def _samples(file: WeightFile) -> list[bytes]:
    data = file.size - file.data_start
    with file.path.open("rb") as handle:
        if data <= SAMPLE_BYTES * SAMPLES_PER_FILE:
            handle.seek(file.data_start)
            return [handle.read()]
        last = data - SAMPLE_BYTES
        offsets = [file.data_start + last * i // (SAMPLES_PER_FILE - 1) for i in range(SAMPLES_PER_FILE)]
        return [os.pread(handle.fileno(), SAMPLE_BYTES, offset) for offset in offsets]


def rope_digest(text_config: dict[str, Any]) -> str:
    """Return a digest (16 hex digits) of what decides the rotary embedding, from the text model's resolved config."""
    names = sorted(
        name
        for name in text_config
        if name.startswith(("rope", "rotary", "partial_rotary", "original_max_position")) or name == "no_rope_layers"
    )
    text = json.dumps({name: text_config[name] for name in names}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
