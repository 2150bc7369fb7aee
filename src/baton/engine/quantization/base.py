"""Shared by the readers of quantized checkpoints: the source of tensors, the weights that are found, checks and errors.

A format is a function from its configuration and a :class:`TensorSource` to the quantized weights in it. They have the
names of the plain parameters that they replace; a checkpoint's tensors that belong to none of them are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton.errors import ConfigError
from baton_kernels.quantization import EXACT, ActivationScheme, QuantizedWeight

CONFIG_NAME = "quantization_config"
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TensorSource(Protocol):
    """The tensors of a checkpoint's files."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the files' headers."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    def __contains__(self, name: object) -> bool: ...

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a tensor, or its part ``index`` along the first dimension, into memory of its own."""

    def read_or_map(self, name: str) -> torch.Tensor:
        """Return a tensor that must not be written to: pages of its file where possible, else as :meth:`read`."""

    def file_of(self, name: str) -> str:
        """Return the name of a tensor's file, for errors."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight in a checkpoint.

    Attributes:
        parameter: Name of the plain parameter that it replaces, as a plain checkpoint would have it.
        shape: Numbers of rows (output features) and columns.
        tensors: Names of the checkpoint's tensors that it consists of.
        read: Reads the weight of the expert with the given index; a single weight has index 0.
        experts: Number of stacked experts; 0: a single weight.
        activations: How inputs are rounded.
        optional: Whether the weight stays plain where the model has no linear layer or experts for it.
    """

    parameter: str
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    read: Callable[[int], QuantizedWeight]
    experts: int = 0
    activations: ActivationScheme = EXACT
    optional: bool = False


ReadFormat = Callable[[dict[str, Any], TensorSource], list[StoredWeight]]
"""Reads a format: (quantization_config, tensors) -> the quantized weights."""


def config_error(field: str, why: str) -> ConfigError:
    """Return an error about a field of ``quantization_config``."""
    return ConfigError(f"config.json: {CONFIG_NAME}.{field}: {why}", field="model")


def tensor_error(source: TensorSource, name: str, why: str) -> ConfigError:
    """Return an error about a tensor that a file has or, as ``why`` says then, lacks."""
    where = f"{source.file_of(name)}: " if name in source else ""
    return ConfigError(f"{where}{name}: {why}", field="model")


def need_tensor(source: TensorSource, name: str, owner: str, *dtypes: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a required tensor.

    Args:
        source: The checkpoint.
        name: Name of the tensor.
        owner: Name of the tensor that needs it, for errors.
        dtypes: Allowed dtypes; none: any dtype.

    Raises:
        ConfigError: The tensor is missing or of another dtype.
    """
    if name not in source:
        raise tensor_error(source, owner, f"{name.rpartition('.')[2]} is missing: no tensor {name}")
    if dtypes and source.dtype(name) not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = str(source.dtype(name)).removeprefix("torch.")
        raise tensor_error(source, name, f"must be {wanted}, is {actual}")
    return source.shape(name)


def need_matrix(
    source: TensorSource, name: str, *dtypes: torch.dtype, sides: str = "[rows, columns]"
) -> tuple[int, int]:
    """Return both sides of a required matrix.

    Args:
        source: The checkpoint.
        name: Name of the matrix.
        dtypes: Allowed dtypes; none: any dtype.
        sides: Names of both sides in errors; one may be a fraction, of a matrix whose elements hold several values.

    Raises:
        ConfigError: The tensor is missing, of another dtype, no matrix, or empty.
    """
    shape = need_tensor(source, name, name, *dtypes)
    if len(shape) != 2 or 0 in shape:
        raise tensor_error(source, name, f"must be {sides}, is {list(shape)}")
    return shape[0], shape[1]


def need_shape(source: TensorSource, name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape.

    Raises:
        ConfigError: The shape is none of ``shapes``.
    """
    shape = source.shape(name)
    if shape not in shapes:
        wanted = " or ".join(str(list(each)) for each in shapes)
        raise tensor_error(source, name, f"must be {wanted}, is {list(shape)}")
    return shape


def read_scales(source: TensorSource, name: str, index: int | None = None) -> torch.Tensor:
    """Read scales as float32.

    Raises:
        ConfigError: A scale is 0, infinite or NaN.
    """
    return check_scales(source, name, source.read(name, index).float())


def check_scales(source: TensorSource, name: str, scales: torch.Tensor) -> torch.Tensor:
    """Return ``scales``, which are computed from the tensor ``name``.

    Raises:
        ConfigError: A scale is 0, infinite or NaN.
    """
    if not bool(torch.isfinite(scales).all()):
        raise tensor_error(source, name, "a scale is infinite or no number")
    if bool((scales == 0).any()):
        raise tensor_error(source, name, "a scale is 0")
    return scales


def expand_to_groups(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Return scales or zeros per tensor ([] or [1]), row ([rows] or [rows, 1]) or group as [rows, groups]."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, groups).contiguous()
    return scales.reshape(rows, -1).contiguous()


def need_group(source: TensorSource, name: str, group: int, columns: int, field: str) -> int:
    """Return the number of groups of ``group`` columns in a row of ``columns``.

    Raises:
        ConfigError: The group size does not divide the columns; names the tensor and the field of the configuration.
    """
    if group < 1 or columns % group:
        raise tensor_error(source, name, f"{CONFIG_NAME}.{field} {group} does not divide its {columns} columns")
    return columns // group


def field_of(config: dict[str, Any], name: str, kinds: type | tuple[type, ...], default: Any, field: str = "") -> Any:
    """Return a field of a configuration.

    Args:
        config: The configuration.
        name: Name of the field.
        kinds: Allowed types; a bool is no int here.
        default: Value of a field that is missing or null.
        field: Name of the field in errors, if not ``name``.

    Raises:
        ConfigError: The field has another type.
    """
    value = config.get(name)
    if value is None:
        return default
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        wanted = " or ".join(kind.__name__ for kind in allowed)
        raise config_error(field or name, f"must be {wanted}, got {value!r}")
    return value


def names_field(config: dict[str, Any], name: str) -> list[str]:
    """Return a field that is a list of names; empty if it is missing.

    Raises:
        ConfigError: The field is no list of names.
    """
    value = field_of(config, name, list, [])
    if not all(isinstance(item, str) for item in value):
        raise config_error(name, f"must be a list of names, got {value!r}")
    return list(value)
