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
"""Reads a tensor of the checkpoint by its name; ``None``: the checkpoint has no such tensor."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a layer's call, without the hidden states.

    Attributes:
        args: Positional arguments.
        options: Keyword arguments.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]


class LayeredModel:
    """A causal language model of which one decoder layer at a time has weights.

    Args:
        config: transformers' configuration of the model.
        read: Reads the checkpoint's tensors.

    Attributes:
        prefix: Prefix of the names of the decoder layers' parameters, such as ``model.layers.``; empty: the model has
            no list of decoder layers.
    """

    def __init__(self, config: Any, read: Read) -> None:
        with torch.device("meta"):
            self._module: Any = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
        self._module.eval()
        self._read = read
        count = config.get_text_config(decoder=True).num_hidden_layers
        lists = [(name, each) for name, each in self._module.named_modules() if isinstance(each, nn.ModuleList)]
        name, self._layers = next(((name, each) for name, each in lists if len(each) == count), ("", nn.ModuleList()))
        self.prefix = f"{name}." if name else ""

    def linear_names(self) -> list[str]:
        """Return the names of all linear modules."""
        return [name for name, module in self._module.named_modules() if type(module) is nn.Linear]

    def __len__(self) -> int:
        return len(self._layers)

    def hidden_states(self, sequences: Sequence[list[int]]) -> tuple[list[torch.Tensor], list[Call]]:
        """Return the first layer's inputs float32 [1, T, width], one per sequence, and how each layer is called.

        Args:
            sequences: Token ids, all sequences of the same length.

        Raises:
            ConfigError: The model cannot be run layer by layer.
        """
        base = self._module.base_model
        layers = list(self._layers)
        recorded = _Calls([])
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
                self._layers[index] = _Recorder(layer, recorded, last=index == len(layers) - 1)
            with torch.no_grad():
                for tokens in sequences:
                    recorded.calls.clear()
                    try:
                        base(input_ids=torch.tensor([tokens]), use_cache=False)
                    except _AllRecordedError:
                        first.append(recorded.calls[0][0])
                    calls = [call for _, call in recorded.calls]
        finally:
            for index, layer in enumerate(layers):
                self._layers[index] = layer
            embedding.to("meta")
        return first, calls

    def fill(self, index: int) -> nn.Module:
        """Read a layer's parameters, as float32; return the layer.

        Raises:
            ConfigError: The checkpoint lacks a parameter of the layer.
        """
        layer = self._layers[index]
        for module in layer.modules():
            self._make_buffers(module)
        self._fill(layer, f"{self.prefix}{index}.")
        return layer

    def empty(self, index: int) -> None:
        """Free a layer's memory."""
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
        return next(str(name) for name, each in self._module.named_modules() if each is module)


class _AllRecordedError(Exception):
    """The last layer was called: all calls are recorded."""


@dataclass(slots=True)
class _Calls:
    """Recorded calls: the hidden states and the other arguments of each."""

    calls: list[tuple[torch.Tensor, Call]]


class _Recorder(nn.Module):
    """Replaces a layer: records its calls and returns its input."""

    def __init__(self, layer: nn.Module, recorded: _Calls, *, last: bool) -> None:
        super().__init__()
        self._replaced = [layer]
        self._recorded = recorded
        self._last = last

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"][0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        self._recorded.calls.append((hidden, Call(args, options)))
        if self._last:
            raise _AllRecordedError
        return hidden


SAMPLE_ROWS = 512
"""Number of inputs of a linear on which candidates are compared."""
POWERS = tuple(step / 10 for step in range(1, 10))
"""Powers of the inputs' mean magnitudes that are tried as scales."""
TOLERANCE = 1e-3
"""Largest relative difference of a layer's output at which it counts as computing the same."""


@dataclass(slots=True)
class Inputs:
    """Statistics of a linear's inputs.

    Attributes:
        sample: Some of the inputs, float32 [rows, columns].
        energy: Mean squares of all inputs, float32 [columns].
        source: Name of the norm whose output they are; empty: they are no norm's output.
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
    """Run sequences through a layer; return the inputs of its linears, by their names."""
    samples: dict[str, list[torch.Tensor]] = {}
    sums: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    sources: dict[str, str] = {}
    each_rows = -(-SAMPLE_ROWS // len(hidden))

    def note_input(name: str, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        step = max(1, len(rows) // each_rows)
        samples.setdefault(name, []).append(rows[::step][:each_rows].clone())
        total = rows.square().sum(0)
        sums[name] = sums[name] + total if name in sums else total
        sources[name] = next((norm for norm, output in outputs.items() if output is inputs[0]), "")

    def note_output(name: str, output: torch.Tensor) -> None:
        outputs[name] = output

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
    """The settings that scales are tried with.

    Attributes:
        call: Arguments of the layer's call.
        hidden: An input of the layer, for which its output must stay the same.
        scheme: How weights will be quantized.
        group: Number of columns that share a scale.
        dtype: Dtype of the stored tensors.
        names: Names of the linears that will be quantized.
    """

    call: Call
    hidden: torch.Tensor
    scheme: Scheme
    group: int
    dtype: torch.dtype
    names: frozenset[str]


def fold_scales(layer: nn.Module, inputs: dict[str, Inputs], how: Folding) -> int:
    """Scale weights of a layer, and divide the modules that make their inputs, and ``inputs``, by the same.

    Returns:
        The number of modules that scales were folded into.
    """
    expected = run_layer(layer, [how.hidden], how.call)[0]
    count = 0
    for source, linears in list(_sources(layer, inputs, how.names)):
        modules: list[Any] = [layer.get_submodule(name) for name in linears]
        scales = _best_scales([module.weight.detach() for module in modules], inputs[linears[0]].sample, how)
        if scales is None:
            continue
        for offset in (0.0, 1.0):  # a norm may multiply by its weight plus 1
            touched = {source, *linears}
            before = {name: each.clone() for name, each in layer.state_dict().items() if _owner(name) in touched}
            used = _fold(layer.get_submodule(source), modules, scales, offset, how.dtype)
            output = run_layer(layer, [how.hidden], how.call)[0]
            if float((output - expected).norm()) <= TOLERANCE * float(expected.norm()):
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
    """Yield modules that can be divided, each with the linears whose inputs it makes."""
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
    """Return the scales [columns] with the least error in the linears' outputs; ``None``: to scale does not help."""
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
        scaled_error = error(scales)
        if scaled_error < least:
            best = scales
            least = scaled_error
    return best


def _fold(source: Any, linears: Sequence[Any], scales: torch.Tensor, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """Divide a norm or the rows of a linear, and multiply columns of linears; return the factors, float32 [columns].

    A norm is stored in ``dtype``: the factors are those by which the rounded norm is smaller.
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
