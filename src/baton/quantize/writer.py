"""Safetensors files that are written tensor by tensor, so that none but one is in memory.

The header stands before the data, and its length is known only at the end: room is left for it, and filled with
spaces, as the format allows (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch

from baton.engine.models.checkpoint import INDEX_NAME

MAX_FILE_BYTES = 4 << 30
"""From which on the next tensor begins another file."""
_HEADER_BYTES_PER_TENSOR = 512
_TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointWriter:
    """Writes a checkpoint's tensors, in the order in which they come, into as many files as it takes.

    Args:
        folder: Where to.
        num_tensors: At most so many will come.
    """

    def __init__(self, folder: Path, num_tensors: int) -> None:
        self._folder, self._reserved = folder, _HEADER_BYTES_PER_TENSOR * (num_tensors + 1)
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._at = 0
        self._paths: list[Path] = []
        self._file_of: dict[str, int] = {}
        self.nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file that is being written, whatever is in it."""
        if self._file is not None:
            self._file.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        if self._file is None or (self._at and self._at + len(data) > MAX_FILE_BYTES):
            self._end()
            path = self._folder / f"{len(self._paths)}.partial"
            self._paths.append(path)
            self._file, self._at, self._header = path.open("wb"), 0, {}
            self._file.seek(8 + self._reserved)
        self._header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + len(data)],
        }
        self._file.write(data.data)
        self._file_of[name] = len(self._paths) - 1
        self._at += len(data)
        self.nbytes += len(data)

    def finish(self) -> None:
        """End the last file, give all their names, and write the index if there are several."""
        self._end()
        count = len(self._paths)
        names = [
            "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            for number in range(1, count + 1)
        ]
        for path, name in zip(self._paths, names, strict=True):
            path.rename(self._folder / name)
        if count > 1:
            weight_map = {name: names[number] for name, number in self._file_of.items()}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _end(self) -> None:
        if self._file is None:
            return
        with self._file:
            header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}).encode()
            self._file.seek(0)
            self._file.write(self._reserved.to_bytes(8, "little") + header.ljust(self._reserved))
        self._file = None
