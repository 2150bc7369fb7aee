"""``mtp``: a model's own next-token-prediction layer drafts, again and again, with KV of its own.

It drafts as an EAGLE head does: a slot stands for a token and the hidden state of the token before it, after the final
norm, and the layer's own state stands in for that behind the last token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from baton.config import EngineConfig
from baton.engine.attention import cpu_operators
from baton.engine.communicator import Communicator
from baton.engine.executor.base import Executor
from baton.engine.models.attention_hook import probe, use_latents
from baton.engine.models.generic import GenericDecoder, PackedModule, choose_linear, pack_modules
from baton.engine.models.layer_operators import CpuOperators, GpuOperators
from baton.engine.models.loader import LoadedModel
from baton.engine.models.next_token import load_next_token
from baton.engine.models.parallel import divide
from baton.engine.speculation.eagle import EagleDrafter, draft_attention, layers_in_blocks
from baton.engine.speculation.eagle_head import FINAL
from baton.engine.speculation.head_weights import target_embedding, target_head, target_of
from baton.kv_cache.shards import shard_specs
from baton_kernels.linear import PlainLinear
from baton_kernels.paged_attention import LayerPool, PagedAttention


class NextTokenHead:
    """The layer, run by transformers' modules with Baton's attention, linears and experts.

    Args:
        config: Of the engine.
        target: The model.
        max_len: Longest sequence of the target.
        attention: What computes its attention.

    Attributes:
        hidden_of: Which hidden states of the target it reads.
        width: Elements of one.
        spec: Its attention.
        attention: As given.
        dtype: The target's, by name.

    Raises:
        ConfigError: The checkpoint has no such layer (names ``speculative``), or a damaged one (names ``model``).
    """

    hidden_of: tuple[int, ...] = (FINAL,)

    def __init__(self, config: EngineConfig, target: LoadedModel, max_len: int, attention: PagedAttention) -> None:
        self._layer = load_next_token(config, target)
        model = self._layer.model
        specs, _ = probe(model, max_len)
        self._share = divide(model, use_latents(model, specs), Communicator(shard_specs(1, 1)[0]))
        (self.spec,) = self._share.specs.values()
        self.dtype, self.attention, self.width = model.dtype, attention, int(target.text_config.hidden_size)
        self._decoder = GenericDecoder(model, self._share, attention)
        on_gpu = target.compute.on_gpu
        library = cpu_operators(config, on_gpu=on_gpu)
        _, make = choose_linear(config, model, library)
        pack_modules(model.module, GpuOperators() if on_gpu else CpuOperators(library, make))
        self._embedding = target_embedding(target)
        self._head: Any = target_head(target)
        if type(self._head) is nn.Linear and make is not PlainLinear:
            self._head = PackedModule(make(self._head.weight, self._head.bias))

    def join(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what slots take of the target's hidden states, each [T, width] -> [T, width]."""
        return hidden[0]

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, plan: Any, pool: LayerPool
    ) -> torch.Tensor:
        """Compute slots: tokens and positions int64 [T], hidden [T, width] -> their hidden states [T, width]."""
        self._layer.give(self._embedding(tokens), hidden)
        rows = torch.arange(len(tokens), device=tokens.device)
        states, _ = self._decoder.forward(tokens, positions, rows, plan, [pool])
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits float32 [R, vocab] of hidden states [R, width]."""
        logits: torch.Tensor = self._head(hidden)
        return logits.float()


def load_mtp(config: EngineConfig, executor: Executor) -> EagleDrafter:
    """Load the next-token layer of the model's own checkpoint.

    Raises:
        ConfigError: As :class:`NextTokenHead`, or the target is divided (names ``speculative``).
    """
    target = target_of(config, executor)
    head = NextTokenHead(config, target, executor.max_model_len, draft_attention(config, target))
    drafter = EagleDrafter("mtp", head, config, executor.max_model_len, target.compute)
    drafter.layers = layers_in_blocks(executor, "mtp", head, config.block_size)
    return drafter
