"""The operators of the fused decoder's layers, made from transformers' modules; whatever is not known is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.engine.models.experts import Mixture, gated_activation, make_mixture, pack_experts
from baton.engine.models.generic import MakeLinear
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.models.parallel import Share, SpanningNorm, unreduced
from baton.engine.models.quirks import ATTENTION_PARTS, FUSED_FAMILIES, MLP_PARTS, Family
from baton_kernels.cpu import CpuLibrary
from baton_kernels.linear import PackedLinear
from baton_kernels.paged_attention import AttentionSpec
from baton_kernels.paged_attention.cpu import Rotation
from baton_kernels.row_wise import CpuGatedMul, CpuRmsNorm

SpanningNorms = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Norms queries [T, heads, dim] and keys [T, kv_heads, dim] over all their heads at once."""


class NotFusableError(Exception):
    """The model is not of a shape that the fast path knows; says why."""


class GatedMlp:
    """Gate and up in one linear, their product, down."""

    def __init__(self, gate_up: PackedLinear, product: CpuGatedMul, down: PackedLinear) -> None:
        self._gate_up, self._product, self._down = gate_up, product, down

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Take x and residual [T, hidden], return [T, hidden]."""
        return self._down(self._product(self._gate_up(x)), residual)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The operators of one layer; norms that it does not have are ``None``."""

    attention_norm: CpuRmsNorm | None
    qkv: PackedLinear
    spanning_norms: SpanningNorms | None
    rotation: Rotation
    output: PackedLinear
    attention_out_norm: CpuRmsNorm | None
    mlp_norm: CpuRmsNorm | None
    mlp: GatedMlp | Mixture
    mlp_out_norm: CpuRmsNorm | None


def known_stack(model: LoadedModel, share: Share) -> tuple[Any, list[Any], Family]:
    """Return the stack below the head, this rank's layers of it, and what is known of the family.

    Raises:
        NotFusableError: The stack or its layers have another shape.
    """
    ranks = share.communicator
    need(model.device.type == "cpu", "not on a CPU")
    kind = str(model.text_config.model_type)
    need(kind in FUSED_FAMILIES, f"model type {kind} is none of those that the fused decoder is known to run")
    family = FUSED_FAMILIES[kind]
    stack = getattr(model.module, "model", None)
    names = {name for name, _ in stack.named_children()} if stack is not None else set()
    need(names == {"embed_tokens", "layers", "norm", "rotary_emb"}, "another stack")
    assert stack is not None
    need(not ranks.has_head or type(getattr(model.module, "lm_head", None)) is nn.Linear, "another head")
    embedding = stack.embed_tokens
    scaled = isinstance(embedding, nn.Embedding) and hasattr(embedding, "embed_scale")
    need(not ranks.is_first_stage or scaled or type(embedding) is nn.Embedding, "another embedding")
    layers = list(stack.layers)[share.first_layer : share.first_layer + len(share.specs)]
    for layer in layers:
        need(_working_parts(layer) == {"self_attn", "mlp"} | family.norms.names(), "other parts in a layer")
        need(_working_parts(layer.self_attn) <= ATTENTION_PARTS, "other parts in attention")
    return stack, layers, family


class LayerMaker:
    """Makes the operators of one model's layers.

    Args:
        model: Whose modules they are made from.
        share: This rank's part of it.
        max_len: Longest sequence, in tokens.
        family: How its layers are put together.
        library: The operators.
        make: Makes linear layers.

    Raises:
        NotFusableError: The rotary embedding is not one that the operator knows.
    """

    def __init__(
        self,
        model: LoadedModel,
        share: Share,
        max_len: int,
        family: Family,
        library: CpuLibrary,
        make: MakeLinear,
    ) -> None:
        self._family, self._library, self._make = family, library, make
        self._dtype = TORCH_DTYPES[model.dtype]
        self._specs, self._first_layer = list(share.specs.values()), share.first_layer
        self._layer_types: list[str] | None = getattr(model.text_config, "layer_types", None)
        rotary: Any = model.module.model.rotary_emb
        self._by_type = "layer_type" in inspect.signature(rotary.forward).parameters
        types = {self._layer_type(index) for index in range(len(self._specs))}
        self._tables = {name: _rotary_table(rotary, max_len, self._specs, name) for name in types}

    def _layer_type(self, index: int) -> str | None:
        """The name of the rotary embedding of this rank's layer, where there are several."""
        if not self._by_type:
            return None
        need(self._layer_types is not None, "no types of layers")
        assert self._layer_types is not None
        return self._layer_types[self._first_layer + index]

    def layer(self, index: int, layer: Any) -> FusedLayer:
        """Make the operators of one of this rank's layers.

        Raises:
            NotFusableError: It has another shape.
        """
        norms, attention, spec = self._family.norms, layer.self_attn, self._specs[index]
        spans = _spanning_norms(attention, spec)
        made = FusedLayer(
            attention_norm=self._named_norm(layer, norms.before_attention),
            qkv=self._joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            spanning_norms=self._spanning(attention) if spans else None,
            rotation=self._rotation(index, attention, spec, normed=not spans),
            output=self.linear(attention.o_proj),
            attention_out_norm=self._named_norm(layer, norms.after_attention),
            mlp_norm=self._named_norm(layer, norms.before_mlp),
            mlp=self._mlp(layer.mlp),
            mlp_out_norm=self._named_norm(layer, norms.after_mlp),
        )
        width = spec.num_heads * spec.k_dim + spec.kv_heads * (spec.k_dim + spec.v_dim)
        need(made.qkv.out_features == width, "another split of queries, keys and values")
        need(made.output.in_features == spec.num_heads * spec.v_dim, "another output projection")
        return made

    def norm(self, module: Any) -> CpuRmsNorm:
        """Make an RMS norm."""
        need(hasattr(module, "weight") and getattr(module, "bias", None) is None, "another norm")
        return CpuRmsNorm(self._library, module.weight, _eps(module), self._family.norm_offset)

    def linear(self, module: Any) -> PackedLinear:
        """Make a linear layer of a plain one."""
        return self._make(*_weights(module))

    def _named_norm(self, layer: Any, name: str) -> CpuRmsNorm | None:
        return self.norm(getattr(layer, name)) if name else None

    def _joined(self, module: Any, joined: str, names: tuple[str, ...]) -> PackedLinear:
        """Make one layer of several projections of one input, one after the other."""
        if hasattr(module, joined):
            return self.linear(getattr(module, joined))
        need(all(hasattr(module, name) for name in names), f"no {names[0]}")
        weights, biases = zip(*(_weights(getattr(module, name)) for name in names), strict=True)
        present = [bias for bias in biases if bias is not None]
        need(len(present) in {0, len(biases)}, "some projections have a bias and some none")
        return self._make(torch.cat(weights), torch.cat(present) if present else None)

    def _mlp(self, module: Any) -> GatedMlp | Mixture:
        parts = _working_parts(module)
        if "experts" not in parts:
            return self._gated_mlp(module)
        need(parts <= {"experts", self._family.router, "shared_experts"}, "other parts in a mixture")
        experts = pack_experts(unreduced(module.experts), self._library)
        need(experts is not None, "other experts")
        assert experts is not None
        shared = self._gated_mlp(module.shared_experts) if "shared_experts" in parts else None
        router = getattr(module, self._family.router)
        try:
            return make_mixture(router, experts, shared, self._family, self._library, self._make)
        except (AttributeError, ValueError) as error:
            raise NotFusableError(f"another router ({error})") from error

    def _gated_mlp(self, module: Any) -> GatedMlp:
        need(_working_parts(module) - {"act_fn", "activation_fn"} <= MLP_PARTS, "other parts in the MLP")
        activation = gated_activation(module)
        need(activation is not None, "another activation")
        assert activation is not None
        gate_up = self._joined(module, "gate_up_proj", ("gate_proj", "up_proj"))
        down = self.linear(module.down_proj)
        need(gate_up.out_features == 2 * down.in_features, "another MLP")
        return GatedMlp(gate_up, CpuGatedMul(self._library, self._dtype, activation), down)

    def _rotation(self, index: int, attention: Any, spec: AttentionSpec, *, normed: bool) -> Rotation:
        cos, sin = self._tables[self._layer_type(index)]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")] if normed else [None, None]
        pairs = self._family.rotates_pairs
        if norms == [None, None]:
            return Rotation(cos, sin, pairs=pairs)
        need(all(getattr(norm, "weight", torch.empty(0)).shape == (spec.k_dim,) for norm in norms), "another head norm")
        eps = {_eps(norm) for norm in norms}
        need(len(eps) == 1, "another head norm")
        q_norm, k_norm = (norm.weight.detach().contiguous() for norm in norms if norm is not None)
        return Rotation(cos, sin, q_norm, k_norm, eps.pop(), self._family.norm_offset, pairs)

    def _spanning(self, attention: Any) -> SpanningNorms:
        parts = (attention.q_norm, attention.k_norm)
        q_norm, k_norm = (norm if isinstance(norm, SpanningNorm) else self.norm(norm) for norm in parts)

        def run(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return q_norm(q.flatten(1)).view(q.shape), k_norm(k.flatten(1)).view(k.shape)

        return run


def _spanning_norms(attention: Any, spec: AttentionSpec) -> bool:
    """Whether queries and keys are normed over all heads at once (OLMo), and not head by head."""
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(isinstance(norm, SpanningNorm) for norm in norms):
        return True
    shapes = [None if norm is None else tuple(norm.weight.shape) for norm in norms]
    spanning = [(heads * spec.k_dim,) for heads in (spec.num_heads, spec.kv_heads)]
    return shapes == spanning and shapes != [(spec.k_dim,)] * 2


def need(condition: bool, why: str) -> None:
    """Raise :class:`NotFusableError` unless a condition holds."""
    if not condition:
        raise NotFusableError(why)


def _working_parts(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _eps(norm: Any) -> float:
    eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    need(isinstance(eps, float), "another norm")
    return float(eps)


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    linear: Any = unreduced(module)
    need(type(linear) is nn.Linear, "a projection is not a plain linear layer")
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def _rotary_table(
    rotary: Any, max_len: int, specs: list[AttentionSpec], layer_type: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 [max_len, rotary / 2], from the model's own module.

    It gives every angle twice, one half of the row after the other, or (GPT-OSS) once.
    """
    with torch.inference_mode():
        try:
            options = {} if layer_type is None else {"layer_type": layer_type}
            full = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(max_len)[None], **options)
        except Exception as error:
            raise NotFusableError("another rotary embedding") from error
        need(isinstance(full, tuple) and len(full) == 2 and full[0].dim() == 3, "another rotary embedding")
        width = full[0].shape[-1]
        half = width // 2
        twice = all(torch.equal(table[0, :, :half], table[0, :, half:]) for table in full)
        need(twice or all(2 * width == spec.k_dim for spec in specs), "another rotary embedding")
        kept = half if twice else width
        need(all(2 * kept <= spec.k_dim for spec in specs), "another rotary embedding")
        cos, sin = (table[0, :, :kept].float().contiguous() for table in full)
    return cos, sin
