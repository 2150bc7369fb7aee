"""Calibration: statistics of each linear's inputs, and scales folded into what precedes it.

Activation-aware scaling (Lin et al., AWQ, 2023): some inputs of a linear are far larger than others, so that errors of
the weights that they multiply count far more. Those weights are multiplied by some s, and become finer within their
group; the module that makes the input is divided by s, so that the layer computes the same. Here that is a norm, or the
up-projection of an MLP. Whether the layer computes the same is not concluded from names, but tried.

One decoder layer at a time has weights (:class:`LayeredModel`). The model is made on ``meta``, where it takes no
memory. Its embedding is read and its rotary tables are made; then the decoder runs with layers that only record their
calls. So each layer can be filled, run and emptied alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from baton.errors import ConfigError
from baton.quantize.schemes import Scheme, quantize

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
        self.prefix = f"{found[0]}." if found[0] else ""
        self._layers = found[1]

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
        layers = list(self._layers)
        notes = _Notes([])
        if not layers or base is self._module:
            raise ConfigError("calibration needs a model with a list of decoder layers", field="calibration")
        embedding = base.get_input_embeddings()
        outside = [module for module in base.modules() if not any(module in layer.modules() for layer in layers)]
        for module in outside:
            self._make_buffers(module)
        self._fill(embedding, f"{self._name_of(embedding)}.")
        first = []
        calls = []
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
        self._replaced = [layer]
        self._notes = notes
        self._last = last

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


SAMPLE_ROWS = 512
"""Inputs of a linear that candidates are compared on."""
POWERS = tuple(step / 10 for step in range(1, 10))
"""Of the inputs' mean magnitudes: what their scales are tried as."""
TOLERANCE = 1e-3
"""Relative difference of a layer's output from which on it does not compute the same."""


@dataclass(slots=True)
class Inputs:
    """Of a linear.

    Attributes:
        sample: float32 [rows, columns], some of them.
        energy: float32 [columns], the mean of their squares.
        source: Name of the norm that made them; empty: something else did.
    """

    sample: torch.Tensor
    energy: torch.Tensor
    source: str = ""


def run_layer(layer: nn.Module, hidden: Sequence[torch.Tensor], call: Call) -> list[torch.Tensor]:
    """Return a layer's outputs for each sequence [1, T, width]."""
    with torch.no_grad():
        outputs = [layer(each, *call.args, **call.options) for each in hidden]
    return [each[0] if isinstance(each, tuple) else each for each in outputs]


def observe(layer: nn.Module, hidden: Sequence[torch.Tensor], call: Call) -> dict[str, Inputs]:
    """Run sequences through a layer; returns what came into its linears, by their names."""
    samples: dict[str, list[torch.Tensor]] = {}
    sums: dict[str, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}
    sources: dict[str, str] = {}
    each_rows = -(-SAMPLE_ROWS // len(hidden))

    def note_input(name: str, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        step = max(1, len(rows) // each_rows)
        samples.setdefault(name, []).append(rows[::step][:each_rows].clone())
        total = rows.square().sum(0)
        sums[name] = sums[name] + total if name in sums else total
        sources[name] = next((norm for norm, output in made.items() if output is inputs[0]), "")

    def note_output(name: str, output: torch.Tensor) -> None:
        made[name] = output

    hooks = []
    for name, module in layer.named_modules():
        if type(module) is nn.Linear:
            hooks.append(module.register_forward_pre_hook(lambda _, x, name=name: note_input(name, x)))
        elif type(module).__name__.endswith("Norm"):
            hooks.append(module.register_forward_hook(lambda _, __, y, name=name: note_output(name, y)))
    try:
        run_layer(layer, hidden, call)
    finally:
        for hook in hooks:
            hook.remove()
    rows = sum(each.shape[1] for each in hidden)
    return {name: Inputs(torch.cat(samples[name]), sums[name] / rows, sources[name]) for name in samples}


@dataclass(frozen=True, slots=True)
class Folding:
    """What scales are tried with.

    Attributes:
        call: How the layer is called.
        hidden: One of its inputs, for which it must compute the same afterwards.
        scheme: How weights will be quantized.
        group: Columns that share a scale.
        dtype: Of what is stored.
        names: Of the linears that will be quantized.
    """

    call: Call
    hidden: torch.Tensor
    scheme: Scheme
    group: int
    dtype: torch.dtype
    names: frozenset[str]


def fold_scales(layer: nn.Module, inputs: dict[str, Inputs], how: Folding) -> int:
    """Scale weights of a layer, and divide what their inputs come from, and ``inputs``, by the same.

    Returns:
        How many scales were folded.
    """
    expected = run_layer(layer, [how.hidden], how.call)[0]
    count = 0
    for source, linears in list(_sources(layer, inputs, how.names)):
        modules: list[Any] = [layer.get_submodule(name) for name in linears]
        scales = _best_scales([module.weight.detach() for module in modules], inputs[linears[0]].sample, how)
        if scales is None:
            continue
        for offset in (0.0, 1.0):  # what a norm multiplies by may be its weight and 1
            touched = {source, *linears}
            before = {name: each.clone() for name, each in layer.state_dict().items() if _owner(name) in touched}
            used = _fold(layer.get_submodule(source), modules, scales, offset, how.dtype)
            found = run_layer(layer, [how.hidden], how.call)[0]
            if float((found - expected).norm()) <= TOLERANCE * float(expected.norm()):
                count += 1
                for name in linears:
                    inputs[name].sample /= used
                    inputs[name].energy /= used.square()
                break
            layer.load_state_dict(before, strict=False)
    return count


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _sources(layer: nn.Module, inputs: dict[str, Inputs], names: frozenset[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what linears' inputs come from, as far as it can be divided, and these linears."""
    norms = dict.fromkeys(each.source for each in inputs.values() if each.source)
    for norm in norms:
        linears = [name for name, each in inputs.items() if each.source == norm]
        if set(linears) <= names and getattr(layer.get_submodule(norm), "bias", None) is None:
            yield norm, linears
    for down in inputs:
        up = f"{down.removesuffix('down_proj')}up_proj"
        if down.endswith("down_proj") and {up, down} <= names:
            yield up, [down]


def _best_scales(weights: list[torch.Tensor], sample: torch.Tensor, how: Folding) -> torch.Tensor | None:
    """Return the scales [columns] that make least error in the linears' outputs; ``None``: none are best."""
    magnitudes = sample.abs().mean(0).clamp_min(1e-4)

    def error(scales: torch.Tensor) -> float:
        total = 0.0
        for weight in weights:
            rounded = quantize(weight * scales, how.scheme, how.group, how.dtype).dequantize() / scales
            total += float((sample @ (rounded - weight).T).square().sum())
        return total

    best = None
    least = error(torch.ones_like(magnitudes))
    for power in POWERS:
        scales = magnitudes.pow(power)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-4, 1e4)
        found = error(scales)
        if found < least:
            best = scales
            least = found
    return best


def _fold(source: Any, linears: Sequence[Any], scales: torch.Tensor, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """Divide a norm or the rows of a linear, and multiply columns of linears; returns by what, float32 [columns].

    A norm is stored in its own type: weights are multiplied by what it was divided by after that was rounded.
    """
    with torch.no_grad():
        if isinstance(source, nn.Linear):
            used = scales
            source.weight.div_(used[:, None])
            if source.bias is not None:
                source.bias.div_(used)
        else:
            whole = source.weight + offset
            rounded = (whole / scales - offset).to(dtype).float()
            used = whole / (rounded + offset)
            safe = torch.isfinite(used) & (used > 0)
            used = torch.where(safe, used, 1.0)
            source.weight.copy_(torch.where(safe, rounded, source.weight))
        for linear in linears:
            linear.weight.mul_(used)
    return used
