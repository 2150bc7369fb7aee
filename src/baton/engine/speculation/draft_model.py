"""A smaller model with the same tokenizer drafts, with a KV pool of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from baton.config import EngineConfig
from baton.engine.device.compute import ComputeDevice, rank_device
from baton.engine.device.pool import new_arena
from baton.engine.executor.base import Executor, load_executor
from baton.engine.sequence import Sequence
from baton.engine.speculation.chain import ChainDrafter, ChainState, Part, chain_batch, draft_blocks
from baton.errors import ConfigError
from baton.kv_cache.shards import KVShards, shard_layout
from baton.tokenizer.model_files import tokenizer_digest


@dataclass(slots=True)
class ModelState(ChainState):
    """What the draft model has computed of a sequence.

    Attributes:
        base: Tokens that the sequence had when it was drafted for: what is computed behind them is of ``draft``.
    """

    base: int = 0


class ModelDrafter(ChainDrafter[ModelState]):
    """A :class:`~baton.engine.speculation.drafter.Drafter` that runs a model.

    Args:
        executor: Has loaded the draft model.
        num_blocks: Of its KV pool.
        devices: Where each of its ranks runs.
    """

    name = "draft"

    def __init__(self, executor: Executor, num_blocks: int, devices: SequenceOf[ComputeDevice]) -> None:
        super().__init__(num_blocks, executor.layout.block_size, executor.max_model_len, devices[0])
        self._executor = executor
        layouts = [
            shard_layout(executor.geometry, spec, self._block_size, executor.layout.groups) for spec in executor.shards
        ]
        private = len(layouts) == 1
        arenas = [
            new_arena(device, num_blocks, each.block_bytes, private=private, leader=devices[0])
            for device, each in zip(devices, layouts, strict=True)
        ]
        self._shards = KVShards(arenas)
        executor.bind(self._shards)

    def _known(self, sequence: Sequence) -> ModelState:
        state = self._states.pop(sequence, None) or ModelState()
        self._states[sequence] = state  # used last
        if sequence.num_tokens < state.base:  # rolled back: nobody knows how far it is the same
            state.num_computed = 0
        came = sequence.buffer[state.base : sequence.num_tokens].tolist()
        right = 0
        while right < min(len(came), len(state.draft)) and came[right] == state.draft[right]:
            right += 1
        # The last token is computed in any case: its logits are wanted.
        state.num_computed = min(state.num_computed, state.base + right, sequence.num_tokens - 1)
        state.base = sequence.num_tokens
        return state

    def _forward(self, parts: SequenceOf[Part[ModelState]]) -> torch.Tensor:
        logits = self._executor.forward(chain_batch(parts)).logits
        for _, state, new in parts:
            state.num_computed += len(new)
        return logits

    def close(self) -> None:
        """Give the memory back, and end the draft model's other processes; harmless if repeated."""
        super().close()
        self._executor.close()
        self._shards.close()


def load_draft_model(config: EngineConfig, executor: Executor) -> ModelDrafter:
    """Load ``speculative_model`` beside a target model.

    Raises:
        ConfigError: It is missing, cannot be loaded, or has another tokenizer or vocabulary; names
            ``speculative_model``.
    """
    path = config.speculative_model
    if not path:
        raise ConfigError("speculative draft needs --speculative-model", field="speculative_model")
    own = dataclasses.replace(
        config,
        model=path,
        device=",".join(config.device.split(",")[: config.speculative_tp]),
        tp=config.speculative_tp,
        pp=1,
        quantization="none",  # the target's flags: the draft's checkpoint may be quantized itself
        quantized_activations="auto",
        max_model_len=None,
        layer_groups=False,
        kv_dtype="auto",
        kv_skip_layers=(),
        executor="auto",
        speculative="none",
        speculative_model="",
        speculative_tp=1,
        speculative_tokens=None,
    )
    try:
        if tokenizer_digest(path) != tokenizer_digest(config.model):
            raise ConfigError("it has another tokenizer", field="speculative_model")
        draft = load_executor(own)
    except ConfigError as error:
        raise ConfigError(f"speculative_model {path!r}: {error.message}", field="speculative_model") from error
    if draft.vocab_size != executor.vocab_size:
        draft.close()
        raise ConfigError(
            f"speculative_model {path!r} has a vocabulary of {draft.vocab_size}, the model of {executor.vocab_size}",
            field="speculative_model",
        )
    blocks = draft_blocks(config, draft.max_model_len, draft.layout.block_bytes, draft.device)
    ranks = len(draft.shards)
    return ModelDrafter(draft, blocks, [rank_device(own.device, rank, ranks) for rank in range(ranks)])
