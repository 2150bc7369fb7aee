"""A checkpoint's files of weights: which there are, and whether they are whole, by their headers alone."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from baton.config.files import open_regular
from baton.errors import ConfigError, shown
from baton.gguf import open_gguf
from baton.tokenizer.model_files import read_json

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of weights.

    Attributes:
        path: The file.
        header: JSON header, as safetensors has it.
        data_start: Offset of the data in the file, in bytes.
        size: Length of the file, in bytes.
    """

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
            if Path(name).name != name or not os.path.exists(folder / name):
                message = (
                    f"model folder {str(folder)!r} lacks the weight file {shown(name)} of weight_map in {INDEX_NAME}"
                )
                raise ConfigError(message, field="model")
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ConfigError(f"model folder {str(folder)!r} has no safetensors weights", field="model")
    return [read_header(folder / name) for name in names]


def read_header(path: Path) -> WeightFile:
    """Read and check a safetensors file's header: 8 bytes of length, JSON, then exactly the data that it describes.

    Raises:
        ConfigError: The file cannot be read, is truncated or no safetensors file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{path}: not a safetensors file, or truncated ({size} bytes)", field="model")
            header = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", field="model") from error
    try:
        tensors = json.loads(header)
        end = max((item["data_offsets"][1] for name, item in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
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
