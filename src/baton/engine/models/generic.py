"""The generic path: transformers' own modules with Baton's attention, linear layers and experts."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from baton.config import EngineConfig
from baton.engine.models.attention_hook import AttentionName, check_inputs
from baton.engine.models.layer_operators import LayerOperators, MakeLinear, PackedExperts, pack_quantized
from baton.engine.models.loader import LoadedModel
from baton.engine.models.parallel import Share
from baton.engine.models.quirks import COUNTS_ON_FROM_CACHE
from baton.engine.quantization.modules import QuantizedModule, reloadable_weights
from baton.errors import InternalError
from baton_kernels.cpu import CpuLibrary
from baton_kernels.linear import AmxLinear, CpuLinear, OneDnnLinear, PackedLinear, PairsLinear, PlainLinear
from baton_kernels.paged_attention import LayerPool, PagedAttention, attend_latent

log = logging.getLogger(__name__)


class GenericDecoder:
    """A transformers model that attends over a paged pool.

    Attributes:
        on_layer: Called with a layer's index once its KV is in the pools of all ranks that share the layer.
    """

    def __init__(self, model: LoadedModel, share: Share, attention: PagedAttention) -> None:
        self.module = model.module
        self._architecture = model.architecture
        self.on_layer: Callable[[int], None] | None = None
        self._specs = list(share.specs.values())
        self._latents = share.latents
        self._layer_of = {module: index for index, module in enumerate(share.specs)}
        self._first_layer = share.first_layer
        self._attention = attention
        self._device = model.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model.module).forward).parameters
        self._counts_on = model.text_config.model_type in COUNTS_ON_FROM_CACHE
        self._step: tuple[Any, list[LayerPool]] | None = None
        self._hidden: dict[int, torch.Tensor] = {}
        """Hidden states of this step [1, T, width], by the layer that they are inputs of; -1: after the final norm."""
        self._watched: set[int] = set()
        self._name = AttentionName(_weakly(self._attend))
        self.module.set_attn_implementation(self._name.name)
        # With divided heads, other ranks have written theirs once the sum after attention is done, at the module's end.
        self._reports_in_attention = not share.communicator.splits_heads
        if not self._reports_in_attention:
            for module in self.module.modules():
                if id(module) in self._layer_of:
                    module.register_forward_hook(_weakly(self._report_layer))
        if share.communicator.has_head and self.module.base_model is not self.module:
            self.module.base_model.register_forward_hook(_weakly(self._keep_hidden))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        plan: Any,
        pools: list[LayerPool],
        hidden_of: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run tokens through the model.

        Args:
            tokens: int64 [T].
            positions: int64 [T], the positions that ``plan`` was prepared for.
            rows: int64 [R], tokens whose logits are returned.
            plan: The attention backend's plan of this batch.
            pools: KV pools of this rank's layers.
            hidden_of: Layers whose inputs are returned; see :class:`~baton.engine.runner.input_batch.ForwardBatch`.

        Returns:
            The logits [R, vocab], and the hidden states [T, width] of ``hidden_of``, or none if this rank, or the
            architecture, does not have all of them.
        """
        self._watch_inputs(hidden_of)
        tokens, positions, rows = (tensor.to(self._device) for tensor in (tokens, positions, rows))
        options: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_logits else {}
        if self._counts_on:
            options["past_key_values"] = _SeenTokens(positions - torch.arange(len(positions), device=self._device))
        self._step = (plan, pools)
        try:
            output = self.module(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
            )
            hidden = tuple(self._hidden[each][0] for each in hidden_of if each in self._hidden)
        finally:
            self._step = None
            self._hidden = {}
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[rows]), hidden if len(hidden) == len(hidden_of) else ()

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *_: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer: query [1, heads, T, dim], key and value likewise -> [1, T, heads, v_dim].

        Where the layer attends over latents, key and value are the latents and the rotary keys.
        """
        if self._step is None:
            raise InternalError("attention outside of a step")
        check_inputs(self._architecture, attention_mask, kwargs)
        plan, pools = self._step
        layer = self._layer_of[id(module)]
        spec = self._specs[layer]
        pool = pools[layer]
        latents = self._latents.get(id(module))
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if latents is None:
            out = self._attention.run(plan, spec, pool, q, k, v)[None]
        else:
            rows = torch.cat([k[:, 0], v[:, 0]], dim=1)
            out = attend_latent(self._attention, plan, spec, pool, latents, (q, rows))[None]
        if self._reports_in_attention:
            self._report_layer(module)
        return out, None

    def _report_layer(self, module: Any, *_: Any) -> None:
        """Call ``on_layer`` after an attention module's forward."""
        if self.on_layer is not None and self._step is not None:
            self.on_layer(self._first_layer + self._layer_of[id(module)])

    def _keep_hidden(self, _: Any, __: Any, output: Any) -> None:
        """Store the output of the stack below the head."""
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None:
            self._hidden[-1] = hidden

    def _watch_inputs(self, hidden_of: tuple[int, ...]) -> None:
        """Store the inputs of the layers ``hidden_of`` in this and all later steps."""
        for index in set(hidden_of) - self._watched - {-1}:
            self._watched.add(index)
            layers = getattr(self.module.base_model, "layers", None)
            if layers is not None and 0 <= index < len(layers):
                keep_input = partial(_weakly(self._keep_input), index)
                layers[index].register_forward_pre_hook(keep_input, with_kwargs=True)

    def _keep_input(self, index: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hidden[index] = args[0] if args else kwargs["hidden_states"]


class _SeenTokens:
    """Replaces the cache of a model that derives positions from the cache's length.

    Args:
        before: int64 [T], each token's position minus its index in the step.
    """

    def __init__(self, before: torch.Tensor) -> None:
        self._before = before

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the number that is added to a token's index, one for each token."""
        return self._before

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values unchanged: the pool stores them."""
        return key_states, value_states


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive, so that the model can be freed."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        if target is None:
            raise InternalError("the runner of this model is gone")
        return target(*args, **kwargs)

    return call


# Linear layers


def choose_linear(config: EngineConfig, model: LoadedModel, library: CpuLibrary | None) -> tuple[str, MakeLinear]:
    """Return the name and the factory of the linear layers that are fastest for a model's dtype on this machine.

    For bfloat16 on a CPU: the C++ operator for AMX where the processor has that, the one for pairs where it has a
    full-rate vdpbf16ps, else the one that multiplies in float32; oneDNN where these cannot be loaded, or are built
    without the AMX that the processor has. Everything else uses torch's operator.
    """
    if model.compute.on_gpu or model.dtype != "bfloat16" or not config.packed_linears:
        return "torch", PlainLinear
    if library is not None and library.amx:
        return "amx", lambda weight, bias: AmxLinear(library, weight, bias)
    if library is not None and not torch.cpu._is_amx_tile_supported():
        kind = PairsLinear if library.pairs_are_faster else CpuLinear
        return ("pairs" if kind is PairsLinear else "cpp"), lambda weight, bias: kind(library, weight, bias)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "onednn", OneDnnLinear
    return "torch", PlainLinear


class PackedModule(nn.Module):
    """Replaces an ``nn.Linear``; has no ``weight``, so that code which looks for one fails loudly."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [..., out_features] for x [..., in_features]."""
        rows = x.reshape(-1, self.in_features)
        return self._linear(rows).view(*x.shape[:-1], self.out_features)


def pack_modules(module: nn.Module, operators: LayerOperators) -> dict[str, nn.Module]:
    """Replace every ``nn.Linear`` below a module by a packed one, and experts by their operator where there is one.

    A tied head gets a packed copy of its own. Quantized weights are in memory once: in the operators.

    Returns:
        The replaced modules by their names, for :func:`restore_modules`.
    """
    replaced: dict[str, nn.Module] = {}
    for name, child in list(module.named_modules()):
        packed: nn.Module | None = None
        if isinstance(child, QuantizedModule):
            packed = PackedModule(pack_quantized(child, operators))
        elif type(child) is nn.Linear and name and operators.linear is not PlainLinear:
            packed = PackedModule(operators.linear(child.weight, child.bias))
        elif (experts := operators.experts(child)) is not None:
            packed = PackedExperts(experts)
        if packed is not None:
            replaced[name] = child
            module.set_submodule(name, packed)
    return replaced


def restore_modules(module: nn.Module, replaced: dict[str, nn.Module]) -> None:
    """Undo :func:`pack_modules`; quantized weights that are not in memory are read again."""
    for name, child in replaced.items():
        module.set_submodule(name, child)
    for weight in reloadable_weights(module):
        weight.load()
