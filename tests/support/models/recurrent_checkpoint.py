"""Tiny checkpoints of models with recurrent layers, and what transformers generates with them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tests.support.models.architectures import VOCAB, Case, make_model

from baton.config import EngineConfig

NEW_TOKENS = 12


class RecurrentCheckpoint:
    """A tiny model of a type, written to a folder."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.folder = folder
        self._model = make_model(Case(model_type), folder)

    def generate(self, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
        """Return what transformers generates, whatever ends it meets."""
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return list(output[0, len(prompt) :].tolist())

    def config(self, **changes: Any) -> EngineConfig:
        """Return the configuration of an engine that serves it."""
        values = {"dtype": "float32", "kv_blocks": 400, "max_model_len": 256, "prefill_chunk": 32, **changes}
        return EngineConfig(model=str(self.folder), **values)


def random_tokens(count: int, seed: int) -> list[int]:
    """Return tokens of a prompt."""
    rng = random.Random(seed)
    return [rng.randrange(8, VOCAB) for _ in range(count)]
