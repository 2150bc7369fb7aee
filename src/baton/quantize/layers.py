"""A model's decoder layers one at a time: what comes into them, and their weights out of the checkpoint.

The model is made on ``meta``, where it takes no memory. Its embedding is read and its rotary tables are made; then the
decoder runs with layers that only note what they are called with. So each layer can be filled, run and emptied by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from baton.errors import ConfigError

Read = Callable[[str], torch.Tensor | None]
"""Reads a tensor of the checkpoint; ``None``: it has none of this name."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer is called with beside the hidden states."""

    args: tuple[Any, ...]
    options: dict[str, Any]


class LayeredModel:
    """A causal language model of which one decoder layer at a time has weights.

    Args:
        config: Of transformers.
        read: Of the checkpoint.

    Attributes:
        prefix: Of the names of its decoder layers' parameters, such as ``model.layers.``; empty: it has no such list.
    """

    def __init__(self, config: Any, read: Read) -> None:
        with torch.device("meta"):
            self._module: Any = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
        self._module.eval()
        self._read = read
        count = config.get_text_config(decoder=True).num_hidden_layers
        lists = [(name, each) for name, each in self._module.named_modules() if isinstance(each, nn.ModuleList)]
        found = next(((name, each) for name, each in lists if len(each) == count), ("", nn.ModuleList()))
        self.prefix, self._layers = (f"{found[0]}." if found[0] else ""), found[1]

    def linear_names(self) -> list[str]:
        """Return the names of all linear modules."""
        return [name for name, module in self._module.named_modules() if type(module) is nn.Linear]

    def __len__(self) -> int:
        return len(self._layers)

    def hidden_states(self, sequences: Sequence[list[int]]) -> tuple[list[torch.Tensor], list[Call]]:
        """Return the first layer's inputs float32 [1, T, width], one per sequence, and how each layer is called.

        Args:
            sequences: Token ids, all as many.

        Raises:
            ConfigError: The model is of a shape that cannot be run layer by layer.
        """
        base = self._module.base_model
        layers, notes = list(self._layers), _Notes([])
        if not layers or base is self._module:
            raise ConfigError("calibration needs a model with a list of decoder layers", field="calibration")
        embedding = base.get_input_embeddings()
        outside = [module for module in base.modules() if not any(module in layer.modules() for layer in layers)]
        for module in outside:
            self._make_buffers(module)
        self._fill(embedding, f"{self._name_of(embedding)}.")
        first, calls = [], []
        try:
            for index, layer in enumerate(layers):
                self._layers[index] = _Noted(layer, notes, last=index == len(layers) - 1)
            with torch.no_grad():
                for tokens in sequences:
                    notes.calls.clear()
                    try:
                        base(input_ids=torch.tensor([tokens]), use_cache=False)
                    except _AllNotedError:
                        first.append(notes.calls[0][0])
                    calls = [call for _, call in notes.calls]
        finally:
            for index, layer in enumerate(layers):
                self._layers[index] = layer
            embedding.to("meta")
        return first, calls

    def fill(self, index: int) -> nn.Module:
        """Read a layer's parameters, as float32; returns the layer.

        Raises:
            ConfigError: The checkpoint has no parameter of such a name.
        """
        layer = self._layers[index]
        for module in layer.modules():
            self._make_buffers(module)
        self._fill(layer, f"{self.prefix}{index}.")
        return layer

    def empty(self, index: int) -> None:
        """Give a layer's memory back."""
        self._layers[index].to("meta")

    def _fill(self, module: nn.Module, prefix: str) -> None:
        state = {}
        for name, _ in module.named_parameters():
            tensor = self._read(prefix + name)
            if tensor is None:
                why = f"the checkpoint has no tensor {prefix}{name}, so that this model cannot be run layer by layer"
                raise ConfigError(f"calibration: {why}: quantize it without --calibration", field="calibration")
            state[name] = tensor.float()
        try:
            module.load_state_dict(state, strict=False, assign=True)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ConfigError(f"the checkpoint does not fit its configuration: {reason}", field="model") from error

    def _make_buffers(self, module: nn.Module) -> None:
        """Make a module's buffers, which transformers computes where it initializes weights."""
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parameters = dict(module.named_parameters(recurse=False))
            module.to_empty(device="cpu", recurse=False)
            self._module._init_weights(module)
            for name, parameter in parameters.items():
                setattr(module, name, parameter)

    def _name_of(self, module: nn.Module) -> str:
        found: str = next(name for name, each in self._module.named_modules() if each is module)
        return found


class _AllNotedError(Exception):
    """The last layer was called: there is nothing more to learn."""


@dataclass(slots=True)
class _Notes:
    calls: list[tuple[torch.Tensor, Call]]


class _Noted(nn.Module):
    """Stands in for a layer: notes how it is called, and passes its input on."""

    def __init__(self, layer: nn.Module, notes: _Notes, *, last: bool) -> None:
        super().__init__()
        self._replaced, self._notes, self._last = [layer], notes, last

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"][0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Note a call."""
        self._notes.calls.append((hidden, Call(args, options)))
        if self._last:
            raise _AllNotedError
        return hidden
