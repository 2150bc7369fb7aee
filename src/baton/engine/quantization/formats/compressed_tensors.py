"""``quant_method: compressed-tensors``: the formats of llm-compressor, which modules are told apart by targets.

A group of ``config_groups`` names modules (by path, ``re:`` pattern or class) and how their weights and inputs are
quantized. Compressed weights are ``weight`` (int8 or float8_e4m3fn) or ``weight_packed`` (int32 of 4- or 8-bit
integers; uint8 of two e2m1 values), with ``weight_scale``, ``weight_zero_point`` and, for act order, ``weight_g_idx``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.engine.quantization.base import (
    CONFIG_NAME,
    StoredWeight,
    TensorSource,
    config_error,
    field_of,
    names_field,
    tensor_error,
)
from baton.engine.quantization.formats.compressed_weights import WeightArgs, input_scheme, stored_weight, weight_args

log = logging.getLogger(__name__)

FORMATS = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "nvfp4-pack-quantized": "packed",
    "mxfp4-pack-quantized": "packed",
}
"""Which of a module's tensors hold its values in a format."""
MIXED, DENSE = "mixed-precision", "dense"
SPARSE = {"sparse-24-bitmask", "marlin-24", "sparse-bitmask"}
CLASSES = {"Linear", "torch.nn.Linear"}
"""Names of classes that target linear layers."""
PARTS = ("weight_packed", "weight_scale", "weight")


@dataclass(frozen=True, slots=True)
class _Group:
    """One of ``config_groups``."""

    name: str
    targets: list[str]
    args: WeightArgs
    inputs: dict[str, Any] | None


def read_compressed_tensors(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """See the module's docstring.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    _refuse_unknown(config)
    groups = list(_groups(config))
    ignored = names_field(config, "ignore")
    found, seen = [], set()
    for name in source.names():
        module, _, part = name.rpartition(".")
        if part not in PARTS or module in seen or not module:
            continue
        if part == "weight" and (len(source.shape(name)) != 2 or f"{module}.weight_packed" in source):
            continue
        seen.add(module)
        quantized = f"{module}.weight_scale" in source or f"{module}.weight_packed" in source
        group = _group_of(groups, ignored, module)
        if quantized and group is None:
            raise tensor_error(source, name, f"is quantized, but no target of {CONFIG_NAME}.config_groups names it")
        if group is not None and (quantized or _named(group, module)):
            activations = input_scheme(group.inputs, source, module, f"config_groups.{group.name}.input_activations")
            found.append(stored_weight(group.args, source, module, activations))
    return found


def _refuse_unknown(config: dict[str, Any]) -> None:
    sparsity = field_of(config, "sparsity_config", dict, {})
    names = {str(config.get("format")), str(sparsity.get("format")), str(sparsity.get("sparsity_structure"))}
    if names & (SPARSE | {"2:4"}):
        raise config_error(
            "sparsity_config", f"2:4 sparsity ({', '.join(sorted(names & (SPARSE | {'2:4'})))}) is not supported"
        )
    transforms = field_of(config, "transform_config", dict, {})
    if transforms.get("config_groups"):
        raise config_error(
            "transform_config", "transforms of weights and inputs (Hadamard rotations) are not supported"
        )
    status = config.get("quantization_status")
    if status is not None and status != "compressed":
        raise config_error("quantization_status", f"must be 'compressed', got {status!r}")


def _groups(config: dict[str, Any]) -> Iterator[_Group]:
    whole = field_of(config, "format", str, DENSE)
    groups = field_of(config, "config_groups", dict, {})
    if not groups:
        raise config_error("config_groups", "is empty")
    for name, group in groups.items():
        field = f"config_groups.{name}"
        if not isinstance(group, dict):
            raise config_error(field, f"must be a dict, got {group!r}")
        targets = names_field({f"{field}.targets": group.get("targets")}, f"{field}.targets")
        weights = field_of(group, "weights", dict, None, f"{field}.weights")
        if weights is None:
            raise config_error(f"{field}.weights", "is missing")
        if group.get("output_activations"):
            raise config_error(f"{field}.output_activations", "quantized outputs are not supported")
        form = field_of(group, "format", str, whole, f"{field}.format")
        form = whole if form == MIXED else form
        if form not in FORMATS:
            raise config_error(f"{field}.format", f"{form!r} is not supported, only {', '.join(FORMATS)}")
        args = weight_args(weights, form, f"{field}.weights")
        inputs = field_of(group, "input_activations", dict, None, f"{field}.input_activations")
        if inputs is not None and inputs.get("num_bits") == 4:
            log.warning("%s: inputs are multiplied as they are, not rounded to 4 bits", field)
        yield _Group(name, targets, args, inputs)


def _matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target[3:], module) is not None
    except re.error as error:
        raise config_error("config_groups", f"target {target!r} is no regular expression: {error}") from error


def _group_of(groups: list[_Group], ignored: list[str], module: str) -> _Group | None:
    """The group whose target names a module, by its path before its class."""
    if any(_matches(name, module) for name in ignored):
        return None
    for group in groups:
        if _named(group, module):
            return group
    return next((group for group in groups if CLASSES & set(group.targets)), None)


def _named(group: _Group, module: str) -> bool:
    return any(_matches(target, module) for target in group.targets if target not in CLASSES)
