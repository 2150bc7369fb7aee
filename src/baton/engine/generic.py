"""The generic path: transformers' own modules, with Baton's attention in place of theirs."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from baton.engine.attention import AttentionName, Probe
from baton.engine.loader import LoadedModel
from baton.errors import InternalError
from baton_kernels.paged_attention import LayerPool, PagedAttention


class GenericDecoder:
    """A transformers model that attends over a paged pool."""

    def __init__(self, model: LoadedModel, probe: Probe, attention: PagedAttention) -> None:
        self.module = model.module
        self._specs = list(probe.specs.values())
        self._layer_of = {module: index for index, module in enumerate(probe.specs)}
        self._attention = attention
        self._device = model.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model.module).forward).parameters
        self._step: tuple[Any, list[LayerPool]] | None = None
        self._name = self._take_over()

    def _take_over(self) -> AttentionName:
        """Make the module call this object; through a weak reference, so that dropping it frees the model."""
        this = weakref.ref(self)

        def attention(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, None]:
            decoder = this()
            if decoder is None:
                raise InternalError("the runner of this model is gone")
            return decoder._attend(module, query, key, value), None

        name = AttentionName(attention)
        self.module.set_attn_implementation(name.name)
        return name

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: Any, pools: list[LayerPool]
    ) -> torch.Tensor:
        """Run tokens and positions int64 [T] through the model; returns the logits [R, vocab] of ``rows`` int64 [R]."""
        tokens, positions, rows = (tensor.to(self._device) for tensor in (tokens, positions, rows))
        options = {"logits_to_keep": rows} if self._keeps_logits else {}
        self._step = (plan, pools)
        try:
            output = self.module(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
            )
        finally:
            self._step = None
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[rows]

    def _attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer: query [1, heads, T, dim], key and value likewise -> [1, T, heads, v_dim]."""
        if self._step is None:
            raise InternalError("attention outside of a step")
        plan, pools = self._step
        layer = self._layer_of[id(module)]
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._attention.run(plan, self._specs[layer], pools[layer], q, k, v)[None]
