"""Puts Baton's attention in place of a transformers model's own, and finds out what each layer's attention is.

transformers asks a registry for the attention function by the name in the model's config. Every runner registers a
name of its own whose function leads to that runner alone, so that nothing global is needed and models that drop
unknown keyword arguments work too. Masks are not made at all: sequences and windows are the operator's business.

What a layer needs is learnt by one dense forward of a few tokens (:func:`probe`): shapes, scale, sinks and soft cap
are what the model passes; windows and chunks are read off the mask that transformers itself would have made.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from baton.engine.models.loader import LoadedModel
from baton.engine.models.quirks import attention_sinks
from baton.errors import ConfigError
from baton_kernels.paged_attention import AttentionSpec

log = logging.getLogger(__name__)

PROBE_TOKENS = 8

INPUTS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""What modules pass to their attention by name and the probe notes."""
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
"""What modules pass on of what their model was called with, and what does not change what is attended to."""
_KNOWN = INPUTS | WITHOUT_EFFECT


def check_inputs(architecture: str, attention_mask: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what a module passes to its attention function and Baton's attention does not use.

    Raises:
        ConfigError: Names it.
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
    """A name in transformers' registries that leads to one attention function, until closed."""

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
    """Which keys a mask shows: all before a query, those of a window, or those of the query's chunk."""

    window: int = 0
    chunk: int = 0

    def first_key(self, query: int) -> int:
        """Return the first key that a query sees; the last one is its own."""
        if self.chunk:
            return query // self.chunk * self.chunk
        return max(0, query - self.window + 1) if self.window else 0


class _Recorder:
    """Stands in for attention and masks during the probe."""

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
        """Stands in for a mask interface: returns a mask whose storage tells what it means.

        One that Baton's attention cannot do is refused when a layer uses it: some models make masks for none.
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
        """Evaluate a mask function far out and find what it shows, or say that it is none that is known."""
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
            _Reach(chunk=self._until_hidden(visible)),
        ]
        return next(
            (reach for reach in candidates if shows(reach)), "its attention mask is neither causal, a window nor chunks"
        )

    def _until_hidden(self, visible: Callable[[int], torch.Tensor]) -> int:
        """Return the first query that does not see the first key, or the longest sequence."""
        low, high = 1, self.max_len
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
        """Stands in for the attention function: notes the layer and attends densely."""
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
        scaling, sinks = kwargs.get("scaling"), attention_sinks(module, kwargs.get("s_aux"))
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


def probe(model: LoadedModel, max_len: int) -> tuple[dict[int, AttentionSpec], int]:
    """Run a few tokens densely and note each layer's attention.

    Returns:
        The attention of each layer by the id of its module, in the order of the forward, and the longest sequence for
        which that is right: at most ``max_len``, less where ``generate`` drops keys that the model's own masks show.

    Raises:
        ConfigError: The model's attention is more than a causal or sliding mask or chunks, or layers have none.
    """
    recorder = _Recorder(model.architecture, max_len)
    name = AttentionName(recorder.attention, recorder.mask)
    try:
        model.module.set_attn_implementation(name.name)
        tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.text_config.vocab_size
        with torch.inference_mode():
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
        kept = getattr(layer, "sliding_window", None)
        if kept and not spec.window and not spec.chunk and kept < max_len:
            max_len = int(kept)
            log.warning("%s: serving sequences up to %d tokens: its cache keeps no more", model.architecture, max_len)
    return max_len
