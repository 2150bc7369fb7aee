"""Modules that replace transformers' linear layers and experts where the weights are quantized.

They keep a weight's form and compute by its definition. Faster operators are made of the form, which is dropped then;
it can be read once more (:meth:`ReloadableWeight.load`), should the operator have to go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from baton.allocator import return_free_memory
from baton_kernels.quantization import (
    EXACT,
    ActivationScheme,
    ActivationType,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
    join_weights,
)
from baton_kernels.quantized_linear import PlainQuantizedLinear
from baton_kernels.row_wise import Activation, gated_reference

ReadWeight = Callable[[], QuantizedWeight]
Change = Callable[[QuantizedWeight], QuantizedWeight]
RETURNED_BYTES = 8 << 20
"""Bytes of weights that are read before memory that was freed meanwhile is returned to the system."""
MAPPED_BYTES = 1 << 16
"""Weights of at least so many bytes get a memory mapping of their own."""
ALIGNMENT = 64
"""Bytes of a cache line."""
NARROW = {
    "scales": (torch.bfloat16, torch.float16),
    "zeros": (torch.int8, torch.uint8, torch.bfloat16, torch.float16),
}
"""Types that scales and zeros, float32 in the forms, are stored in if these hold all of a weight's values exactly."""


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return a weight with its tensors on a device; the same weight if they are there already."""
    if weight.values.device == device:
        return weight
    return dataclasses.replace(weight, **{name: tensor.to(device) for name, tensor in weight.tensors().items()})


def pick_rows(weight: QuantizedWeight, ranges: Sequence[range]) -> QuantizedWeight:
    """Return ranges of rows below each other; one range as views."""
    parts = [weight.cut_rows(each.start, each.stop) for each in ranges]
    return parts[0] if len(parts) == 1 else join_weights(parts)


def deinterleave_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """Return even rows above odd ones: gates and ups that alternate, as GPT-OSS has them."""
    return join_weights([weight.every_other_row(0), weight.every_other_row(1)])


class CompactWeight:
    """A copy of a weight in as little memory as holds all of its values, returned to the system when it is dropped.

    It has a mapping of its own: between later allocations the allocator would keep freed weights, the memory of two
    copies of a model while its operators are made of it, and afterwards. Scales and zeros take 8 or 16 bits where these
    hold their values, a zero that all groups share is stored once. On a GPU it is an ordinary copy.

    Args:
        weight: The weight, on any device.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        self._form = type(weight)
        tensors = weight.tensors()
        names = (field.name for field in dataclasses.fields(weight))
        self._others = {name: getattr(weight, name) for name in names if name not in tensors}
        on_cpu = weight.values.device.type == "cpu"
        if on_cpu:
            tensors = {name: _narrow(name, tensor) for name, tensor in tensors.items()}
        self._tensors = _copy_tensors(tensors) if on_cpu else {name: each.clone() for name, each in tensors.items()}

    def get(self) -> QuantizedWeight:
        """Return the weight; tensors that were not narrowed share this copy's memory."""
        wide: dict[str, Any] = {
            name: tensor.float() if name in NARROW and tensor.dtype != torch.float32 else tensor
            for name, tensor in self._tensors.items()
        }
        return self._form(**self._others, **wide)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes if any(each.stride()) else each.element_size() for each in self._tensors.values())


def _narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a narrower type, or as one value for all, if that is exact."""
    if name not in NARROW or not any(tensor.stride()) or not tensor.numel():
        return tensor
    if name == "zeros" and bool((tensor == tensor[0, 0]).all()):
        return tensor[:1, :1].clone().expand_as(tensor)
    for dtype in NARROW[name]:
        narrow = tensor.to(dtype)
        if torch.equal(narrow.float(), tensor):
            return narrow
    return tensor


def _copy_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors into one piece of memory; a single value that is expanded to all groups is not copied."""
    copied = {name: tensor for name, tensor in tensors.items() if any(tensor.stride())}
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in copied.values()]
    result = dict(tensors)
    for (name, tensor), part in zip(copied.items(), torch.split(_allocate(sum(sizes)), sizes), strict=True):
        result[name] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return result


def _allocate(size: int) -> torch.Tensor:
    if size < MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def multiply(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
) -> torch.Tensor:
    """Return a linear layer's output [tokens, rows] for x [tokens, columns], by the definition."""
    if not len(x):
        return x.new_empty(0, weight.rows)
    return PlainQuantizedLinear(weight, bias, activations)(x)


class ReloadableWeight:
    """A weight that can be dropped from memory and read again from the checkpoint.

    Args:
        read: Reads the weight from the checkpoint.

    Attributes:
        form: Name of the weight's form, for logs; empty until the weight was read.
        device: Device that the weight is read to.
    """

    def __init__(self, read: ReadWeight) -> None:
        self._read = read
        self.form = ""
        self.device = torch.device("cpu")
        self._changes: list[Change] = []
        self._weight: CompactWeight | None = None

    def get(self) -> QuantizedWeight:
        """Return the weight: the one in memory, or one that is read for this call only."""
        if self._weight is not None:
            return self._weight.get()
        weight = self._read()
        for change in self._changes:
            weight = change(weight)
        self.form = form_name(weight)
        return to_device(weight, self.device)

    def load(self) -> None:
        """Read the weight into memory, unless it is there."""
        if self._weight is None:
            self._weight = CompactWeight(self.get())

    def move(self, device: torch.device) -> None:
        """Move the weight to another device, now and whenever it is read again."""
        self.device = device
        if self._weight is not None:
            self._weight = CompactWeight(to_device(self._weight.get(), device))

    def release(self) -> None:
        """Drop the weight from memory."""
        self._weight = None

    def apply(self, change: Change) -> None:
        """Load the weight and replace it by a function's result, now and whenever it is read again.

        Raises:
            ValueError: The function refused the weight.
        """
        self._weight = CompactWeight(change(self.get()))
        self._changes.append(change)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in memory; 0 if it is not."""
        return 0 if self._weight is None else self._weight.nbytes


class QuantizedModule(nn.Module):
    """Replaces an ``nn.Linear``; has no ``weight``, so that code which looks for one fails loudly.

    Args:
        read: Reads the weight [out_features, in_features].
        linear: The layer that is replaced; its bias is used.
        activations: How inputs are rounded.
    """

    def __init__(self, read: ReadWeight, linear: nn.Linear, activations: ActivationScheme) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.activations = activations
        self.reloadable = ReloadableWeight(read)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [..., out_features] for x [..., in_features]."""
        out = multiply(x.reshape(-1, self.in_features), self.reloadable.get(), self.bias, self.activations)
        return out.view(*x.shape[:-1], self.out_features)

    def keep_rows(self, ranges: Sequence[range]) -> None:
        """Reduce the layer to ranges of its outputs, one after the other."""
        self.reloadable.apply(partial(pick_rows, ranges=ranges))
        self.out_features = sum(map(len, ranges))
        if self.bias is not None:
            bias = torch.cat([self.bias[each.start : each.stop] for each in ranges])
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def keep_columns(self, columns: range) -> None:
        """Reduce the layer to a range of its inputs.

        Raises:
            ValueError: A group of columns that share a scale would be cut.
        """
        self.reloadable.apply(_column_cutter(columns))
        self.in_features = len(columns)


class QuantizedExpertsModule(nn.Module):
    """Replaces a module of experts, gated MLPs; has no weights, so that code which looks for them fails loudly.

    Args:
        gate_up: Per expert, reads its weight [2 * inner, hidden], gates first.
        down: Per expert, reads its weight [hidden, inner].
        inner: Number of columns of ``down``.
        activation: Activation between both products.
        activations: How inputs of the first and of the second product are rounded.
        biases: [E, 2 * inner] and [E, hidden], or ``None``.
        interleaved: Whether gates and ups alternate in the first bias.
    """

    def __init__(
        self,
        gate_up: Sequence[ReadWeight],
        down: Sequence[ReadWeight],
        inner: int,
        activation: Activation,
        activations: tuple[ActivationScheme, ActivationScheme],
        biases: tuple[nn.Parameter, nn.Parameter] | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up = [ReloadableWeight(read) for read in gate_up]
        self.down = [ReloadableWeight(read) for read in down]
        self.inner = inner
        self.activation = activation
        self.activations = activations
        self._interleaved = interleaved
        both = biases or (None, None)
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        self.register_parameter("gate_up_proj_bias", both[0])
        self.register_parameter("down_proj_bias", both[1])

    @property
    def weights(self) -> list[ReloadableWeight]:
        """The weights of all experts."""
        return [*self.gate_up, *self.down]

    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the biases float32 [E, 2, inner], gates first, and [E, hidden], or ``None``."""
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return None
        both = self.gate_up_proj_bias.detach().float()
        halves = torch.stack([both[:, ::2], both[:, 1::2]], 1) if self._interleaved else both.view(len(both), 2, -1)
        return halves, self.down_proj_bias.detach().float()

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, hidden] of the experts ``ids`` [T, top_k] for hidden_states [T, hidden].

        An id outside of the experts' range chooses no expert.
        """
        out = torch.zeros(hidden_states.shape, device=hidden_states.device)
        biases = self.biases()
        for expert in torch.unique(ids).tolist():
            if not 0 <= expert < len(self.gate_up):
                continue
            tokens, choices = torch.where(ids == expert)
            up_bias, down_bias = (None, None) if biases is None else (biases[0][expert].flatten(), biases[1][expert])
            both = multiply(hidden_states[tokens], self.gate_up[expert].get(), up_bias, self.activations[0])
            inner = gated_reference(both, self.activation)
            outputs = multiply(inner, self.down[expert].get(), down_bias, self.activations[1])
            out.index_add_(0, tokens, outputs.float() * weights[tokens, choices, None].float())
        return out.to(hidden_states.dtype)

    def keep_inner(self, columns: range, *, first: bool) -> None:
        """Reduce all experts to a range of their inner columns.

        Args:
            columns: The inner columns of this rank.
            first: Whether this is the first rank, the only one that adds the biases of outputs.

        Raises:
            ValueError: A group of columns that share a scale would be cut.
        """
        rows = (columns, range(self.inner + columns.start, self.inner + columns.stop))
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            gate_up.apply(partial(pick_rows, ranges=rows))
            down.apply(_column_cutter(columns))
        if self.gate_up_proj_bias is not None and self.down_proj_bias is not None:
            both = self.gate_up_proj_bias.detach()
            interleaved = slice(2 * columns.start, 2 * columns.stop)
            part = both[:, interleaved] if self._interleaved else _cut_halves(both, columns)
            self.gate_up_proj_bias = nn.Parameter(part.clone(), requires_grad=False)
            if not first:
                self.down_proj_bias = nn.Parameter(torch.zeros_like(self.down_proj_bias), requires_grad=False)
        self.inner = len(columns)


def reloadable_weights(module: nn.Module) -> list[ReloadableWeight]:
    """Return the quantized weights of a model."""
    return [weight for layer in quantized_layers(module) for weight in _weights_of(layer)]


def place_weights(module: nn.Module, device: torch.device, *, in_memory: bool = True) -> None:
    """Set the device of a model's quantized weights, and with ``in_memory`` read them now."""
    bytes_read = 0
    for weight in reloadable_weights(module):
        weight.device = device
        if in_memory:
            weight.load()
            bytes_read += weight.nbytes
        if bytes_read >= RETURNED_BYTES:
            return_free_memory()
            bytes_read = 0


def form_name(weight: QuantizedWeight) -> str:
    """Return the name of a weight's form, for logs: its bits, and the values that share a scale."""
    if isinstance(weight, Fp8Weight):
        return f"fp8 per {min(weight.block[0], weight.rows)}x{weight.group}"
    bits = {Int8Weight: "int8", Int4Weight: "int4", TableWeight: "4-bit table"}[type(weight)]
    return f"{bits} per {'row' if weight.group == weight.columns else weight.group}"


def quantized_layers(module: nn.Module) -> list[QuantizedModule | QuantizedExpertsModule]:
    """Return the layers of a model whose weights are quantized."""
    return [child for child in module.modules() if isinstance(child, QuantizedModule | QuantizedExpertsModule)]


def describe(layers: Sequence[QuantizedModule | QuantizedExpertsModule], operators: str) -> str:
    """Return a line for logs about quantized layers; empty: there are none.

    Args:
        layers: The layers.
        operators: Name of the operators that compute them.
    """
    forms = Counter[str]()
    inputs = set[str]()
    for layer in layers:
        schemes = [layer.activations] if isinstance(layer, QuantizedModule) else layer.activations
        forms.update(weight.form for weight in _weights_of(layer))
        inputs.update("exact" if scheme.type is ActivationType.NONE else scheme.type.value for scheme in schemes)
    if not forms:
        return ""
    counts = ", ".join(f"{count} x {form}" for form, count in sorted(forms.items()))
    return f"quantized weights {counts} by {operators}, inputs {' and '.join(sorted(inputs))}"


def rounds_inputs(module: nn.Module) -> bool:
    """Whether a model has layers whose inputs are rounded."""
    return any(layer.activations not in {EXACT, (EXACT, EXACT)} for layer in quantized_layers(module))


@contextlib.contextmanager
def exact_inputs(module: nn.Module) -> Iterator[None]:
    """Let a model's quantized layers use their inputs without rounding."""
    layers: list[Any] = quantized_layers(module)
    schemes = [(child, child.activations) for child in layers]
    try:
        for child, _ in schemes:
            child.activations = EXACT if isinstance(child, QuantizedModule) else (EXACT, EXACT)
        yield
    finally:
        for child, activations in schemes:
            child.activations = activations


def _weights_of(layer: QuantizedModule | QuantizedExpertsModule) -> list[ReloadableWeight]:
    return [layer.reloadable] if isinstance(layer, QuantizedModule) else layer.weights


def _column_cutter(columns: range) -> Change:
    def cut_columns(weight: QuantizedWeight) -> QuantizedWeight:
        return weight.cut_columns(columns.start, columns.stop)

    return cut_columns


def _cut_halves(both: torch.Tensor, columns: range) -> torch.Tensor:
    """Return some columns of each half of [E, 2 * inner]."""
    inner = both.shape[1] // 2
    return torch.cat([both[:, start + columns.start : start + columns.stop] for start in (0, inner)], 1)
