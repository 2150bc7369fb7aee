"""A GGUF file as a checkpoint: its plain parameters as tensors, its quantized linear weights as they are packed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from baton.engine.gguf.blocks import is_quantized, unpack
from baton.engine.quantization.base import StoredWeight
from baton.errors import ConfigError
from baton.gguf import GgufFile, TensorInfo, TensorRule, open_gguf, tensor_rules
from baton_kernels.quantization import QuantizedWeight

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDING = "token_embd.weight"
_TILE_BYTES = 1 << 24
"""Of a quantized matrix that is made plain at once."""


class GgufSource:
    """The parameters of one file under their names in transformers' modules.

    Implements :class:`~baton.engine.quantization.base.TensorSource`. Quantized embeddings are plain, as tables that are
    looked up in rather than multiplied; quantized linear weights are in :meth:`stored`.

    Args:
        path: The file.
        dtype: Of plain parameters.

    Raises:
        ConfigError: The file or its architecture cannot be used; names the file and what in it.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.file: GgufFile = open_gguf(path).file
        self._dtype = dtype
        self._rules = tensor_rules(self.file)
        self._infos = {rule.name: (self.file.tensors[stored], rule) for stored, rule in self._rules.items()}
        for info, _ in self._infos.values():
            if is_quantized(info.type.name) and len(info.shape) != 2:
                where = f"{self.file.path}: tensor {info.name}"
                raise ConfigError(f"{where}: {info.type.name} with {len(info.shape)} dimensions, not 2", field="model")
        self._packed = {name for name, (info, _) in self._infos.items() if _is_packed(info)}

    @property
    def metadata(self) -> Mapping[str, str]:
        """Nothing: the configuration has it all."""
        return {}

    def names(self) -> Iterable[str]:
        """The names of all parameters."""
        return self._infos.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def dtype(self, name: str) -> torch.dtype:
        """The type that :meth:`read` returns."""
        return self._dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape."""
        return self._infos[name][0].shape

    def file_of(self, name: str) -> str:
        """The name of the file, for errors."""
        return self.file.path.name

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a parameter, one that is quantized in plain.

        Raises:
            ConfigError: A scale in it is no number.
        """
        info, rule = self._infos[name]
        if is_quantized(info.type.name):
            return self._dequantized(info, rule)
        value = self._raw(info, rule).view(_PLAIN[info.type.name]).view(info.shape)
        if rule.added:
            value = value.float() - rule.added
        return value.to(self._dtype)

    def keep(self, name: str) -> torch.Tensor:
        """Return a parameter that stays as it is: as :meth:`read` does, for it may be of another type than the file's.

        Raises:
            ConfigError: As :meth:`read`.
        """
        return self.read(name)

    def stored(self) -> list[StoredWeight]:
        """Return the quantized weights."""
        found = []
        for name in sorted(self._packed):
            info, rule = self._infos[name]
            rows, columns = info.shape
            read = functools.partial(self._weight, info, rule)
            found.append(StoredWeight(name, (rows, columns), (name,), read))
        return found

    def _weight(self, info: TensorInfo, rule: TensorRule, _: int) -> QuantizedWeight:
        return self._unpacked(info, self._raw(info, rule))

    def _dequantized(self, info: TensorInfo, rule: TensorRule) -> torch.Tensor:
        """Return a quantized matrix in float, made tile by tile."""
        raw = self._raw(info, rule)
        found = torch.empty(info.shape, dtype=self._dtype)
        step = max(1, _TILE_BYTES // raw.shape[1])
        for at in range(0, len(raw), step):
            found[at : at + step] = self._unpacked(info, raw[at : at + step]).dequantize(self._dtype)
        return found

    def _unpacked(self, info: TensorInfo, raw: torch.Tensor) -> QuantizedWeight:
        try:
            return unpack(info.type.name, raw)
        except ValueError as error:
            raise ConfigError(f"{self.file.path}: tensor {info.name}: {error}", field="model") from error

    def _raw(self, info: TensorInfo, rule: TensorRule) -> torch.Tensor:
        """Return a tensor's bytes, uint8 [rows, bytes of a row], rows in the order of transformers."""
        data = np.fromfile(self.file.path, np.uint8, info.nbytes, offset=info.offset)
        if len(data) != info.nbytes:
            raise ConfigError(f"{self.file.path}: tensor {info.name}: truncated while it was read", field="model")
        vector = len(info.shape) == 1 and not rule.heads  # of a permuted vector each value is a row
        raw = torch.from_numpy(data).view(1 if vector else info.shape[0], -1)
        if not rule.heads:
            return raw
        if len(raw) % (2 * rule.heads):
            raise ConfigError(
                f"{self.file.path}: tensor {info.name}: {len(raw)} rows are no pairs of {rule.heads} heads",
                field="model",
            )
        return raw.view(rule.heads, -1, 2, raw.shape[1]).transpose(1, 2).reshape(raw.shape)


def _is_packed(info: TensorInfo) -> bool:
    return is_quantized(info.type.name) and info.name != _EMBEDDING
