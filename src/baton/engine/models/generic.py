"""The generic path: transformers' own modules, with Baton's attention in place of theirs."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from baton.engine.models.attention_hook import AttentionName
from baton.engine.models.loader import LoadedModel
from baton.engine.models.parallel import Share
from baton.errors import InternalError
from baton_kernels.paged_attention import LayerPool, PagedAttention


class GenericDecoder:
    """A transformers model that attends over a paged pool.

    Attributes:
        on_layer: Called with a layer's index once its KV is in the pools of all ranks that share it.
    """

    def __init__(self, model: LoadedModel, share: Share, attention: PagedAttention) -> None:
        self.module = model.module
        self.on_layer: Callable[[int], None] | None = None
        self._specs = list(share.specs.values())
        self._layer_of = {module: index for index, module in enumerate(share.specs)}
        self._first_layer = share.first_layer
        self._attention = attention
        self._device = model.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model.module).forward).parameters
        self._step: tuple[Any, list[LayerPool]] | None = None
        self._hidden: torch.Tensor | None = None
        self._name = self._take_over()
        # Other ranks have written a layer's heads once the sum after its attention is there, at the module's end.
        self._reports_in_attention = not share.communicator.splits_heads
        if not self._reports_in_attention:
            self._report_after_attention()
        if share.communicator.has_head:
            self._keep_hidden()

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

    def _report_after_attention(self) -> None:
        this = weakref.ref(self)

        def report(module: Any, *_: Any) -> None:
            decoder = this()
            if decoder is not None and decoder.on_layer is not None and decoder._step is not None:
                decoder.on_layer(decoder._first_layer + decoder._layer_of[id(module)])

        for module in self.module.modules():
            if id(module) in self._layer_of:
                module.register_forward_hook(report)

    def _keep_hidden(self) -> None:
        """Keep what the stack below the head returns."""
        this = weakref.ref(self)

        def keep(_: Any, __: Any, output: Any) -> None:
            decoder = this()
            if decoder is not None:
                decoder._hidden = getattr(output, "last_hidden_state", None)

        if self.module.base_model is not self.module:
            self.module.base_model.register_forward_hook(keep)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: Any, pools: list[LayerPool]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run tokens and positions int64 [T] through the model.

        Returns:
            The logits [R, vocab] of ``rows`` int64 [R], and their hidden states [R, width] after the final norm, or
            ``None`` if this rank, or the architecture, has none to show.
        """
        tokens, positions, rows = (tensor.to(self._device) for tensor in (tokens, positions, rows))
        options = {"logits_to_keep": rows} if self._keeps_logits else {}
        self._step = (plan, pools)
        try:
            output = self.module(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
            )
            hidden = None if self._hidden is None else self._hidden[0][rows]
        finally:
            self._step = self._hidden = None
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[rows]), hidden

    def _attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer: query [1, heads, T, dim], key and value likewise -> [1, T, heads, v_dim]."""
        if self._step is None:
            raise InternalError("attention outside of a step")
        plan, pools = self._step
        layer = self._layer_of[id(module)]
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = self._attention.run(plan, self._specs[layer], pools[layer], q, k, v)[None]
        if self.on_layer is not None and self._reports_in_attention:
            self.on_layer(self._first_layer + layer)
        return out
