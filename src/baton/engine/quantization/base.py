"""What readers of quantized checkpoints share: where tensors come from, what is found in them, how they are refused.

A format is a function from its configuration and a :class:`TensorSource` to the quantized weights in it. They bear
the names of the plain parameters that they stand for; a checkpoint's tensors that belong to none of them are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton.errors import ConfigError
from baton_kernels.quantization import EXACT, ActivationScheme, QuantizedWeight

CONFIG_NAME = "quantization_config"


class TensorSource(Protocol):
    """The tensors of a checkpoint's files."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the files' headers say beside their tensors."""

    def names(self) -> Iterable[str]:
        """The names of all tensors."""

    def __contains__(self, name: object) -> bool: ...

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a tensor, or one of those that are stacked in it, into memory of its own."""

    def keep(self, name: str) -> torch.Tensor:
        """Return a tensor that stays as it is, in as little memory as it can, not to be written to."""

    def file_of(self, name: str) -> str:
        """The name of the file in which a tensor is, for errors."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight in a checkpoint.

    Attributes:
        parameter: Name of the plain parameter that it stands for, as the checkpoint would have it.
        shape: Rows (output features) and columns.
        tensors: Names of the tensors that it is made of.
        read: Reads the weight, or that of one expert.
        experts: How many are stacked; 0: it is a single one, and ``read`` takes 0.
        activations: How inputs are rounded.
        optional: Whether it stays plain where the model has no linear layer or experts for it.
    """

    parameter: str
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    read: Callable[[int], QuantizedWeight]
    experts: int = 0
    activations: ActivationScheme = EXACT
    optional: bool = False


ReadFormat = Callable[[dict[str, Any], TensorSource], list[StoredWeight]]
"""A format."""


def config_error(field: str, why: str) -> ConfigError:
    """Return an error about a field of ``quantization_config``."""
    return ConfigError(f"config.json: {CONFIG_NAME}.{field}: {why}", field="model")


def tensor_error(source: TensorSource, name: str, why: str) -> ConfigError:
    """Return an error about a tensor of a file, or about one that is missing there (then ``why`` says so)."""
    where = f"{source.file_of(name)}: " if name in source else ""
    return ConfigError(f"{where}{name}: {why}", field="model")


def need_tensor(source: TensorSource, name: str, owner: str, *dtypes: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a tensor that has to be there, of one of some types.

    Args:
        source: The checkpoint.
        name: Of the tensor.
        owner: The tensor that is of no use without it.
        dtypes: What it may be; nothing: anything.

    Raises:
        ConfigError: It is not there, or something else.
    """
    if name not in source:
        raise tensor_error(source, owner, f"{name.rpartition('.')[2]} is missing: no tensor {name}")
    if dtypes and source.dtype(name) not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(source.dtype(name)).removeprefix("torch.")
        raise tensor_error(source, name, f"must be {wanted}, is {found}")
    return source.shape(name)


def need_shape(source: TensorSource, name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape, which has to be one of some.

    Raises:
        ConfigError: It is another one.
    """
    shape = source.shape(name)
    if shape not in shapes:
        wanted = " or ".join(str(list(each)) for each in shapes)
        raise tensor_error(source, name, f"must be {wanted}, is {list(shape)}")
    return shape


def read_scales(source: TensorSource, name: str, index: int | None = None) -> torch.Tensor:
    """Read scales as float32.

    Raises:
        ConfigError: One of them is 0, infinite or no number.
    """
    return checked_scales(source, name, source.read(name, index).float())


def checked_scales(source: TensorSource, name: str, scales: torch.Tensor) -> torch.Tensor:
    """Return scales that are made of a tensor, if they can be such.

    Raises:
        ConfigError: As :func:`read_scales`.
    """
    if not bool(torch.isfinite(scales).all()):
        raise tensor_error(source, name, "a scale is infinite or no number")
    if bool((scales == 0).any()):
        raise tensor_error(source, name, "a scale is 0")
    return scales


def grouped(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Return scales or zeros of a tensor ([] or [1]), of rows ([rows] or [rows, 1]) or groups as [rows, groups]."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, groups).contiguous()
    return scales.reshape(rows, -1).contiguous()


def need_group(source: TensorSource, name: str, group: int, columns: int, field: str) -> int:
    """Return how many groups a row has.

    Raises:
        ConfigError: The size of a group does not divide the row.
    """
    if group < 1 or columns % group:
        raise tensor_error(source, name, f"{CONFIG_NAME}.{field} {group} does not divide its {columns} columns")
    return columns // group


def field_of(config: dict[str, Any], name: str, kinds: type | tuple[type, ...], default: Any, field: str = "") -> Any:
    """Return a field of a configuration, which has to be of some type.

    Args:
        config: The configuration.
        name: Of the field.
        kinds: What it may be; where ``bool`` is not among them it may not be one.
        default: Where there is none, or it is null.
        field: How errors name it, if not by ``name``.

    Raises:
        ConfigError: It is something else.
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
    """Return a field that is a list of names, or nothing.

    Raises:
        ConfigError: It is something else.
    """
    value = field_of(config, name, list, [])
    if not all(isinstance(item, str) for item in value):
        raise config_error(name, f"must be a list of names, got {value!r}")
    return list(value)


def skips(patterns: Iterable[str], module: str) -> bool:
    """Whether a module is one that lists like ``modules_to_not_convert`` name: in full, as its end, or as a part."""
    return any(
        module == pattern or module.endswith(f".{pattern}") or f".{pattern}." in f".{module}." for pattern in patterns
    )
