"""Recurrent layers: their states are kept outside of transformers' modules, in slots, one slot per running sequence.

A recurrent layer (Mamba, gated delta rule, short convolution) has a state of fixed size in place of keys and values.
transformers' modules ask a cache for it and put it back, all by the same four methods. Here every such module gets a
small cache of its own per call: decodes of a step are one batch, and each part of a prompt is a call, so that ragged
batches and prompts in chunks need no other code. Modules that keep a state in any other way are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from baton.errors import InternalError

IntArray = npt.NDArray[np.int32]
Slots = torch.Tensor | slice
"""Slots, int64 [sequences]; neighbours in rising order as a slice, which is not copied."""
StateKey = tuple[Literal["conv", "recurrent"], int]
"""Kind of a state and its number in the module."""
States = dict[StateKey, torch.Tensor]
"""States of some sequences, each [sequences, ...]."""

SAME = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest |difference| / |output| of a module that computes in parts what it computes at once, by dtype."""
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_UPDATES = {"update_conv_state", "update_recurrent_state"}


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state that a module keeps of a sequence.

    Attributes:
        key: Kind and number.
        shape: Sizes, without the batch.
        dtype: Type of its elements.
    """

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class LayerCache:
    """The cache of one module for the sequences of one call, with transformers' interface for linear attention.

    Attributes:
        states: States after the call; before it those of the sequences' earlier tokens, empty if there are none.
    """

    def __init__(self, states: States) -> None:
        self.states = states
        self._begun = bool(states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution, [sequences, channels, width]; ``None``: no earlier tokens."""
        return self.states["conv", state_idx] if self._begun else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state, [sequences, ...]; ``None``: no earlier tokens."""
        return self.states["recurrent", state_idx] if self._begun else None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Add new inputs [sequences, channels, tokens] and return them behind the earlier ones that are seen."""
        if self._begun:
            earlier = self.states["conv", state_idx]
            width = earlier.shape[-1]
            inputs = torch.cat([earlier, conv_states], dim=-1)
        else:
            width = conv_kernel_size or conv_states.shape[-1]
            inputs = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.states["conv", state_idx] = inputs[..., -width:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Replace a recurrent state."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the sequences have earlier tokens."""
        return self._begun

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether more inputs are kept than a convolution sees: never."""
        return False


class StateArena:
    """Memory for the states of all recurrent layers, by slots.

    A snapshot of a slot is one string of bytes, state after state, each at a multiple of 16 bytes.

    Attributes:
        num_slots: Number of slots.
        snapshot_bytes: Bytes of a snapshot of a slot.
        device: Device of the memory.

    Args:
        layers: The states of each module.
        num_slots: Number of slots.
        device: Device of the memory.
    """

    def __init__(self, layers: Sequence[Sequence[StateShape]], num_slots: int, device: torch.device) -> None:
        self._tensors = [
            {each.key: torch.zeros((num_slots, *each.shape), dtype=each.dtype, device=device) for each in shapes}
            for shapes in layers
        ]
        self._places: list[tuple[torch.Tensor, int, int]] = []
        """States in the order of a snapshot, with the begin and the end of each."""
        begin = 0
        for shapes, tensors in zip(layers, self._tensors, strict=True):
            for shape in shapes:
                self._places.append((tensors[shape.key], begin, begin + shape.nbytes))
                begin += _aligned(shape.nbytes)
        self.snapshot_bytes = begin
        self.num_slots = num_slots
        self.device = device
        self._ends = np.zeros(num_slots, np.int64)
        """Tokens of a sequence after which each slot's states are: a state that is taken for another is noticed."""

    def check(self, slots: IntArray, starts: IntArray, ends: IntArray) -> None:
        """Note what a step does to slots.

        Args:
            slots: int32 [S], slot of each sequence.
            starts: int32 [S], tokens whose effect the state has.
            ends: int32 [S], tokens whose effect it has after the step.

        Raises:
            InternalError: A slot has the state after other tokens.
        """
        wrong = (starts > 0) & (self._ends[slots] != starts)
        if wrong.any():
            i = int(wrong.argmax())
            raise InternalError(f"slot {slots[i]} has the state after {self._ends[slots[i]]} tokens, not {starts[i]}")
        self._ends[slots] = ends

    def snapshot(self, slot: int) -> torch.Tensor:
        """Return a slot's states, uint8 [snapshot_bytes]."""
        data = torch.zeros(self.snapshot_bytes, dtype=torch.uint8, device=self.device)
        for tensor, begin, end in self._places:
            data[begin:end] = tensor[slot].reshape(-1).view(torch.uint8)
        return data

    def restore(self, slot: int, data: torch.Tensor, num_tokens: int) -> None:
        """Set a slot to the states of a snapshot, uint8 [snapshot_bytes] or more, taken after ``num_tokens`` tokens."""
        for tensor, begin, end in self._places:
            tensor[slot] = data[begin:end].view(tensor.dtype).view(tensor.shape[1:])
        self._ends[slot] = num_tokens

    def load(self, layer: int, slots: Slots) -> States:
        """Return a layer's states of some slots: copies, or the memory of neighbours itself."""
        return {key: tensor[slots] for key, tensor in self._tensors[layer].items()}

    def store(self, layer: int, slots: Slots, states: Mapping[StateKey, torch.Tensor]) -> None:
        """Store a layer's states of some slots, unless they were changed in place."""
        for key, tensor in self._tensors[layer].items():
            state = states[key]
            if isinstance(slots, torch.Tensor):
                tensor[slots] = state.to(tensor.dtype)
            elif (own := tensor[slots]).data_ptr() != state.data_ptr():
                own.copy_(state)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of a step that one call computes: a part of a prompt, or one token each of several sequences.

    Attributes:
        first: First token.
        end: End of the tokens.
        slots: Their slots, of one sequence or of one per token.
        num_sequences: Number of sequences.
        begun: Whether the sequences have earlier tokens.
    """

    first: int
    end: int
    slots: Slots
    num_sequences: int
    begun: bool


@dataclass(frozen=True, slots=True)
class _Step:
    parts: list[_Part]
    arena: StateArena


class RecurrentLayers:
    """The recurrent modules of a model, which take their states from slots from now on.

    Args:
        modules: The modules, from :func:`find_recurrent_modules`.

    Attributes:
        shapes: The states of each module; empty before :meth:`record_shapes`.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.shapes: list[tuple[StateShape, ...]] = []
        self._stepwise: set[int] = set()
        """Modules that go on from a state one token at a time only (Mamba's scan always begins with none)."""
        self._modules = list(modules)
        self._step: _Step | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a snapshot of a slot."""
        return sum(_aligned(shape.nbytes) for shapes in self.shapes for shape in shapes)

    def identity(self, block_bytes: int) -> str:
        """Return a short text that is the same where snapshots in blocks of this size are of the same states."""
        shapes = [(*shape.key, shape.shape, str(shape.dtype)) for shapes in self.shapes for shape in shapes]
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
        return f"{len(shapes)} states, {self.nbytes} bytes in blocks of {block_bytes}, {digest}"

    def why_not_served(self, attention: Collection[int]) -> str:
        """Return why the states cannot be kept in slots; empty: they can.

        Args:
            attention: Ids of the modules that attend.
        """
        for module, shapes in zip(self._modules, self.shapes, strict=True):
            if any(id(child) in attention for child in module.modules()):
                return f"its {type(module).__name__} attends and keeps a state outside the KV cache, both in one"
            if not shapes:
                return f"its {type(module).__name__} keeps recurrent state outside the KV cache"
        return ""

    @contextlib.contextmanager
    def record_shapes(self) -> Iterator[None]:
        """Have the next forward, of one sequence, show which states there are; modules are unchanged afterwards."""
        found: dict[int, States] = {}

        def record(layer: int, run: _Run, hidden: torch.Tensor) -> torch.Tensor:
            cache = LayerCache({})
            output = run(hidden, cache)
            found[layer] = cache.states
            if not _goes_on(run, hidden, output):
                self._stepwise.add(layer)
            return output

        with self._replaced(record):
            yield
        self.shapes = [
            tuple(StateShape(key, tuple(state.shape[1:]), state.dtype) for key, state in found.get(layer, {}).items())
            for layer in range(len(self._modules))
        ]

    def attach(self) -> None:
        """Have the modules compute with the states of :meth:`step` from now on."""
        compute = weakref.WeakMethod(self._compute)

        def call(layer: int, run: _Run, hidden: torch.Tensor) -> torch.Tensor:
            method = compute()
            if method is None:
                raise InternalError("the runner of this model is gone")
            return method(layer, run, hidden)

        for layer, module in enumerate(self._modules):
            _replace_forward(layer, module, call)

    def detach(self) -> None:
        """Have the modules compute as transformers' do again."""
        for module in self._modules:
            module.__dict__.pop("forward", None)

    @contextlib.contextmanager
    def step(
        self, query_starts: IntArray, context_lens: IntArray, slots: IntArray, arena: StateArena
    ) -> Iterator[None]:
        """Compute a step with the states of its sequences' slots.

        Args:
            query_starts: int32 [S + 1], where each sequence's new tokens begin.
            context_lens: int32 [S], tokens of each sequence with this step's included.
            slots: int32 [S], slot of each sequence.
            arena: Memory of the slots.

        Raises:
            InternalError: A slot has the state after other tokens.
        """
        starts = context_lens - np.diff(query_starts)
        arena.check(slots, starts, context_lens)
        self._step = _Step(_parts_of(query_starts, starts > 0, slots, arena.device), arena)
        try:
            yield
        finally:
            self._step = None

    def _compute(self, layer: int, run: _Run, hidden: torch.Tensor) -> torch.Tensor:
        """Compute a module over a step's tokens [1, T, width]."""
        if self._step is None:
            raise InternalError("a recurrent layer outside of a step")
        arena = self._step.arena
        outputs = []
        for part in self._step.parts:
            rows = hidden[0, part.first : part.end]
            rows = rows[:, None] if part.num_sequences > 1 else rows[None]
            cache = LayerCache(arena.load(layer, part.slots) if part.begun else {})
            compute = _run_stepwise if part.begun and layer in self._stepwise else _run_at_once
            outputs.append(compute(run, rows, cache).reshape(1, part.end - part.first, -1))
            arena.store(layer, part.slots, cache.states)
        return torch.cat(outputs, dim=1)

    @contextlib.contextmanager
    def _replaced(self, call: _Call) -> Iterator[None]:
        for layer, module in enumerate(self._modules):
            _replace_forward(layer, module, call)
        try:
            yield
        finally:
            self.detach()


_Run = Callable[[torch.Tensor, LayerCache], torch.Tensor]
"""Runs a module over hidden states [sequences, tokens, width] with a cache; returns what it returns for them."""
_Call = Callable[[int, _Run, torch.Tensor], torch.Tensor]
"""Takes the number of a module, what runs it, and hidden states [1, T, width]; returns its output [1, T, width]."""


def _run_at_once(run: _Run, hidden: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    return run(hidden, cache)


def _run_stepwise(run: _Run, hidden: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Compute hidden states [sequences, tokens, width] one token after the other."""
    return torch.cat([run(token, cache) for token in torch.split(hidden, 1, dim=1)], dim=1)


def _goes_on(run: _Run, hidden: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a module computes the same [1, T, width] in two parts, of which the second begins with a state."""
    half = hidden.shape[1] // 2
    cache = LayerCache({})
    run(hidden[:, :half], cache)
    cache = LayerCache(cache.states)
    error = (run(hidden[:, half:], cache) - expected[:, half:]).float().norm()
    return bool(error <= SAME[hidden.dtype] * expected.float().norm())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def keeps_known_states(model_class: type[nn.Module]) -> bool:
    """Whether layers of a model's class keep states in a cache by transformers' interface."""
    classes = vars(sys.modules[model_class.__module__]).values()
    return any(
        isinstance(each, type) and issubclass(each, nn.Module) and _UPDATES & _names_used(each) for each in classes
    )


def find_recurrent_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules below one that keep states in a cache by transformers' interface, in their order."""
    found = [child for child in module.modules() if _UPDATES & _names_used(type(child))]
    return [child for child in found if cache_argument(child)]


def _names_used(cls: type) -> set[str]:
    """Return the names that the methods of a module's class use."""
    functions = (inspect.unwrap(value) for value in vars(cls).values() if inspect.isfunction(value))
    return {name for function in functions for name in function.__code__.co_names}


def cache_argument(module: nn.Module) -> str:
    """Return the name of the argument by which a module gets its cache; empty: there is none."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), "")


def step_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go on with the gated delta rule, token by token (Yang et al., ICLR 2025, equation 10).

    As transformers' function of the same arguments; the state is changed in place, by products of matrices, which takes
    a tenth of the time for 8 sequences of 12 heads of 64.

    Args:
        query: [sequences, tokens, key heads, k_dim]
        key: Like the query.
        value: [sequences, tokens, value heads, v_dim]
        g: Logarithm of the decay, [sequences, tokens, value heads].
        beta: Strength of the update, likewise.
        initial_state: float32 [sequences, value heads, k_dim, v_dim].
        use_qk_l2norm_in_kernel: Whether queries and keys are normalized.

    Returns:
        The output, like the value, and the state.
    """
    sequences, tokens, heads, v_dim = value.shape
    k_dim = key.shape[-1]
    query, key = (
        each.float().repeat_interleave(heads // each.shape[2], dim=2).transpose(0, 1).reshape(tokens, -1, 1, k_dim)
        for each in (query, key)
    )
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    query = query * k_dim**-0.5
    values = value.float().transpose(0, 1).reshape(tokens, -1, 1, v_dim)
    decays, strengths = (each.float().transpose(0, 1).reshape(tokens, -1, 1, 1) for each in (g.exp(), beta))
    state = initial_state.to(torch.float32, memory_format=torch.contiguous_format)
    matrices = state.view(-1, k_dim, v_dim)
    output = torch.empty_like(values)
    for token in range(tokens):
        matrices *= decays[token]
        change = (values[token] - torch.bmm(key[token], matrices)) * strengths[token]
        matrices.baddbmm_(key[token].transpose(1, 2), change)
        output[token] = torch.bmm(query[token], matrices)
    return output.view(tokens, sequences, heads, v_dim).transpose(0, 1).to(value.dtype), state


_OWN_STEPS: dict[str, Callable[..., Any]] = {"torch_recurrent_gated_delta_rule": step_gated_delta_rule}
"""Functions of transformers' code that are called in their place."""


def _with_own_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that calls Baton's functions where there are some, and is the same else."""
    plain: Any = inspect.unwrap(forward)
    own = {name: step for name, step in _OWN_STEPS.items() if name in plain.__code__.co_names}
    if not own:
        return forward
    names = {**plain.__globals__, **own}
    copy = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy


def _replace_forward(layer: int, module: nn.Module, call: _Call) -> None:
    """Have a module's forward be ``call``, which runs the forward of its class."""
    forward = _with_own_steps(type(module).forward)
    argument = cache_argument(module)
    name = type(module).__name__
    this = weakref.ref(module)

    def run_forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise InternalError(f"{name} gets more than hidden states by position")
        options = {name: value for name, value in kwargs.items() if name not in {argument, "attention_mask"}}
        is_tuple = False

        def run(rows: torch.Tensor, cache: LayerCache) -> torch.Tensor:
            nonlocal is_tuple
            returned = forward(this(), rows, **options, **{argument: cache})
            is_tuple = isinstance(returned, tuple)
            output: torch.Tensor = returned[0] if is_tuple else returned
            return output

        output = call(layer, run, hidden_states)
        return (output, None) if is_tuple else output

    module.__dict__["forward"] = run_forward


def _parts_of(
    query_starts: IntArray, begun: npt.NDArray[np.bool_], slots: IntArray, device: torch.device
) -> list[_Part]:
    """Return the calls of a step; neighbours with one token each, and with earlier tokens, are one call."""
    lengths = np.diff(query_starts)
    joins = (lengths == 1) & begun
    parts = []
    row = 0
    while row < len(lengths):
        end = row + 1
        while joins[row] and end < len(lengths) and joins[end]:
            end += 1
        first, last = int(query_starts[row]), int(query_starts[end])
        parts.append(_Part(first, last, _slots_of(slots[row:end], device), end - row, bool(begun[row])))
        row = end
    return parts


def _slots_of(slots: IntArray, device: torch.device) -> Slots:
    first = int(slots[0])
    if (np.diff(slots) == 1).all():
        return slice(first, first + len(slots))
    return torch.from_numpy(slots.astype(np.int64)).to(device)
