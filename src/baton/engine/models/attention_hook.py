"""Replaces a transformers model's attention by Baton's, and finds out what each layer's attention is.

transformers looks the attention function up in a registry by the name in the model's config. Every runner registers a
name of its own whose function leads to that runner alone, so that nothing is global and models that drop unknown
keyword arguments work too. Masks are not made at all: sequences and windows are the operator's business.

One dense forward of a few tokens (:func:`probe`) shows what a layer needs: the model passes shapes, scale, sinks and
soft cap; windows and chunks are derived from the mask that transformers would have made.

In multi-head latent attention, transformers' modules compute a latent and a rotary key per token, expand both in
``expand_kv`` and attend over the result. Here that method returns them unchanged, the pool stores them, and the
projection is applied to queries and outputs (:mod:`baton_kernels.paged_attention.latent`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from baton.engine.models.loader import LoadedModel
from baton.engine.models.quirks import LATENT_EXPANSION, LATENT_PROJECTION, attention_sinks
from baton.engine.models.recurrent import RecurrentLayers
from baton.errors import ConfigError
from baton_kernels.paged_attention import AttentionSpec, LatentProjections

log = logging.getLogger(__name__)

PROBE_TOKENS = 8

INPUTS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Keyword arguments of attention functions that the probe uses."""
WITHOUT_EFFECT = frozenset(
    {
        "attention_mask",  # None, or refused
        "dropout",  # 0 outside of training
        "is_causal",  # True, or refused
        "labels",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keyword arguments that modules pass on from their model's call, and that do not change the attention."""
_KNOWN = INPUTS | WITHOUT_EFFECT


def check_inputs(architecture: str, attention_mask: Any, kwargs: dict[str, Any]) -> None:
    """Refuse arguments of a module's attention function that Baton's attention does not use.

    Raises:
        ConfigError: There are such arguments; names them.
    """
    causal = kwargs.get("is_causal") is not False
    if attention_mask is None and causal and kwargs.keys() <= _KNOWN:
        return
    unused = [name for name, value in kwargs.items() if value is not None and name not in _KNOWN]
    if attention_mask is not None:
        unused.insert(0, "an attention mask of its own")
    if not causal:
        unused.insert(0, "is_causal=False")
    if unused:
        what = f"it passes {', '.join(unused)} to its attention, which Baton does not use"
        raise ConfigError(f"{architecture} cannot be served: {what}", field="model")


class AttentionName:
    """A name in transformers' registries for one attention function, until it is closed or garbage."""

    def __init__(self, function: Callable[..., Any], mask: Callable[..., Any] | None = None) -> None:
        self.name = f"baton-{secrets.token_hex(8)}"
        AttentionInterface.register(self.name, function)
        if mask is not None:
            AttentionMaskInterface.register(self.name, mask)
        self.close = weakref.finalize(self, _unregister, self.name)


def _unregister(name: str) -> None:
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


@dataclass(frozen=True, slots=True)
class _Reach:
    """The keys that a mask shows: all before a query, those of a window, or those of the query's chunk.

    Attributes:
        window: Number of keys in the window; 0: no window.
        chunk: Tokens of a chunk; 0: no chunks.
    """

    window: int = 0
    chunk: int = 0

    def first_key(self, query: int) -> int:
        """Return the first key that a query sees; the last one is the query's own."""
        if self.chunk:
            return query // self.chunk * self.chunk
        return max(0, query - self.window + 1) if self.window else 0


class _Recorder:
    """Replaces attention and masks during the probe, and records each layer's attention."""

    def __init__(self, architecture: str, max_len: int) -> None:
        self.architecture = architecture
        self.max_len = max_len
        self.specs: dict[int, AttentionSpec] = {}
        self._reaches: dict[int, _Reach | str] = {}
        self._masks: list[torch.Tensor] = []

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(f"{self.architecture} cannot be served: {why}", field="model")

    def mask(
        self, *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], device: Any = None, **_: Any
    ) -> torch.Tensor:
        """Replaces the mask interface: returns a mask whose storage identifies its reach.

        A mask that Baton's attention does not support is refused when a layer uses it: some models make unused masks.
        """
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device).tril()
        self._masks.append(mask)
        try:
            reach: _Reach | str = self._reach(mask_function)
        except Exception:
            log.debug("%s: a mask that cannot be evaluated", self.architecture, exc_info=True)
            reach = "it makes an attention mask of its own"
        self._reaches[mask.untyped_storage().data_ptr()] = reach
        return mask

    def _reach(self, mask_function: Callable[..., torch.Tensor]) -> _Reach | str:
        """Evaluate a mask function over all keys; return its reach, or why it is not supported."""
        keys = torch.arange(self.max_len)
        zero = torch.zeros((), dtype=torch.long)

        def visible(query: int) -> torch.Tensor:
            return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(self.max_len)

        def shows(reach: _Reach) -> bool:
            size = reach.window or reach.chunk
            near = {0, 1, 2, 7, size - 1, size, size + 1, 2 * size - 1, 2 * size}
            queries = {last // 3, last // 2 + 1, last} | {query for query in near if 0 <= query <= last}
            return all(
                torch.equal(visible(query), (keys >= reach.first_key(query)) & (keys <= query)) for query in queries
            )

        last = self.max_len - 1
        seen = int(visible(last).sum())
        candidates = [
            _Reach() if seen == self.max_len else _Reach(window=seen),
            _Reach(chunk=self._first_query_without_first_key(visible)),
        ]
        return next(
            (reach for reach in candidates if shows(reach)), "its attention mask is neither causal, a window nor chunks"
        )

    def _first_query_without_first_key(self, visible: Callable[[int], torch.Tensor]) -> int:
        """Return the first query that does not see the first key, or the maximum length."""
        low = 1
        high = self.max_len
        while low < high:
            middle = (low + high) // 2
            if bool(visible(middle)[0]):
                low = middle + 1
            else:
                high = middle
        return low

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Replaces the attention function: records the layer and attends densely."""
        if id(module) in self.specs:
            raise self.refuse("an attention module attends more than once in a forward")
        if getattr(module, "is_causal", True) is False:
            raise self.refuse("its attention is not causal")
        check_inputs(self.architecture, None, kwargs)
        window = kwargs.get("sliding_window") or 0
        reach: _Reach | str = _Reach(window=int(window) if window < self.max_len else 0)
        if attention_mask is not None:
            own = "it makes an attention mask of its own"
            reach = self._reaches.get(attention_mask.untyped_storage().data_ptr(), own)
        if isinstance(reach, str):
            raise self.refuse(reach)
        scaling = kwargs.get("scaling")
        sinks = attention_sinks(module, kwargs.get("s_aux"))
        self.specs[id(module)] = AttentionSpec(
            num_heads=query.shape[1],
            kv_heads=key.shape[1],
            k_dim=key.shape[3],
            v_dim=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
            window=reach.window,
            chunk=reach.chunk,
            softcap=float(kwargs.get("softcap") or 0.0),
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None


def probe(
    model: LoadedModel, max_len: int, recurrent: RecurrentLayers | None = None
) -> tuple[dict[int, AttentionSpec], int]:
    """Run a few tokens densely and return each layer's attention.

    Args:
        model: The whole model.
        max_len: Longest sequence in tokens.
        recurrent: The model's recurrent layers, whose states the run shows.

    Returns:
        The attention of each layer by the id of its module, in the order of the forward, and the longest sequence, in
        tokens, for which it is right: at most ``max_len``, less where ``generate`` drops keys that the masks show.

    Raises:
        ConfigError: The model's attention is not causal, sliding or chunked, or layers have no replaceable attention.
    """
    recorder = _Recorder(model.architecture, max_len)
    name = AttentionName(recorder.attention, recorder.mask)
    try:
        model.module.set_attn_implementation(name.name)
        tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.text_config.vocab_size
        states = contextlib.nullcontext() if recurrent is None else recurrent.record_shapes()
        with torch.inference_mode(), states:
            model.module(
                input_ids=tokens, position_ids=torch.arange(PROBE_TOKENS, device=model.device)[None], use_cache=False
            )
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise recorder.refuse(f"a trial run failed ({reason})") from error
    finally:
        model.module.set_attn_implementation("eager")
        name.close()
    if recurrent is not None:  # which of its layers attend is in no common field: the self-check has to show it
        return recorder.specs, max_len
    layers = getattr(model.text_config, "num_hidden_layers", len(recorder.specs))
    if len(recorder.specs) != layers:
        raise recorder.refuse(f"{len(recorder.specs)} of its {layers} layers use the replaceable attention function")
    return recorder.specs, _consistent_length(model, list(recorder.specs.values()), max_len)


def _consistent_length(model: LoadedModel, specs: list[AttentionSpec], max_len: int) -> int:
    """Return the longest sequence for which transformers' cache keeps all keys that the masks show.

    Moshi makes causal masks and has a cache for ``sliding_window`` tokens: what it computes beyond depends on chunks.
    """
    layers = DynamicCache(config=model.text_config).layers
    if len(layers) != len(specs):
        return max_len
    for layer, spec in zip(layers, specs, strict=True):
        cached = getattr(layer, "sliding_window", None)
        if cached and not spec.window and not spec.chunk and cached < max_len:
            max_len = int(cached)
            log.warning("%s: serving sequences up to %d tokens: its cache keeps no more", model.architecture, max_len)
    return max_len


# Multi-head latent attention


LATENT_CHECK_TOKENS = 3
"""Tokens that an expansion is checked with."""
LATENT_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest |difference| / |expansion| of an expansion that is linear in the latent, by dtype."""


def use_latents(model: LoadedModel, attention: dict[int, AttentionSpec]) -> dict[int, AttentionSpec]:
    """Return the attention of a model's layers over latents, where keys and values expand from latents.

    Args:
        model: The whole model.
        attention: Attention of each layer over its keys and values, by the id of its module.
    """
    modules = {id(module): module for module in model.module.modules() if id(module) in attention}
    return {key: _latent_attention(model, modules[key], spec) for key, spec in attention.items()}


def absorb_projections(model: LoadedModel, attention: dict[int, AttentionSpec]) -> dict[int, LatentProjections]:
    """Change the modules that attend over latents, in place, so that they do not expand them.

    Such a module then calls its attention function with the latents [1, 1, T, rank] as keys and the rotary keys
    [1, 1, T, rope] as values.

    Args:
        model: This rank's share of the model.
        attention: Attention of this rank's layers, by the id of the module.

    Returns:
        The projections that queries and outputs have to be multiplied with, by the id of the module.
    """
    projections = {}
    for module in model.module.modules():
        spec = attention.get(id(module))
        if spec is not None and spec.latent:
            layer: Any = module
            weight = getattr(layer, LATENT_PROJECTION).weight.detach()
            projections[id(module)] = LatentProjections(weight, spec.num_heads, layer.v_head_dim)
            delattr(layer, LATENT_PROJECTION)  # or its weight would be packed too
            setattr(layer, LATENT_EXPANSION, _keep_latents)
    return projections


def _keep_latents(latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotary


def _latent_attention(model: LoadedModel, module: Any, spec: AttentionSpec) -> AttentionSpec:
    """Return the attention of a layer over latents, or ``spec`` if its keys and values do not expand from latents."""
    up: Any = getattr(module, LATENT_PROJECTION, None)
    expand: Any = getattr(module, LATENT_EXPANSION, None)
    if type(up) is not nn.Linear or expand is None or getattr(module, "v_head_dim", None) != spec.v_dim:
        return spec
    rank = up.in_features
    nope = up.out_features // spec.num_heads - spec.v_dim
    rope = spec.k_dim - nope
    bias: Any = up.bias
    if bias is not None or spec.kv_heads != spec.num_heads or rope < 0 or nope < 1:
        return spec
    projections = LatentProjections(up.weight.detach(), spec.num_heads, spec.v_dim)
    with torch.inference_mode():
        rows = torch.randn(LATENT_CHECK_TOKENS, rank + rope, generator=torch.Generator().manual_seed(0))
        rows = rows.to(up.weight)
        latents, rotary = rows.tensor_split([rank], dim=1)
        expected = torch.cat(expand(latents[None, None], rotary[None, None]), dim=-1)[0].transpose(0, 1).float()
        expanded = torch.cat(projections.expand(rows), dim=-1).float()
    limit = LATENT_TOLERANCE[model.dtype] * expanded.norm()
    if expected.shape != expanded.shape or not (expected - expanded).norm() <= limit:
        log.warning("%s: its latents expand in a way of their own: keys and values are kept", model.architecture)
        return spec
    return dataclasses.replace(spec, kv_heads=1, k_dim=rank + rope, v_dim=rank, latent=True)
