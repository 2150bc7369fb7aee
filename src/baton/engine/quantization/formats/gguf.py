"""GGUF files as checkpoints: plain parameters as tensors, quantized linear weights as they are packed.

The types as ggml defines them (https://github.com/ggml-org/ggml, ``ggml-common.h`` and ``ggml-quants.c``). A block of
32 values has a scale d in float16, some a minimum m as well: ``w = d * (q - offset)`` or ``w = d * q + m``. A K-quant's
block of 256 has scales and minima of its groups as small integers, times d and dmin. Four bits and less become
:class:`Int4Weight`, more :class:`Int8Weight`; scales of groups are multiplied out to float32.

Where a group's scale is 0, or negligible beside its minimum, all its values are that minimum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from baton.engine.quantization.base import StoredWeight
from baton.errors import ConfigError
from baton.gguf import GgufFile, TensorInfo, TensorRule, open_gguf, tensor_rules
from baton_kernels.quantization import Int4Weight, Int8Weight, QuantizedWeight, pack_nibbles

_NEGLIGIBLE = 1e7
"""Ratio of minimum and scale from which on the values make no difference in float32."""

Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
"""Values uint8 or int8 [rows, blocks, block], scales and zeros float32 [rows, blocks, groups]; bits of a value."""


def unpack_blocks(kind: str, data: torch.Tensor) -> Int4Weight | Int8Weight:
    """Return the weight in the blocks of a matrix.

    Args:
        kind: The tensor type, such as ``Q4_K``.
        data: uint8 [rows, bytes of a row].

    Raises:
        ValueError: A scale is infinite or NaN.
    """
    size, function = _BLOCK_TYPES[kind]
    values, scales, zeros, bits = function(data.view(len(data), -1, size))
    if not bool(torch.isfinite(scales).all() & torch.isfinite(zeros).all()):
        raise ValueError("a scale is infinite or no number")
    rows = len(data)
    values = values.reshape(rows, -1)
    scales = scales.reshape(rows, -1).contiguous()
    zeros = zeros.reshape(rows, -1).contiguous()
    if bits == 4:
        return Int4Weight(pack_nibbles(values), scales, zeros)
    return Int8Weight(values.to(torch.int8), scales, zeros if bool(zeros.any()) else None)


def is_quantized(kind: str) -> bool:
    """Whether a tensor type stores values in blocks with scales."""
    return kind in _BLOCK_TYPES


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at a byte of each block, as float32 [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Return nibbles [..., 2 * n] of bytes [..., n]: for each run of bytes the low ones, then the high ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return torch.stack([runs & 15, runs >> 4], -2).flatten(-3)


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return pairs of bits [..., 4 * n] of bytes [..., n]: for each 32 bytes the lowest pairs, then the next ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, 32)
    return torch.stack([(runs >> shift) & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Return bits [..., 8 * n] of bytes [..., n]: the lowest bits, then the next ones, and so on."""
    return torch.cat([(packed >> shift) & 1 for shift in range(8)], -1)


def _scale_with_offset(values: torch.Tensor, scales: torch.Tensor, zero: int, bits: int) -> Unpacked:
    """Return ``w = scale * (value - zero)``; groups with a scale of 0 become 0."""
    values, empty = _clear_groups(values, scales == 0, zero)
    return values, torch.where(empty, 1.0, scales), torch.full_like(scales, zero), bits


def _scale_with_minimum(values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, bits: int) -> Unpacked:
    """Return ``w = scale * value - minimum``."""
    values, constant = _clear_groups(values, minima.abs() >= scales.abs() * _NEGLIGIBLE, 0)
    some = minima != 0
    zeros = torch.where(constant, some.float(), minima / scales)
    return values, torch.where(constant, torch.where(some, minima, 1.0), scales), zeros, bits


def _clear_groups(values: torch.Tensor, groups: torch.Tensor, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Set all values of the marked groups to ``value``; return values and groups."""
    if bool(groups.any()):
        grouped = values.reshape(*groups.shape, -1)
        values = torch.where(groups[..., None], torch.full_like(grouped, value), grouped).flatten(-2)
    return values, groups


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    return _scale_with_offset(_nibbles(blocks[..., 2:], 16), _half(blocks, 0), 8, 4)


def _q4_1(blocks: torch.Tensor) -> Unpacked:
    return _scale_with_minimum(_nibbles(blocks[..., 4:], 16), _half(blocks, 0), -_half(blocks, 2), 4)


def _fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """Return fifth bits [..., 32], as 16 or 0, of four bytes: value i has bit i % 8 of byte i // 8."""
    return torch.stack([((high >> shift) & 1) << 4 for shift in range(8)], -1).flatten(-2)


def _q5_0(blocks: torch.Tensor) -> Unpacked:
    values = (_nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16
    return _scale_with_offset(values, _half(blocks, 0), 0, 8)


def _q5_1(blocks: torch.Tensor) -> Unpacked:
    values = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return _scale_with_minimum(values, _half(blocks, 0), -_half(blocks, 2), 8)


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    return _scale_with_offset(blocks[..., 2:].view(torch.int8), _half(blocks, 0), 0, 8)


def _q2_k(blocks: torch.Tensor) -> Unpacked:
    packed = blocks[..., :16]
    scales = _half(blocks, 80) * (packed & 15)
    minima = _half(blocks, 82) * (packed >> 4)
    return _scale_with_minimum(_pairs(blocks[..., 16:80]), scales, minima, 4)


def _q3_k(blocks: torch.Tensor) -> Unpacked:
    low = _nibbles(blocks[..., 96:104], 8)
    runs = blocks[..., 104:108]
    high = torch.cat([(runs >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    scales = _half(blocks, 108) * ((low | (high << 4)).to(torch.int8) - 32)
    values = _pairs(blocks[..., 32:96]) + (_bits(blocks[..., :32]) << 2)  # 0 to 7 stands for -4 to 3
    return _scale_with_offset(values + 4, scales, 8, 4)


def _six_bit_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima float32 [rows, blocks, 8] from d, dmin and 12 bytes, the last 4 with high bits."""
    low, high, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([low & 63, (both & 15) | ((low >> 2) & 48)], -1)
    minima = torch.cat([high & 63, (both >> 4) | ((high >> 2) & 48)], -1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    return _scale_with_minimum(_nibbles(blocks[..., 16:], 32), *_six_bit_scales(blocks), 4)


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    values = _nibbles(blocks[..., 48:], 32) | (_bits(blocks[..., 16:48]) << 4)
    return _scale_with_minimum(values, *_six_bit_scales(blocks), 8)


def _q6_k(blocks: torch.Tensor) -> Unpacked:
    values = _nibbles(blocks[..., :128], 64) | (_pairs(blocks[..., 128:192]) << 4)
    scales = _half(blocks, 208) * blocks[..., 192:208].view(torch.int8)
    return _scale_with_offset(values.to(torch.int8) - 32, scales, 0, 8)


_BLOCK_TYPES: Mapping[str, tuple[int, Callable[[torch.Tensor], Unpacked]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and the function that unpacks it, by tensor type."""


# Files


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDING = "token_embd.weight"
_TILE_BYTES = 1 << 24
"""Bytes of a quantized matrix that are dequantized at a time."""


class GgufSource:
    """The parameters of one file under their names in transformers' modules.

    Implements :class:`~baton.engine.quantization.base.TensorSource`. Quantized embeddings become plain, for they are
    looked up rather than multiplied; quantized linear weights are in :meth:`stored_weights`.

    Args:
        path: The file.
        dtype: Type of plain parameters.

    Raises:
        ConfigError: The file or its architecture cannot be used; names the file and the key or tensor.
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
        self._packed = {name for name, (info, _) in self._infos.items() if _stays_packed(info)}

    @property
    def metadata(self) -> Mapping[str, str]:
        return {}

    def names(self) -> Iterable[str]:
        return self._infos.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._infos[name][0].shape

    def file_of(self, name: str) -> str:
        return self.file.path.name

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a parameter; a quantized one is dequantized.

        Raises:
            ConfigError: A scale is infinite or NaN, or the file was truncated.
        """
        info, rule = self._infos[name]
        if is_quantized(info.type.name):
            return self._dequantized(info, rule)
        value = self._read_bytes(info, rule).view(_PLAIN[info.type.name]).view(info.shape)
        if rule.added:
            value = value.float() - rule.added
        return value.to(self._dtype)

    def read_or_map(self, name: str) -> torch.Tensor:
        return self.read(name)

    def stored_weights(self) -> list[StoredWeight]:
        """Return the weights that stay quantized."""
        weights = []
        for name in sorted(self._packed):
            info, rule = self._infos[name]
            rows, columns = info.shape
            read = functools.partial(self._read_weight, info, rule)
            weights.append(StoredWeight(name, (rows, columns), (name,), read))
        return weights

    def _read_weight(self, info: TensorInfo, rule: TensorRule, _: int) -> QuantizedWeight:
        return self._unpack(info, self._read_bytes(info, rule))

    def _dequantized(self, info: TensorInfo, rule: TensorRule) -> torch.Tensor:
        """Return a quantized matrix in the model's dtype, dequantized tile by tile."""
        raw = self._read_bytes(info, rule)
        weight = torch.empty(info.shape, dtype=self._dtype)
        step = max(1, _TILE_BYTES // raw.shape[1])
        for at in range(0, len(raw), step):
            weight[at : at + step] = self._unpack(info, raw[at : at + step]).dequantize(self._dtype)
        return weight

    def _unpack(self, info: TensorInfo, raw: torch.Tensor) -> QuantizedWeight:
        try:
            return unpack_blocks(info.type.name, raw)
        except ValueError as error:
            raise ConfigError(f"{self.file.path}: tensor {info.name}: {error}", field="model") from error

    def _read_bytes(self, info: TensorInfo, rule: TensorRule) -> torch.Tensor:
        """Return a tensor's bytes, uint8 [rows, bytes of a row], rows in the order of transformers."""
        data = np.fromfile(self.file.path, np.uint8, info.nbytes, offset=info.offset)
        if len(data) != info.nbytes:
            raise ConfigError(f"{self.file.path}: tensor {info.name}: truncated while it was read", field="model")
        vector = len(info.shape) == 1 and not rule.heads  # in a permuted vector each value is a row
        raw = torch.from_numpy(data).view(1 if vector else info.shape[0], -1)
        if not rule.heads:
            return raw
        if len(raw) % (2 * rule.heads):
            raise ConfigError(
                f"{self.file.path}: tensor {info.name}: {len(raw)} rows are no pairs of {rule.heads} heads",
                field="model",
            )
        return raw.view(rule.heads, -1, 2, raw.shape[1]).transpose(1, 2).reshape(raw.shape)


def _stays_packed(info: TensorInfo) -> bool:
    return is_quantized(info.type.name) and info.name != _EMBEDDING
