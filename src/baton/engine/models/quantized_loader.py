"""Loads quantized weights into a model: each goes where transformers would load the plain parameter that it stands for.

The model is made on ``meta``. Linear layers and experts whose weights are quantized are replaced there, transformers
loads what is left, and the quantized weights are read one by one when they are asked for (:meth:`.HeldWeight.hold`):
at no time is there a plain copy of the model.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from baton.engine.models.experts import gated_activation, knows_experts
from baton.engine.models.quirks import LATENT_PROJECTION, has_interleaved_experts
from baton.engine.quantization.base import StoredWeight, TensorSource, need_shape, tensor_error
from baton.engine.quantization.modules import QuantizedExpertsModule, QuantizedModule, ReadWeight
from baton.engine.quantization.parts import deinterleaved
from baton.errors import ConfigError
from baton_kernels.quantization import ActivationScheme, QuantizedWeight, join_weights

log = logging.getLogger(__name__)

READ_BY_OTHERS = {LATENT_PROJECTION, "gate", "router"}
"""Layers whose weight is taken by other code: of MLA's latents, which becomes a part of attention, and routers."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"


class LazyTensor:
    """A tensor that is read when transformers takes it, by ``tensor[...]``."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._read()


def load_quantized(
    model_class: Any, config: Any, source: TensorSource, stored: list[StoredWeight], dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """Load a model with quantized weights.

    Args:
        model_class: Of transformers.
        config: Its configuration, without ``quantization_config``.
        source: The checkpoint's tensors.
        stored: Those weights of it that are quantized, or shall be.
        dtype: Of all others, and of what is computed.

    Returns:
        The model, which holds none of its quantized weights yet, and what transformers says about loading the rest.

    Raises:
        ConfigError: A weight does not fit the model.
    """
    plain: dict[str, Any] = {}
    if model_class.config_class is config.sub_configs.get("text_config"):  # the text model of a composite checkpoint
        config = config.get_text_config()

    def place(model: Any) -> None:
        with torch.device("cpu"):
            plain.update(_Places(model, source, stored, dtype).fill())

    loading: Any = _that_places(model_class, place)
    module, info = loading.from_pretrained(
        None,
        config=config,
        state_dict=plain,  # filled while the model is made
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    module.__class__ = model_class
    return module, info


def _that_places(model_class: Any, place: Callable[[Any], None]) -> type:
    """Return a model's class under its own name whose instances have quantized modules in place from the start."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        place(self)

    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})


@dataclasses.dataclass(slots=True)
class _Experts:
    """The quantized weights of one module of experts: per parameter, expert and slot (gate or up), and its readers."""

    slots: dict[str, int] = dataclasses.field(default_factory=dict)
    found: dict[tuple[str, int, int], tuple[StoredWeight, int]] = dataclasses.field(default_factory=dict)

    def readers(self, parameter: str, count: int) -> list[list[tuple[StoredWeight, int]]] | None:
        """What each expert's weight is joined of; ``None``: something is missing."""
        slots = self.slots.get(parameter, 0)
        keys = [[(parameter, expert, slot) for slot in range(slots)] for expert in range(count)]
        if not slots or any(key not in self.found for row in keys for key in row):
            return None
        return [[self.found[key] for key in row] for row in keys]


class _Places:
    """Where the weights of a checkpoint go in a model."""

    def __init__(self, model: Any, source: TensorSource, stored: list[StoredWeight], dtype: torch.dtype) -> None:
        self._model, self._source, self._stored, self._dtype = model, source, stored, dtype
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state = model.state_dict()
        self._tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        self._experts: dict[str, _Experts] = {}
        self._plain: list[StoredWeight] = []
        self._placed: list[StoredWeight] = []

    def fill(self) -> dict[str, Any]:
        """Replace modules; return the plain tensors, and those that have to be plain, by the checkpoint's names."""
        for weight in self._stored:
            if not self._place(weight):
                self._leave(weight)
        for path, experts in self._experts.items():
            self._place_experts(path, experts)
        consumed = {name for weight in (*self._placed, *self._plain) for name in weight.tensors}
        for name in self._source.names():
            if name not in consumed and name in self._state:
                need_shape(self._source, name, tuple(self._state[name].shape))
        plain: dict[str, Any] = {
            name: LazyTensor(partial(self._source.keep, name)) for name in self._source.names() if name not in consumed
        }
        plain.update({weight.parameter: LazyTensor(partial(self._dequantized, weight)) for weight in self._plain})
        return plain

    def _target(self, name: str) -> tuple[str, str | None]:
        found = rename_source_key(name, self._renamings, self._converters, self._model.base_model_prefix, self._state)
        if found[0] not in self._state and name in self._state:
            return name, None
        return found

    def _place(self, weight: StoredWeight) -> bool:
        """Put a weight where it belongs; returns whether there is such a place."""
        target, pattern = self._target(weight.parameter)
        path, _, leaf = target.rpartition(".")
        if target not in self._state or target in self._tied:
            return False
        module = self._model.get_submodule(path)
        if pattern is None and type(module) is nn.Linear and leaf == "weight" and not weight.experts:
            if path.rpartition(".")[2] in READ_BY_OTHERS:
                return False
            self._check_shape(weight, (module.out_features, module.in_features))
            self._model.set_submodule(path, QuantizedModule(partial(weight.read, 0), module, weight.activations))
            self._placed.append(weight)
            return True
        if leaf in {GATE_UP, DOWN} and knows_experts(module):
            return self._collect(weight, module, path, leaf, pattern)
        return False

    def _collect(self, weight: StoredWeight, module: Any, path: str, leaf: str, pattern: str | None) -> bool:
        """Note a weight of one expert, or of all; returns whether it is one of those."""
        count, inner, hidden = _sizes(module)
        rows, columns = (2 * inner, hidden) if leaf == GATE_UP else (hidden, inner)
        if weight.optional and has_interleaved_experts(module):  # plain ones are transposed
            return False
        experts = self._experts.setdefault(path, _Experts())
        if pattern is None:
            if weight.experts != count:
                why = f"has {weight.experts} experts, the model {count}"
                raise tensor_error(self._source, weight.tensors[0], why)
            self._check_shape(weight, (rows, columns))
            experts.slots[leaf] = 1
            experts.found.update({(leaf, expert, 0): (weight, expert) for expert in range(count)})
            return True
        converter = next(entry for entry in self._converters if pattern in entry.source_patterns)
        slots = len(converter.source_patterns)
        number = re.search(r"experts\.(\d+)\.", weight.parameter)
        merges = [type(operation) for operation in converter.operations]
        if number is None or merges not in ([MergeModulelist], [MergeModulelist, Concatenate]):
            return False
        self._check_shape(weight, (rows // slots, columns))
        experts.slots[leaf] = slots
        experts.found[leaf, int(number[1]), converter.source_patterns.index(pattern)] = (weight, 0)
        return True

    def _place_experts(self, path: str, experts: _Experts) -> None:
        module: Any = self._model.get_submodule(path)
        count, inner, _ = _sizes(module)
        readers = [experts.readers(leaf, count) for leaf in (GATE_UP, DOWN)]
        activation = gated_activation(module)
        weights = list({id(weight): weight for weight, _ in experts.found.values()}.values())
        if None in readers or activation is None:
            for weight in weights:
                self._leave(weight)
            return
        self._placed += weights
        interleaved = has_interleaved_experts(module)
        biases = (module.gate_up_proj_bias, module.down_proj_bias) if interleaved else None
        gate_up, down = ([_joined(parts) for parts in rows or ()] for rows in readers)
        if interleaved:
            gate_up = [_changed(read, deinterleaved) for read in gate_up]
        schemes = [_one_scheme(weight.activations for parts in rows or () for weight, _ in parts) for rows in readers]
        made = QuantizedExpertsModule(
            gate_up, down, inner, activation, (schemes[0], schemes[1]), biases, interleaved=interleaved
        )
        self._model.set_submodule(path, made)

    def _leave(self, weight: StoredWeight) -> None:
        """Note that a weight is loaded in plain, for transformers has no layer that Baton could replace."""
        if weight.optional:
            return
        log.info("%s is dequantized: a plain weight is needed there", weight.parameter)
        self._plain.append(weight)

    def _dequantized(self, weight: StoredWeight) -> torch.Tensor:
        if not weight.experts:
            return weight.read(0).dequantize(self._dtype)
        stack = torch.stack([weight.read(expert).dequantize(self._dtype) for expert in range(weight.experts)])
        experts = self._model.get_submodule(self._target(weight.parameter)[0].rpartition(".")[0])
        return stack.mT.contiguous() if getattr(experts, "is_transposed", False) else stack

    def _check_shape(self, weight: StoredWeight, shape: tuple[int, int]) -> None:
        if weight.shape != shape:
            why = f"is of a weight {list(weight.shape)}, the model has {list(shape)}"
            raise tensor_error(self._source, weight.tensors[0], why)


def _sizes(experts: Any) -> tuple[int, int, int]:
    """Experts, inner columns and hidden size of a module of experts."""
    count, first, second = experts.down_proj.shape
    return (count, first, second) if has_interleaved_experts(experts) else (count, second, first)


def _joined(parts: list[tuple[StoredWeight, int]]) -> ReadWeight:
    def read() -> QuantizedWeight:
        weights = [weight.read(expert) for weight, expert in parts]
        try:
            return weights[0] if len(weights) == 1 else join_weights(weights)
        except ValueError as error:
            names = " and ".join(weight.parameter for weight, _ in parts)
            raise ConfigError(f"{names}: {error}", field="model") from error

    return read


def _changed(read: ReadWeight, change: Callable[[QuantizedWeight], QuantizedWeight]) -> ReadWeight:
    def changed() -> QuantizedWeight:
        return change(read())

    return changed


def _one_scheme(schemes: Iterable[ActivationScheme]) -> ActivationScheme:
    """How the inputs of all experts are rounded: of static scales the largest."""
    found = list(schemes)
    return max(found, key=lambda scheme: scheme.scale or 0.0)
