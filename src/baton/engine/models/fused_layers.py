"""The operators of the fused decoder's layers, made from transformers' modules; unknown parts are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.engine.models.layer_operators import (
    GatedProduct,
    LayerOperators,
    Mixture,
    RowNorm,
    SideBySide,
    gated_activation,
    join_quantized,
    make_mixture,
    pack_quantized,
)
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.models.parallel import Share, SpanningNorm, unreduced
from baton.engine.models.quirks import ATTENTION_PARTS, FUSED_FAMILIES, LATENT_ATTENTION_PARTS, MLP_PARTS, Family
from baton.engine.quantization.modules import QuantizedModule
from baton_kernels.linear import PackedLinear
from baton_kernels.paged_attention import (
    AttentionSpec,
    LatentProjections,
    LayerPool,
    RotatingAttention,
    Rotation,
    attend_latent,
)

SpanningNorms = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Norms queries [T, heads, dim] and keys [T, kv_heads, dim] over all their heads at once."""


ROTARY_ROWS = 512
"""Positions whose angles are computed at a time: the model's own module needs several times a table's memory."""


class NotFusableError(Exception):
    """The model has parts that the fast path does not know; the message says which."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gate and up in one linear, their product, down."""

    gate_up: PackedLinear
    product: GatedProduct
    down: PackedLinear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output, plus the residual, [T, hidden] for x and residual [T, hidden]."""
        return self.down(self.product(self.gate_up(x)), residual)


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Queries, keys and values in one linear, then attention, which norms heads and rotates on its way.

    Attributes:
        spec: Numbers of the attention.
        qkv: Queries, keys and values, one after the other.
        spanning_norms: Norms over all heads at once, or ``None``.
        rotation: Norms of heads and rotary embedding.
    """

    spec: AttentionSpec
    qkv: PackedLinear
    spanning_norms: SpanningNorms | None
    rotation: Rotation

    def __call__(
        self, backend: RotatingAttention, plan: Any, pool: LayerPool, x: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, heads * v_dim] for x [T, hidden] and positions int64 [T], which are those of ``plan``."""
        q, k, v = split_heads(self.qkv(x), self.spec)
        if self.spanning_norms is not None:
            q, k = self.spanning_norms(q, k)
        return backend.run_rotated(plan, self.spec, pool, (q, k, v), self.rotation).view(len(x), -1)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (:mod:`baton_kernels.paged_attention.latent`).

    Attributes:
        spec: Numbers of the attention over latents.
        projections: Maps from latents to the heads' keys and values.
        down: Linear layer from the input to queries (or compressed queries), latents and rotary keys.
        q_norm: Norm of compressed queries; ``None``: queries are not compressed.
        q_up: Linear layer from compressed queries to queries; ``None``: queries are not compressed.
        kv_norm: Norm of latents.
        cos: Cosines of the rotary embedding, float32 [positions, rotary / 2].
        sin: Sines, shaped as ``cos``.
        interleaved: Whether the rotary embedding turns neighbours against each other, instead of two halves. The
            results are in halves in both cases.
    """

    spec: AttentionSpec
    projections: LatentProjections
    down: PackedLinear
    q_norm: RowNorm | None
    q_up: PackedLinear | None
    kv_norm: RowNorm
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def __call__(
        self, backend: RotatingAttention, plan: Any, pool: LayerPool, x: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        spec = self.spec
        projected = self.down(x)
        queries, latents, rotary = projected.split_with_sizes(
            [projected.shape[1] - spec.k_dim, spec.v_dim, spec.k_dim - spec.v_dim], dim=1
        )
        if self.q_norm is not None and self.q_up is not None:
            queries = self.q_up(self.q_norm(queries))
        q = queries.view(len(x), spec.num_heads, -1)
        q, keys = self._rotate(q, rotary, positions)
        rows = torch.cat([self.kv_norm(latents), keys], dim=1)
        return attend_latent(backend, plan, spec, pool, self.projections, (q, rows)).view(len(x), -1)

    def _rotate(
        self, q: torch.Tensor, rotary: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the last elements of queries [T, H, dim], and rotary keys [T, rope]."""
        rope = rotary.shape[1]
        both = torch.cat([q[..., -rope:], rotary[:, None]], dim=1).float()
        first, second = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        cos = self.cos[positions][:, None]
        sin = self.sin[positions][:, None]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(q.dtype)
        return torch.cat([q[..., :-rope], turned[:, :-1]], dim=-1), turned[:, -1]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The operators of one layer; norms that it does not have are ``None``."""

    attention_norm: RowNorm | None
    attention: HeadAttention | LatentAttention
    output: PackedLinear
    attention_out_norm: RowNorm | None
    mlp_norm: RowNorm | None
    mlp: GatedMlp | Mixture
    mlp_out_norm: RowNorm | None


def known_stack(model: LoadedModel, share: Share) -> tuple[Any, list[Any], Family]:
    """Return the stack below the head, this rank's layers of it, and the model's family.

    Raises:
        NotFusableError: The stack or its layers have unknown parts.
    """
    ranks = share.communicator
    kind = str(model.text_config.model_type)
    need(kind in FUSED_FAMILIES, f"model type {kind} is none of those that the fused decoder is known to run")
    family = FUSED_FAMILIES[kind]
    stack = getattr(model.module, "model", None)
    names = {name for name, _ in stack.named_children()} if stack is not None else set()
    need(names == {"embed_tokens", "layers", "norm", "rotary_emb"}, "another stack")
    assert stack is not None
    head: Any = getattr(model.module, "lm_head", None)
    need(not ranks.has_head or type(head) in {nn.Linear, QuantizedModule}, "another head")
    embedding = stack.embed_tokens
    scaled = isinstance(embedding, nn.Embedding) and hasattr(embedding, "embed_scale")
    need(not ranks.is_first_stage or scaled or type(embedding) is nn.Embedding, "another embedding")
    layers = list(stack.layers)[share.first_layer : share.first_layer + len(share.specs)]
    for layer in layers:
        need(_working_parts(layer) == {"self_attn", "mlp"} | family.norms.names(), "other parts in a layer")
        known = LATENT_ATTENTION_PARTS if id(layer.self_attn) in share.latents else ATTENTION_PARTS
        need(_working_parts(layer.self_attn) <= known, "other parts in attention")
    return stack, layers, family


class LayerMaker:
    """Makes the operators of one model's layers.

    Args:
        model: The model, cut down to this rank's share.
        share: This rank's layers and heads.
        max_len: Longest sequence, in tokens.
        family: Structure of the model's layers.
        operators: Makes the operators.

    Raises:
        NotFusableError: The rotary embedding is not one that the operator knows.
    """

    def __init__(
        self,
        model: LoadedModel,
        share: Share,
        max_len: int,
        family: Family,
        operators: LayerOperators,
    ) -> None:
        self._family = family
        self._operators = operators
        self._dtype = TORCH_DTYPES[model.dtype]
        self._specs = list(share.specs.values())
        self._latents = share.latents
        self._first_layer = share.first_layer
        self._layer_types: list[str] | None = getattr(model.text_config, "layer_types", None)
        rotary: Any = model.module.model.rotary_emb
        self._by_type = "layer_type" in inspect.signature(rotary.forward).parameters
        types = {self._layer_type(index) for index in range(len(self._specs))}
        self._tables = {name: _rotary_table(rotary, max_len, self._specs, name, model.device) for name in types}

    def _layer_type(self, index: int) -> str | None:
        """Return the name of a layer's rotary embedding, or ``None`` if all layers share one."""
        if not self._by_type:
            return None
        need(self._layer_types is not None, "no types of layers")
        assert self._layer_types is not None
        return self._layer_types[self._first_layer + index]

    def layer(self, index: int, layer: Any) -> FusedLayer:
        """Make the operators of one of this rank's layers.

        Raises:
            NotFusableError: The layer has unknown parts.
        """
        norms = self._family.norms
        attention = layer.self_attn
        latent = self._latents.get(id(attention))
        fused = FusedLayer(
            attention_norm=self._named_norm(layer, norms.before_attention),
            attention=self._head_attention(index, attention)
            if latent is None
            else self._latent_attention(index, attention, latent),
            output=self.linear(attention.o_proj),
            attention_out_norm=self._named_norm(layer, norms.after_attention),
            mlp_norm=self._named_norm(layer, norms.before_mlp),
            mlp=self._mlp(layer.mlp),
            mlp_out_norm=self._named_norm(layer, norms.after_mlp),
        )
        spec = self._specs[index]
        values = spec.num_heads * (spec.v_dim if latent is None else attention.v_head_dim)
        need(fused.output.in_features == values, "another output projection")
        return fused

    def _head_attention(self, index: int, attention: Any) -> HeadAttention:
        spec = self._specs[index]
        spans = _has_spanning_norms(attention, spec)
        qkv = self._joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        width = spec.num_heads * spec.k_dim + spec.kv_heads * (spec.k_dim + spec.v_dim)
        need(qkv.out_features == width, "another split of queries, keys and values")
        rotation = self._rotation(index, attention, spec, normed=not spans)
        return HeadAttention(spec, qkv, self._make_spanning_norms(attention) if spans else None, rotation)

    def _latent_attention(self, index: int, attention: Any, projections: LatentProjections) -> LatentAttention:
        direct = getattr(attention, "q_proj", None) is not None
        cos, sin = self._tables[self._layer_type(index)]
        spec = self._specs[index]
        need(2 * cos.shape[1] == spec.k_dim - spec.v_dim, "another rotary embedding")
        return LatentAttention(
            spec,
            projections,
            self._join([attention.q_proj if direct else attention.q_a_proj, attention.kv_a_proj_with_mqa]),
            None if direct else self.norm(attention.q_a_layernorm),
            None if direct else self.linear(attention.q_b_proj),
            self.norm(attention.kv_a_layernorm),
            cos,
            sin,
            bool(attention.config.rope_interleave),
        )

    def norm(self, module: Any) -> RowNorm:
        need(hasattr(module, "weight") and getattr(module, "bias", None) is None, "another norm")
        return self._operators.rms_norm(module.weight, _eps(module), self._family.norm_offset)

    def linear(self, module: Any) -> PackedLinear:
        """Make a linear operator of a plain or quantized linear layer."""
        inner = unreduced(module)
        if isinstance(inner, QuantizedModule):
            return pack_quantized(inner, self._operators)
        return self._operators.linear(*_weights(inner))

    def _named_norm(self, layer: Any, name: str) -> RowNorm | None:
        return self.norm(getattr(layer, name)) if name else None

    def _joined(self, module: Any, joined: str, names: tuple[str, ...]) -> PackedLinear:
        """Make one operator of several projections of one input, one after the other."""
        if hasattr(module, joined):
            return self.linear(getattr(module, joined))
        need(all(hasattr(module, name) for name in names), f"no {names[0]}")
        return self._join([getattr(module, name) for name in names])

    def _join(self, modules: list[Any]) -> PackedLinear:
        if any(isinstance(module, QuantizedModule) for module in modules):
            joined = join_quantized(modules, self._operators)
            return SideBySide([self.linear(module) for module in modules]) if joined is None else joined
        weights, biases = zip(*map(_weights, modules), strict=True)
        present = [bias for bias in biases if bias is not None]
        need(len(present) in {0, len(biases)}, "some projections have a bias and some none")
        return self._operators.linear(torch.cat(weights), torch.cat(present) if present else None)

    def _mlp(self, module: Any) -> GatedMlp | Mixture:
        parts = _working_parts(module)
        if "experts" not in parts:
            return self._gated_mlp(module)
        need(parts <= {"experts", self._family.router, "shared_experts"}, "other parts in a mixture")
        experts = self._operators.experts(unreduced(module.experts))
        need(experts is not None, "other experts")
        assert experts is not None
        shared = self._gated_mlp(module.shared_experts) if "shared_experts" in parts else None
        router = getattr(module, self._family.router)
        try:
            return make_mixture(router, experts, shared, self._family, self._operators)
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
        return GatedMlp(gate_up, self._operators.gated_product(self._dtype, activation), down)

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

    def _make_spanning_norms(self, attention: Any) -> SpanningNorms:
        parts = (attention.q_norm, attention.k_norm)
        q_norm, k_norm = (norm if isinstance(norm, SpanningNorm) else self.norm(norm) for norm in parts)

        def norm_all_heads(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return q_norm(q.flatten(1)).view(q.shape), k_norm(k.flatten(1)).view(k.shape)

        return norm_all_heads


def _has_spanning_norms(attention: Any, spec: AttentionSpec) -> bool:
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
    rotary: Any, max_len: int, specs: list[AttentionSpec], layer_type: str | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 [max_len, rotary / 2], from the model's own module.

    The module gives every angle twice, one half of the row after the other, or (GPT-OSS) once.
    """
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.inference_mode():
        parts = [
            _rotary_rows(rotary, range(start, min(start + ROTARY_ROWS, max_len)), max_len, specs, options, device)
            for start in range(0, max_len, ROTARY_ROWS)
        ]
        need(len({cos.shape[1] for cos, _ in parts}) == 1, "another rotary embedding")
        cos, sin = (torch.cat(tables) for tables in zip(*parts, strict=True))
    return cos, sin


def _rotary_rows(
    rotary: Any,
    rows: range,
    max_len: int,
    specs: list[AttentionSpec],
    options: dict[str, Any],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some rows of the tables; angles may depend on the last position, so it is computed with them."""
    positions = torch.tensor([*rows, max_len - 1], device=device)[None]
    try:
        full = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions, **options)
    except Exception as error:
        raise NotFusableError("another rotary embedding") from error
    need(isinstance(full, tuple) and len(full) == 2 and full[0].dim() == 3, "another rotary embedding")
    width = full[0].shape[-1]
    half = width // 2
    twice = all(torch.equal(table[0, :, :half], table[0, :, half:]) for table in full)
    need(twice or all(2 * width == spec.k_dim for spec in specs), "another rotary embedding")
    angles = half if twice else width
    need(all(2 * angles <= spec.k_dim for spec in specs), "another rotary embedding")
    cos, sin = (table[0, :-1, :angles].float().contiguous() for table in full)
    return cos, sin


def split_heads(qkv: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of qkv [T, width]: queries [T, heads, k_dim], keys and values [T, kv_heads, dim]."""
    rows, width = qkv.shape
    queries = spec.num_heads * spec.k_dim
    keys = spec.kv_heads * spec.k_dim
    return (
        qkv.as_strided((rows, spec.num_heads, spec.k_dim), (width, spec.k_dim, 1)),
        qkv.as_strided((rows, spec.kv_heads, spec.k_dim), (width, spec.k_dim, 1), queries),
        qkv.as_strided((rows, spec.kv_heads, spec.v_dim), (width, spec.v_dim, 1), queries + keys),
    )
