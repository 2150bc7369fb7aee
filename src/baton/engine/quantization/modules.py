"""Modules that replace transformers' linear layers and experts where the weights are quantized.

They keep a weight's form and compute by its definition. Faster operators are made of the form, which is dropped then;
it can be read once more (:meth:`HeldWeight.load`), should the operator have to go.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

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


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return a weight whose tensors lie on a device: itself, where they do already."""
    if weight.values.device == device:
        return weight
    return dataclasses.replace(weight, **{name: tensor.to(device) for name, tensor in weight.tensors().items()})


def pick_rows(weight: QuantizedWeight, ranges: Sequence[range]) -> QuantizedWeight:
    """Return some ranges of rows below each other, as views where there is one range."""
    parts = [weight.cut_rows(each.start, each.stop) for each in ranges]
    return parts[0] if len(parts) == 1 else join_weights(parts)


def deinterleaved(weight: QuantizedWeight) -> QuantizedWeight:
    """Return even rows above odd ones: gates and ups that alternate, as GPT-OSS has them."""
    return join_weights([weight.every_other_row(0), weight.every_other_row(1)])


MAPPED_BYTES = 1 << 16
"""Bytes of a weight from which on it gets a mapping of its own."""
ALIGNMENT = 64
NARROW = {
    "scales": (torch.bfloat16, torch.float16),
    "zeros": (torch.int8, torch.uint8, torch.bfloat16, torch.float16),
}
"""Types that numbers of a group are kept in if these hold all of a weight's exactly: forms have them in float32."""


class KeptWeight:
    """A copy of a weight, which goes back to the system when it is dropped.

    It has a mapping of its own: the allocator would keep what is dropped among what was allocated meanwhile, the memory
    of two copies of a model while its operators are made of it, and afterwards. Scales and zeros take 8 or 16 bits
    where these hold them, one zero for all groups those of one number. On a GPU it is an ordinary copy.

    Args:
        weight: On any device.
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
        """Return the weight; what is not narrowed shares this one's memory."""
        wide: dict[str, Any] = {
            name: tensor.float() if name in NARROW and tensor.dtype != torch.float32 else tensor
            for name, tensor in self._tensors.items()
        }
        return self._form(**self._others, **wide)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes if any(each.stride()) else each.element_size() for each in self._tensors.values())


def return_free_memory() -> None:
    """Give back to the system what the C library keeps of what was freed, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in fewer bytes, if there are types for that."""
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
    """Copies in one piece of memory; one number that stands for all zeros takes none as it is."""
    copied = {name: tensor for name, tensor in tensors.items() if any(tensor.stride())}
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in copied.values()]
    kept = dict(tensors)
    for (name, tensor), part in zip(copied.items(), torch.split(_allocate(sum(sizes)), sizes), strict=True):
        kept[name] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return kept


def _allocate(size: int) -> torch.Tensor:
    if size < MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


ReadWeight = Callable[[], QuantizedWeight]
Change = Callable[[QuantizedWeight], QuantizedWeight]
RETURNED_BYTES = 8 << 20
"""Of weights that are read before memory that was freed meanwhile goes back to the system."""


def multiply(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
) -> torch.Tensor:
    """Return the layer's output [tokens, rows] of x [tokens, columns], by the definition."""
    if not len(x):
        return x.new_empty(0, weight.rows)
    return PlainQuantizedLinear(weight, bias, activations)(x)


class HeldWeight:
    """A weight that can be dropped and read again, with what is kept of it.

    Args:
        read: Reads it.

    Attributes:
        form: What it is, for people; known once it was read.
        device: Where it lies when it is read.
    """

    def __init__(self, read: ReadWeight) -> None:
        self._read = read
        self.form = ""
        self.device = torch.device("cpu")
        self._changes: list[Change] = []
        self._weight: KeptWeight | None = None

    def get(self) -> QuantizedWeight:
        """Return the weight: the one that is held, or read for this once."""
        if self._weight is not None:
            return self._weight.get()
        weight = self._read()
        for change in self._changes:
            weight = change(weight)
        self.form = form_name(weight)
        return to_device(weight, self.device)

    def hold(self) -> None:
        """Keep the weight in memory."""
        if self._weight is None:
            self._weight = KeptWeight(self.get())

    def move(self, device: torch.device) -> None:
        """Have the weight lie on another device, now and when it is read again."""
        self.device = device
        if self._weight is not None:
            self._weight = KeptWeight(to_device(self._weight.get(), device))

    def release(self) -> None:
        """Drop the weight from memory."""
        self._weight = None

    def change(self, change: Change) -> None:
        """Hold what a function makes of the weight, now and whenever it is read again.

        Raises:
            ValueError: The function refuses it.
        """
        self._weight = KeptWeight(change(self.get()))
        self._changes.append(change)

    @property
    def nbytes(self) -> int:
        """Bytes of what is held."""
        return 0 if self._weight is None else self._weight.nbytes


class QuantizedModule(nn.Module):
    """Stands in for an ``nn.Linear``; has no ``weight``, so that code which looks for one fails loudly.

    Args:
        read: Reads the weight [out_features, in_features].
        linear: What it stands in for; the bias is taken from it.
        activations: How inputs are rounded.
    """

    def __init__(self, read: ReadWeight, linear: nn.Linear, activations: ActivationScheme) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.activations = activations
        self.held = HeldWeight(read)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take x [..., in_features], return [..., out_features]."""
        out = multiply(x.reshape(-1, self.in_features), self.held.get(), self.bias, self.activations)
        return out.view(*x.shape[:-1], self.out_features)

    def keep_rows(self, ranges: Sequence[range]) -> None:
        """Keep ranges of outputs, one after the other."""
        self.held.change(partial(pick_rows, ranges=ranges))
        self.out_features = sum(map(len, ranges))
        if self.bias is not None:
            kept = torch.cat([self.bias[each.start : each.stop] for each in ranges])
            self.bias = nn.Parameter(kept.detach(), requires_grad=False)

    def keep_columns(self, kept: range) -> None:
        """Keep a range of inputs.

        Raises:
            ValueError: A group of columns that share a scale would be cut.
        """
        self.held.change(_column_cutter(kept))
        self.in_features = len(kept)


class QuantizedExpertsModule(nn.Module):
    """Stands in for a module of experts, gated MLPs; has no weights, so that code which looks for them fails loudly.

    Args:
        gate_up: Reads an expert's weight [2 * inner, hidden], gates first; one each.
        down: Reads an expert's weight [hidden, inner]; one each.
        inner: Columns of ``down``.
        activation: Between the two.
        activations: How inputs of both are rounded.
        biases: [E, 2 * inner] and [E, hidden], or ``None``.
        interleaved: Whether gates and ups stand in turns in the first of the biases.
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
        self.gate_up = [HeldWeight(read) for read in gate_up]
        self.down = [HeldWeight(read) for read in down]
        self.inner, self.activation, self.activations, self._interleaved = inner, activation, activations, interleaved
        both = biases or (None, None)
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        self.register_parameter("gate_up_proj_bias", both[0])
        self.register_parameter("down_proj_bias", both[1])

    @property
    def weights(self) -> list[HeldWeight]:
        """All of them."""
        return [*self.gate_up, *self.down]

    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the biases float32 [E, 2, inner], gates first, and [E, hidden], or ``None``."""
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return None
        both = self.gate_up_proj_bias.detach().float()
        halves = torch.stack([both[:, ::2], both[:, 1::2]], 1) if self._interleaved else both.view(len(both), 2, -1)
        return halves, self.down_proj_bias.detach().float()

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Take hidden_states [T, hidden], ids and weights [T, top_k], return [T, hidden].

        An id that is no expert's chooses none.
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
            made = multiply(inner, self.down[expert].get(), down_bias, self.activations[1])
            out.index_add_(0, tokens, made.float() * weights[tokens, choices, None].float())
        return out.to(hidden_states.dtype)

    def keep_inner(self, kept: range, *, first: bool) -> None:
        """Keep a range of the inner columns of all experts; only the first rank adds the biases of outputs.

        Raises:
            ValueError: A group of columns that share a scale would be cut.
        """
        rows = (kept, range(self.inner + kept.start, self.inner + kept.stop))
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            gate_up.change(partial(pick_rows, ranges=rows))
            down.change(_column_cutter(kept))
        if self.gate_up_proj_bias is not None and self.down_proj_bias is not None:
            both = self.gate_up_proj_bias.detach()
            part = both[:, 2 * kept.start : 2 * kept.stop] if self._interleaved else _cut_halves(both, kept)
            self.gate_up_proj_bias = nn.Parameter(part.clone(), requires_grad=False)
            if not first:
                self.down_proj_bias = nn.Parameter(torch.zeros_like(self.down_proj_bias), requires_grad=False)
        self.inner = len(kept)


def held_weights(module: nn.Module) -> list[HeldWeight]:
    """Return the quantized weights of a model."""
    found: list[HeldWeight] = []
    for child in module.modules():
        if isinstance(child, QuantizedModule):
            found.append(child.held)
        elif isinstance(child, QuantizedExpertsModule):
            found += child.weights
    return found


def place_weights(module: nn.Module, device: torch.device, *, hold: bool = True) -> None:
    """Have a model's quantized weights lie on a device, and with ``hold`` read them now."""
    since = 0
    for held in held_weights(module):
        held.device = device
        if hold:
            held.hold()
            since += held.nbytes
        if since >= RETURNED_BYTES:
            return_free_memory()
            since = 0


def form_name(weight: QuantizedWeight) -> str:
    """Return what a weight is, for people: its bits, and what shares a scale."""
    if isinstance(weight, Fp8Weight):
        rows, columns = (min(pair) for pair in zip(weight.block, weight.values.shape, strict=True))
        return f"fp8 per {rows}x{columns}"
    bits = {Int8Weight: "int8", Int4Weight: "int4", TableWeight: "4-bit table"}[type(weight)]
    return f"{bits} per {'row' if weight.group == weight.columns else weight.group}"


def quantized_layers(module: nn.Module) -> list[QuantizedModule | QuantizedExpertsModule]:
    """Return the layers of a model whose weights are quantized."""
    return [child for child in module.modules() if isinstance(child, QuantizedModule | QuantizedExpertsModule)]


def describe(layers: Sequence[QuantizedModule | QuantizedExpertsModule], operators: str) -> str:
    """Return what quantized layers are made of and computed by, for people; empty: there are none.

    Args:
        layers: The layers.
        operators: What computes them.
    """
    forms, inputs = Counter[str](), set[str]()
    for layer in layers:
        held = [layer.held] if isinstance(layer, QuantizedModule) else layer.weights
        schemes = [layer.activations] if isinstance(layer, QuantizedModule) else layer.activations
        forms.update(each.form for each in held)
        inputs.update("exact" if scheme.type is ActivationType.NONE else scheme.type.value for scheme in schemes)
    if not forms:
        return ""
    counts = ", ".join(f"{count} x {form}" for form, count in sorted(forms.items()))
    return f"quantized weights {counts} by {operators}, inputs {' and '.join(sorted(inputs))}"


def rounds_inputs(module: nn.Module) -> bool:
    """Whether a model has layers whose inputs are rounded."""
    return any(child.activations not in {EXACT, (EXACT, EXACT)} for child in _quantized(module))


@contextlib.contextmanager
def exact_inputs(module: nn.Module) -> Iterator[None]:
    """Have a model's layers take their inputs as they are."""
    schemes = [(child, child.activations) for child in _quantized(module)]
    try:
        for child, _ in schemes:
            child.activations = EXACT if isinstance(child, QuantizedModule) else (EXACT, EXACT)
        yield
    finally:
        for child, activations in schemes:
            child.activations = activations


def _quantized(module: nn.Module) -> list[Any]:
    return [child for child in module.modules() if isinstance(child, QuantizedModule | QuantizedExpertsModule)]


def _column_cutter(kept: range) -> Change:
    def cut(weight: QuantizedWeight) -> QuantizedWeight:
        return weight.cut_columns(kept.start, kept.stop)

    return cut


def _cut_halves(both: torch.Tensor, kept: range) -> torch.Tensor:
    inner = both.shape[1] // 2
    return torch.cat([both[:, at + kept.start : at + kept.stop] for at in (0, inner)], 1)
