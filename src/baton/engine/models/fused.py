"""The fast path: decoder stacks of Llama's shape, run by hand over fused and packed operators.

Taken for the model types that are listed in :mod:`quirks <baton.engine.models.quirks>` (Llama, Mistral, Qwen2, Qwen3,
Phi-3 and others), if their parts are those that are expected: pre-norm layers of attention with rotary embedding and a
SwiGLU. Per layer eight operators: norm, QKV in one linear, attention (which rotates, writes the KV and
attends), output with residual, norm, gate and up in one linear, silu * up, down with residual. The runner uses it only
after it gave the same logits as transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from baton.engine.models.generic import MakeLinear
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.models.parallel import Share, unreduced
from baton.engine.models.quirks import ATTENTION_PARTS, FUSED_MODEL_TYPES, LAYER_PARTS, MLP_PARTS
from baton_kernels.cpu import CpuLibrary
from baton_kernels.linear import PackedLinear
from baton_kernels.paged_attention import AttentionSpec, CpuPagedAttention, LayerPool
from baton_kernels.paged_attention.cpu import CpuPlan, Rotation
from baton_kernels.row_wise import CpuRmsNorm, CpuSiluMul


class NotFusableError(Exception):
    """The model is not of the shape that the fast path knows; says why."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The operators of one layer."""

    input_norm: CpuRmsNorm
    qkv: PackedLinear
    rotation: Rotation
    output: PackedLinear
    mlp_norm: CpuRmsNorm
    gate_up: PackedLinear
    down: PackedLinear


class FusedDecoder:
    """A whole decoder, or one rank's share of it; see the module's docstring.

    Attributes:
        on_layer: Called with a layer's index once its KV is in the pools of all ranks that share it.
    """

    def __init__(
        self,
        model: LoadedModel,
        share: Share,
        max_len: int,
        library: CpuLibrary,
        attention: CpuPagedAttention,
        make: MakeLinear,
    ) -> None:
        """Build the operators from a model's modules, whose weights stay as they are.

        Raises:
            NotFusableError: The model has another shape.
        """
        specs = list(share.specs.values())
        ranks = share.communicator
        stack, layers = _known_stack(model, share)
        self.on_layer: Callable[[int], None] | None = None
        self._specs, self._attention = specs, attention
        self._communicator, self._first_layer = ranks, share.first_layer
        self._dtype = TORCH_DTYPES[model.dtype]
        self._embedding = stack.embed_tokens.weight.detach() if ranks.is_first_stage else None
        cos, sin = _rotary_table(stack.rotary_emb, max_len, specs)
        norm = _norm_maker(library)
        self._layers = [
            FusedLayer(
                input_norm=norm(layer.input_layernorm),
                qkv=make(*_joined(layer.self_attn, "qkv_proj", ("q_proj", "k_proj", "v_proj"))),
                rotation=_rotation(layer.self_attn, spec, cos, sin),
                output=make(*_weights(layer.self_attn.o_proj)),
                mlp_norm=norm(layer.post_attention_layernorm),
                gate_up=make(*_joined(layer.mlp, "gate_up_proj", ("gate_proj", "up_proj"))),
                down=make(*_weights(layer.mlp.down_proj)),
            )
            for layer, spec in zip(layers, specs, strict=True)
        ]
        for layer, spec in zip(self._layers, specs, strict=True):
            _check_sizes(layer, spec)
        self._norm = norm(stack.norm) if ranks.has_head else None
        self._head = make(*_weights(model.module.lm_head)) if ranks.has_head else None
        self._silu_mul = CpuSiluMul(library, self._dtype)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: CpuPlan, pools: list[LayerPool]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run tokens int64 [T] through this rank's layers; ``positions`` are those of ``plan``.

        Returns:
            The logits [R, vocab] of ``rows`` int64 [R], and their hidden states [R, width] after the final norm; on a
            rank that has no head [0, 0] and ``None``.
        """
        ranks = self._communicator
        if self._embedding is not None:
            hidden = F.embedding(tokens, self._embedding)
        else:
            hidden = ranks.receive_hidden((len(tokens), self._layers[0].output.out_features), self._dtype)
        attention, silu_mul, on_layer = self._attention, self._silu_mul, self.on_layer
        splits_heads, adds_residual = ranks.splits_heads, ranks.spec.tp_rank == 0
        for index, (layer, spec, pool) in enumerate(
            zip(self._layers, self._specs, pools, strict=True), self._first_layer
        ):
            qkv = layer.qkv(layer.input_norm(hidden))
            out = attention.run_rotated(plan, spec, pool, _split(qkv, spec), layer.rotation)
            if on_layer is not None and not splits_heads:
                on_layer(index)
            hidden = layer.output(out.view(len(tokens), -1), hidden if adds_residual else None)
            if splits_heads:
                hidden = ranks.all_reduce(hidden)
                if on_layer is not None:
                    on_layer(index)
            inner = silu_mul(layer.gate_up(layer.mlp_norm(hidden)))
            hidden = layer.down(inner, hidden if adds_residual else None)
            if splits_heads:
                hidden = ranks.all_reduce(hidden)
        if not ranks.is_last_stage:
            ranks.send_hidden(hidden)
        if self._head is None or self._norm is None:
            return hidden.new_empty((0, 0)), None
        hidden = self._norm(hidden[rows])
        return self._head(hidden), hidden


def _known_stack(model: LoadedModel, share: Share) -> tuple[Any, list[Any]]:
    """Return the stack below the head, whose shape is known, and this rank's layers of it."""
    ranks = share.communicator
    _need(model.device.type == "cpu", "not on a CPU")
    kind = str(model.text_config.model_type)
    _need(kind in FUSED_MODEL_TYPES, f"model type {kind} is none of those that the fused decoder is known to run")
    stack = getattr(model.module, "model", None)
    names = {name for name, _ in stack.named_children()} if stack is not None else set()
    _need(names == {"embed_tokens", "layers", "norm", "rotary_emb"}, "another stack")
    assert stack is not None
    _need(not ranks.has_head or type(getattr(model.module, "lm_head", None)) is nn.Linear, "another head")
    _need(not ranks.is_first_stage or type(stack.embed_tokens) is nn.Embedding, "another embedding")
    layers = list(stack.layers)[share.first_layer : share.first_layer + len(share.specs)]
    for layer in layers:
        _need(_working_parts(layer) == LAYER_PARTS, "other parts in a layer")
        _need(_working_parts(layer.self_attn) <= ATTENTION_PARTS, "other parts in attention")
        _need(_working_parts(layer.mlp) - {"act_fn", "activation_fn"} <= MLP_PARTS, "other parts in the MLP")
        activation = getattr(layer.mlp, "act_fn", None) or getattr(layer.mlp, "activation_fn", None)
        probe = torch.linspace(-4, 4, 9)
        _need(activation is not None and torch.allclose(activation(probe), F.silu(probe)), "another activation")
    return stack, layers


def _working_parts(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise NotFusableError(why)


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    linear: Any = unreduced(module)
    _need(type(linear) is nn.Linear, "a projection is not a plain linear layer")
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def _joined(module: Any, fused: str, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of several projections of one input, one after the other."""
    if hasattr(module, fused):
        return _weights(getattr(module, fused))
    _need(all(hasattr(module, name) for name in names), f"no {names[0]}")
    weights, biases = zip(*(_weights(getattr(module, name)) for name in names), strict=True)
    present = [bias for bias in biases if bias is not None]
    _need(len(present) in {0, len(biases)}, "some projections have a bias and some none")
    return torch.cat(weights), torch.cat(present) if present else None


def _norm_maker(library: CpuLibrary) -> Any:
    def make(module: Any) -> CpuRmsNorm:
        eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        _need(eps is not None and hasattr(module, "weight") and getattr(module, "bias", None) is None, "another norm")
        return CpuRmsNorm(library, module.weight, float(eps))

    return make


def _rotary_table(rotary: Any, max_len: int, specs: list[AttentionSpec]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 [max_len, rotary / 2], from the model's own module."""
    with torch.inference_mode():
        try:
            full = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(max_len)[None])
        except Exception as error:
            raise NotFusableError("another rotary embedding") from error
        _need(isinstance(full, tuple) and len(full) == 2 and full[0].dim() == 3, "another rotary embedding")
        half = full[0].shape[-1] // 2
        for table in full:
            _need(torch.equal(table[0, :, :half], table[0, :, half:]), "another rotary embedding")
        _need(all(2 * half <= spec.k_dim for spec in specs), "another rotary embedding")
        cos, sin = (table[0, :, :half].float().contiguous() for table in full)
    return cos, sin


def _rotation(attention: Any, spec: AttentionSpec, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return Rotation(cos, sin)
    _need(all(getattr(norm, "weight", torch.empty(0)).shape == (spec.k_dim,) for norm in norms), "another head norm")
    eps: set[Any] = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    _need(len(eps) == 1 and None not in eps, "another head norm")
    q_norm, k_norm = (norm.weight.detach().contiguous() for norm in norms if norm is not None)
    return Rotation(cos, sin, q_norm, k_norm, float(eps.pop()))


def _check_sizes(layer: FusedLayer, spec: AttentionSpec) -> None:
    width = spec.num_heads * spec.k_dim + spec.kv_heads * (spec.k_dim + spec.v_dim)
    _need(layer.qkv.out_features == width, "another split of queries, keys and values")
    _need(layer.output.in_features == spec.num_heads * spec.v_dim, "another output projection")
    _need(layer.gate_up.out_features == 2 * layer.down.in_features, "another MLP")


def _split(qkv: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of [T, width]: queries [T, heads, k_dim], keys and values [T, kv_heads, dim]."""
    rows, width = qkv.shape
    queries, keys = spec.num_heads * spec.k_dim, spec.kv_heads * spec.k_dim
    return (
        qkv.as_strided((rows, spec.num_heads, spec.k_dim), (width, spec.k_dim, 1)),
        qkv.as_strided((rows, spec.kv_heads, spec.k_dim), (width, spec.k_dim, 1), queries),
        qkv.as_strided((rows, spec.kv_heads, spec.v_dim), (width, spec.v_dim, 1), queries + keys),
    )
