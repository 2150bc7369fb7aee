"""Divides a loaded model among ranks: layers over pipeline stages, heads and MLPs' inner columns over a stage's ranks.

Attention is divided by heads: queries, keys and values by rows (a KV head that several ranks need is on all of them),
the output by columns, then a sum over the ranks. The MLP is divided as transformers' own plan says
(``base_model_tp_plan``); modules that the plan leaves whole are computed by every rank. Modules stay transformers' own,
with smaller weights, so that every path that runs them also runs a share of them.

transformers' forward stays, too: layers of other stages return their input, the first layer of a stage receives the
hidden states of the stage before, and its last layer sends its own to the stage after.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from baton.engine.communicator import Communicator
from baton.engine.models.attention_hook import absorb_projections
from baton.engine.models.loader import LoadedModel, to_device
from baton.engine.models.quirks import (
    HEAD_NORMS,
    JOINED_MLP,
    JOINED_PROJECTION,
    KEY_VALUE_PROJECTIONS,
    QUERY_PROJECTIONS,
    WHOLE_PROJECTIONS,
    WHOLE_STYLES,
    has_interleaved_experts,
    needed_across_stages,
)
from baton.engine.models.recurrent import find_recurrent_modules
from baton.engine.quantization.modules import QuantizedExpertsModule, QuantizedModule, reloadable_weights
from baton.errors import ConfigError, InternalError
from baton.kv_cache.shards import ShardSpec, head_range, layer_range
from baton_kernels.paged_attention import AttentionSpec, LatentProjections

Linear = nn.Linear | QuantizedModule
LINEARS = {nn.Linear, QuantizedModule}
"""Classes of layers that are divided; a subclass may compute something else."""
_GROUPED_BYTES = 16
"""Rows of weights that torch's grouped products take are multiples of so many bytes."""
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the ranks of a stage."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's layers and heads.

    Attributes:
        specs: Attention of the rank's layers, with the rank's heads, by the id of the module.
        first_layer: Index of the rank's first layer in the whole model.
        communicator: Communicator with the other ranks, if there are any.
        latents: Projections of queries and outputs, for the layers that attend over latents, by the id of the module.
    """

    specs: dict[int, AttentionSpec]
    first_layer: int
    communicator: Communicator
    latents: dict[int, LatentProjections]


def require_no_states(model: LoadedModel, tp: int, pp: int) -> None:
    """Refuse to divide a model with recurrent layers.

    Raises:
        ConfigError: There are several ranks, and the model has such layers; names ``tp`` or ``pp``.
    """
    if tp * pp > 1 and find_recurrent_modules(model.module):
        field = "tp" if tp > 1 else "pp"
        why = "its layers keep recurrent states"
        raise ConfigError(f"{model.architecture} cannot be divided over {field}: {why}", field=field)


def divide(model: LoadedModel, attention: dict[int, AttentionSpec], communicator: Communicator) -> Share:
    """Cut a whole model down, in place, to this rank's share, and move that to the rank's device.

    Args:
        model: The whole model, as it was loaded.
        attention: Attention of each layer, by the id of the module.
        communicator: Communicator of this rank; with a single rank all of the model stays.

    Raises:
        ConfigError: The model cannot be divided so (names ``tp`` or ``pp``), or does not fit the device (names
            ``device``).
    """
    shard = communicator.spec
    require_no_states(model, shard.tp_size, shard.pp_size)
    layers = layer_range(len(attention), shard.pp_size, shard.pp_rank)
    # The other layers' modules are freed here, so that new objects may get their ids.
    whole = {module: spec for index, (module, spec) in enumerate(attention.items()) if index in layers}
    specs = {module: rank_attention(spec, shard) for module, spec in whole.items()}
    stack = getattr(model.module.base_model, "layers", ())
    if shard.pp_size > 1 and isinstance(stack, nn.ModuleList) and len(stack) != len(attention):
        why = f"its {len(stack)} layers attend {len(attention)} times"
        raise ConfigError(f"{model.architecture} cannot be divided into pp stages: {why}", field="pp")
    try:
        keep_stage(model, layers, communicator)
        split_tensors(model, whole, shard, communicator.all_reduce)
    except ConfigError:
        raise
    except Exception as error:
        field = "pp" if shard.tp_size == 1 else "tp"
        reason = f"its modules are not put together as others' are ({type(error).__name__}: {error})"
        raise ConfigError(f"{model.architecture} cannot be divided over {field}: {reason}", field=field) from error
    if model.device != model.compute.memory:
        to_device(model.module, model.compute, model.architecture)
        for weight in reloadable_weights(model.module):
            weight.move(model.compute.memory)
        specs = {module: _on_device(spec, model.compute.memory) for module, spec in specs.items()}
    return Share(specs, layers.start, communicator, absorb_projections(model, specs))


def _on_device(spec: AttentionSpec, device: torch.device) -> AttentionSpec:
    return spec if spec.sinks is None else replace(spec, sinks=spec.sinks.to(device))


class Reduced(nn.Module):
    """A module whose output is the sum of all ranks' outputs."""

    def __init__(self, inner: nn.Module, reduce: Reduce) -> None:
        super().__init__()
        self.inner = inner
        self._reduce = reduce

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the module and sum over the ranks."""
        return self._reduce(self.inner(*args, **kwargs))


class SpanningNorm(nn.Module):
    """RMS norm over all ranks' heads, of which each rank has equally many; has this rank's part of the weight.

    Args:
        norm: transformers' norm over all heads.
        weight: This rank's part of its weight.
        shard: This rank.
        reduce: Sums over the ranks.
    """

    def __init__(self, norm: Any, weight: torch.Tensor, shard: ShardSpec, reduce: Reduce) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
        self._ranks = shard.tp_size
        self._reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of this rank's x [..., heads * dim], computed in float32."""
        wide = x.float()
        # Heads on several ranks count equally often on all of them, so the mean of means is the mean over all heads.
        mean = self._reduce(wide.pow(2).mean(-1, keepdim=True)) / self._ranks
        return (wide * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)


class _WithHeads:
    """A config with another number of query heads, by which modules split a joined projection."""

    def __init__(self, config: Any, heads: int) -> None:
        self.num_attention_heads = heads
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # copies look it up before they have it
            raise AttributeError(name)
        return getattr(self._config, name)


def unreduced(module: nn.Module) -> nn.Module:
    """Return the inner module of a :class:`Reduced`, and any other module unchanged."""
    return module.inner if isinstance(module, Reduced) else module


def rank_attention(spec: AttentionSpec, shard: ShardSpec) -> AttentionSpec:
    """Return a rank's part of a layer's attention.

    Raises:
        ConfigError: The heads cannot be divided; names ``tp``.
    """
    if shard.tp_size == 1:
        return spec
    kv_heads = head_range(spec.kv_heads, shard.tp_size, shard.tp_rank)
    heads = _share(spec.num_heads, shard, "query heads")
    sinks = None if spec.sinks is None else spec.sinks[heads.start : heads.stop].contiguous()
    return replace(spec, num_heads=len(heads), kv_heads=len(kv_heads), sinks=sinks)


def split_tensors(model: LoadedModel, attention: dict[int, AttentionSpec], shard: ShardSpec, reduce: Reduce) -> None:
    """Divide a model's weights in place.

    Args:
        model: The model, with whole layers.
        attention: Attention of each layer, with all heads, by the id of the module.
        shard: This rank.
        reduce: Sums over the ranks.

    Raises:
        ConfigError: The architecture or its sizes cannot be divided; names ``tp``.
    """
    if shard.tp_size == 1:
        return
    splitter = _Splitter(model, shard, reduce)
    for name, module in list(model.module.named_modules()):
        if id(module) in attention:
            splitter.split_attention(name, module, attention[id(module)])
    if len(splitter.attention_paths) != len(attention):
        raise InternalError(f"found {len(splitter.attention_paths)} of {len(attention)} attention modules")
    splitter.split_by_plan()


class _Splitter:
    def __init__(self, model: LoadedModel, shard: ShardSpec, reduce: Reduce) -> None:
        self._model = model
        self._shard = shard
        self._reduce = reduce
        self.attention_paths: list[str] = []

    def split_attention(self, path: str, module: nn.Module, spec: AttentionSpec) -> None:
        """Divide one layer's attention by heads."""
        heads = _share(spec.num_heads, self._shard, "query heads")
        kv_heads = head_range(spec.kv_heads, self._shard.tp_size, self._shard.tp_rank)
        num_kv_heads = spec.kv_heads
        if spec.latent:
            kv_heads = heads
            num_kv_heads = spec.num_heads
        self.attention_paths.append(path)
        names = set()
        for name, child in list(module.named_children()):
            names.add(name)
            if name in QUERY_PROJECTIONS:
                _keep_rows(self._linear(child, name), heads, spec.num_heads)
            elif name in KEY_VALUE_PROJECTIONS:
                _keep_rows(self._linear(child, name), kv_heads, num_kv_heads)
            elif name == "o_proj":
                self._keep_columns(path, self._linear(child, name), heads, spec.num_heads)
                setattr(module, name, Reduced(child, self._reduce))
            elif name == JOINED_PROJECTION:
                self._joined_attention(module, self._linear(child, name), spec, heads, kv_heads)
            elif name in HEAD_NORMS:
                if name[0] == "q":
                    self._head_norm(module, name, spec, heads, spec.num_heads)
                else:
                    self._head_norm(module, name, spec, kv_heads, num_kv_heads)
            elif name not in WHOLE_PROJECTIONS and _has_weights(child):
                raise self._refuse(f"its attention has {name}")
        separate = names & QUERY_PROJECTIONS and names & KEY_VALUE_PROJECTIONS
        if "o_proj" not in names or not (separate or JOINED_PROJECTION in names):
            raise self._refuse(f"its attention has only {', '.join(sorted(names))}")

    def _joined_attention(
        self, module: Any, linear: Linear, spec: AttentionSpec, heads: range, kv_heads: range
    ) -> None:
        """Divide queries, keys and values in one layer, one after the other (Phi-3)."""
        queries = (heads, spec.num_heads, spec.k_dim)
        keys = (kv_heads, spec.kv_heads, spec.k_dim)
        values = (kv_heads, spec.kv_heads, spec.v_dim)
        begin = 0
        rows: list[range] = []
        for own_heads, count, dim in (queries, keys, values):
            rows.append(range(begin + own_heads.start * dim, begin + own_heads.stop * dim))
            begin += count * dim
        if begin != linear.out_features:
            raise self._refuse(f"its {JOINED_PROJECTION} has {linear.out_features} outputs, not {begin}")
        _pick_rows(linear, rows)
        module.config = _WithHeads(module.config, len(heads))
        module.num_key_value_heads = len(kv_heads)

    def _head_norm(self, module: nn.Module, name: str, spec: AttentionSpec, heads: range, count: int) -> None:
        """Leave a norm within a head as it is; make one over all heads (OLMo 2) a norm over all ranks."""
        norm: Any = module.get_submodule(name)
        shapes = {tuple(weight.shape) for weight in norm.parameters()}
        if shapes == {(count * spec.k_dim,)} and count > 1 and getattr(norm, "bias", None) is None:
            weight = norm.weight[heads.start * spec.k_dim : heads.stop * spec.k_dim]
            setattr(module, name, SpanningNorm(norm, weight, self._shard, self._reduce))
        elif shapes != {(spec.k_dim,)}:
            raise self._refuse(f"{name} is no norm of a head or of all heads")

    def split_by_plan(self) -> None:
        """Divide the modules outside of attention, as transformers' plan says."""
        plan = dict(getattr(self._model.text_config, "base_model_tp_plan", None) or {})
        base = self._model.module.base_model
        prefix = next(f"{name}." for name, module in self._model.module.named_modules() if module is base)
        attention = tuple(f"{path}." for path in self.attention_paths)
        names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
        for pattern, style in plan.items():
            matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
            for name in filter(matches, names):
                if not f"{prefix}{name}".startswith(attention):
                    self._apply(base, name, style)
        for name, module in list(base.named_modules()):
            if isinstance(module, QuantizedExpertsModule):
                self._quantized_experts(base, name, module)
            elif has_interleaved_experts(module):
                self._interleaved_experts(base, name, module)

    def _apply(self, base: nn.Module, name: str, style: str) -> None:
        parent_name, _, leaf = name.rpartition(".")
        parent = base.get_submodule(parent_name)
        target: Any = getattr(parent, leaf)
        shard = self._shard
        if style == "moe_tp_experts":
            setattr(parent, leaf, Reduced(target, self._reduce))
        elif style == "packed_colwise" and isinstance(target, nn.Parameter):
            half = target.shape[-2] // 2
            rows = _share(half, shard, f"columns of {name}")
            picked = [_padded(target[..., at + rows.start : at + rows.stop, :], -2) for at in (0, half)]
            setattr(parent, leaf, _parameter(torch.cat(picked, dim=-2)))
        elif style == "rowwise" and isinstance(target, nn.Parameter):
            columns = _share(target.shape[-1], shard, f"columns of {name}")
            setattr(parent, leaf, _parameter(_padded(target[..., columns.start : columns.stop], -1)))
        elif style == "colwise":
            linear = self._linear(target, name)
            _keep_rows(linear, _share(linear.out_features, shard, f"columns of {name}"), linear.out_features)
        elif style == "rowwise":
            linear = self._linear(target, name)
            share = _share(linear.in_features, shard, f"columns of {name}")
            self._keep_columns(name, linear, share, linear.in_features)
            setattr(parent, leaf, Reduced(linear, self._reduce))
        elif leaf in JOINED_MLP and type(target) in LINEARS and all(hasattr(parent, name) for name in JOINED_MLP):
            self._joined_mlp(parent, leaf, target)  # the plan leaves it whole
        elif style not in WHOLE_STYLES:
            raise self._refuse(f"its plan divides {name} in the way {style!r}")

    def _joined_mlp(self, mlp: Any, leaf: str, linear: Linear) -> None:
        """Divide gate and up in one layer, one after the other (Phi-3, GLM 4), and down."""
        inner = linear.in_features if leaf == "down_proj" else linear.out_features // 2
        columns = _share(inner, self._shard, f"columns of {leaf}")
        if leaf == "down_proj":
            self._keep_columns(leaf, linear, columns, inner)
            setattr(mlp, leaf, Reduced(linear, self._reduce))
        else:
            _pick_rows(linear, [columns, range(inner + columns.start, inner + columns.stop)])

    def _interleaved_experts(self, base: nn.Module, name: str, experts: Any) -> None:
        """Divide GPT-OSS's experts [E, hidden, 2 * inner], alternating gates and ups, and biases; it has no plan."""
        inner = _share(experts.down_proj.shape[1], self._shard, f"columns of {name}")
        both = slice(2 * inner.start, 2 * inner.stop)
        experts.gate_up_proj = _parameter(_padded(experts.gate_up_proj[..., both], -1, pairs=True))
        experts.gate_up_proj_bias = _parameter(_padded(experts.gate_up_proj_bias[..., both], -1, pairs=True))
        experts.down_proj = _parameter(_padded(experts.down_proj[:, inner.start : inner.stop], 1))
        if self._shard.tp_rank:
            experts.down_proj_bias = _parameter(torch.zeros_like(experts.down_proj_bias))
        base.set_submodule(name, Reduced(experts, self._reduce))

    def _quantized_experts(self, base: nn.Module, name: str, experts: QuantizedExpertsModule) -> None:
        """Divide quantized experts: their plan names parameters, which they do not have."""
        inner = _share(experts.inner, self._shard, f"columns of {name}")
        try:
            experts.keep_inner(inner, first=self._shard.tp_rank == 0)
        except ValueError as error:
            raise self._refuse(f"{name}: {error}") from error
        if not name.endswith(".inner"):  # else the plan's style for experts has put them into a Reduced
            base.set_submodule(name, Reduced(experts, self._reduce))

    def _keep_columns(self, name: str, linear: Linear, units: range, count: int) -> None:
        """Reduce a layer to ``units`` of ``count`` equal groups of its inputs; only the first rank adds the bias."""
        each = linear.in_features // count
        columns = range(units.start * each, units.stop * each)
        if isinstance(linear, QuantizedModule):
            try:
                linear.keep_columns(columns)
            except ValueError as error:
                raise self._refuse(f"{name}: {error} that share a scale") from error
        else:
            linear.weight = _parameter(linear.weight[:, columns.start : columns.stop])
            linear.in_features = len(columns)
        if self._shard.tp_rank:
            linear.register_parameter("bias", None)

    def _linear(self, module: Any, name: str) -> Linear:
        if type(module) not in LINEARS:
            raise self._refuse(f"its {name} is no plain linear layer")
        return cast(Linear, module)

    def _refuse(self, why: str) -> ConfigError:
        return ConfigError(f"{self._model.architecture} cannot be divided over tp: {why}", field="tp")


def _share(count: int, shard: ShardSpec, what: str) -> range:
    each, left = divmod(count, shard.tp_size)
    if left:
        raise ConfigError(f"{count} {what} cannot be divided over tp={shard.tp_size}", field="tp")
    return range(shard.tp_rank * each, (shard.tp_rank + 1) * each)


def _padded(weights: torch.Tensor, dim: int, *, pairs: bool = False) -> torch.Tensor:
    """Fill a dimension of experts' weights up with zeros: to 16 bytes, as torch's grouped products take them.

    Args:
        weights: A rank's share of the inner dimension of experts.
        dim: That dimension.
        pairs: Whether it has a gate and an up for each element.
    """
    unit = _GROUPED_BYTES // weights.element_size() * (2 if pairs else 1)
    missing = -weights.shape[dim] % unit
    if not missing:
        return weights
    shape = list(weights.shape)
    shape[dim] = missing
    return torch.cat([weights, weights.new_zeros(shape)], dim)


def _keep_rows(linear: Linear, units: range, count: int) -> None:
    """Reduce a layer to ``units`` of ``count`` equal groups of its outputs."""
    each = linear.out_features // count
    _pick_rows(linear, [range(units.start * each, units.stop * each)])


def _pick_rows(linear: Linear, ranges: list[range]) -> None:
    """Reduce a layer to ranges of its outputs, one after the other."""
    if isinstance(linear, QuantizedModule):
        linear.keep_rows(ranges)
        return
    for name, whole in (("weight", linear.weight), ("bias", linear.bias)):
        if whole is not None:
            setattr(linear, name, _parameter(torch.cat([whole[each.start : each.stop] for each in ranges])))
    linear.out_features = sum(map(len, ranges))


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or bool(reloadable_weights(module))


def _parameter(part: torch.Tensor) -> nn.Parameter:
    """Return a parameter with a copy of ``part``, so that the whole can be freed."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


# Stages


def keep_stage(model: LoadedModel, layers: range, communicator: Communicator) -> None:
    """Drop, in place, the modules that this rank's stage does not compute.

    Args:
        model: The whole model.
        layers: Indices of the stage's layers.
        communicator: Receives and sends hidden states.

    Raises:
        ConfigError: The architecture cannot be cut into stages; names ``pp``.
    """
    norm = "" if communicator.spec.pp_size == 1 else _check_plan(model)
    if not communicator.has_head:
        # A layer without weights: unused logits cost nothing.
        model.module.set_output_embeddings(_NoHead())
    if communicator.spec.pp_size == 1:
        return
    base = model.module.base_model
    if not communicator.is_first_stage:
        model.module.set_input_embeddings(_NoEmbedding(model.text_config.hidden_size, model.module.dtype))
    if not communicator.is_last_stage:
        setattr(base, norm, nn.Identity())
    for index, layer in enumerate(base.layers):
        if index not in layers:
            _make_passthrough(layer)

    def receive(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        like = args[0] if args else kwargs["hidden_states"]
        hidden = communicator.receive_hidden(like.shape, like.dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def send(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> None:
        communicator.send_hidden(output)

    if not communicator.is_first_stage:
        base.layers[layers.start].register_forward_pre_hook(receive, with_kwargs=True)
    if not communicator.is_last_stage:
        base.layers[layers.stop - 1].register_forward_hook(send)


def _check_plan(model: LoadedModel) -> str:
    """Check that only hidden states go from layer to layer; return the name of the norm after them."""
    plan = dict(getattr(model.text_config, "base_model_pp_plan", None) or {})
    layers = plan.get("layers")
    known = {"hidden_states", "attention_mask"}
    base = model.module.base_model
    after = list(plan)[list(plan).index("layers") + 1 :] if layers else []
    why = needed_across_stages(model.text_config)
    if not layers or not set(layers[0]) <= known or layers[1] != ["hidden_states"] or len(after) != 1:
        why = "transformers has no plan"
    elif not isinstance(getattr(base, "layers", None), nn.ModuleList) or not hasattr(base, after[0]):
        why = why or "no list of layers"
    if why:
        raise ConfigError(f"{model.architecture} cannot be divided into pp stages: {why}", field="pp")
    return str(after[0])


def _make_passthrough(layer: nn.Module) -> None:
    """Make a layer of another stage return its input. Its attributes stay: some models read them in their loop."""
    for name, _ in list(layer.named_children()):
        delattr(layer, name)
    layer.forward = types.MethodType(_return_hidden, layer)


def _return_hidden(_: nn.Module, hidden_states: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    return hidden_states


class _NoEmbedding(nn.Module):
    """Replaces the embedding on later stages: returns zeros of the right shape, which are not used."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width = width
        self._dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return zeros [1, T, width], expanded from one number, for tokens [1, T]."""
        return torch.zeros((), dtype=self._dtype).expand(*tokens.shape, self._width)


class _NoHead(nn.Module):
    """Replaces the head on ranks that compute no logits."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [1, R, 0] for hidden [1, R, width]."""
        return hidden[..., :0]
