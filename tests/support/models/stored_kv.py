"""Hugging Face models whose keys and values are rounded as int8 KV rounds them: what engines with it must give."""

from __future__ import annotations

import bisect
import heapq
import inspect
import math
import queue
import random
import sched
import shlex
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from tests.support.child_env import ROOT
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from baton.engine.models.loader import quiet_transformers
from baton_kernels.paged_attention.quantized import quantize_rows

MODEL = str(ROOT / "models" / "baton-tiny")
Rounding = Callable[[torch.Tensor], torch.Tensor]


def as_int8(x: torch.Tensor) -> torch.Tensor:
    """What int8 KV reads x [..., dim] as."""
    q, scales = quantize_rows(x)
    return (q.float() * scales.float()[..., None]).to(x.dtype)


def kv_scales(layers: int, k: float | list[float], v: float | list[float]) -> dict[str, torch.Tensor]:
    """The tensors that checkpoints have for fp8 KV, the same for all layers."""
    return {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(value)
        for layer in range(layers)
        for side, value in (("k", k), ("v", v))
    }


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Have a checkpoint of one file hold more; returns its folder."""
    (path,) = folder.glob("*.safetensors")
    kept = {name: tensor.clone() for name, tensor in load_file(path).items()}  # what was loaded lies in the file
    save_file(kept | tensors, path, metadata={"format": "pt"})
    return folder


def _attention(rounding: Rounding) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        key, value = (rounding(x).repeat_interleave(group, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * float(kwargs.get("scaling") or 1 / math.sqrt(query.shape[3]))
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def rounded_model(path: str, rounding: Rounding = as_int8) -> Iterator[Any]:
    """A model in float32 whose keys and values are rounded before they are attended to."""
    name = f"rounded-{id(rounding)}"
    AttentionInterface.register(name, _attention(rounding))
    with quiet_transformers():
        model = cast(Any, AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.set_attn_implementation(name)
    yield model.eval()
    AttentionInterface._global_mapping.pop(name)


def texts(count: int, *, shortest: int = 40, longest: int = 160, seed: int = 0) -> list[list[int]]:
    """Prompts that no two of have a beginning in common: code that no commit changes, as baton-tiny has it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    modules = (bisect, heapq, queue, sched, shlex, textwrap)
    text = [token for module in modules for token in tokenizer(inspect.getsource(module)[:6000])["input_ids"]]
    rng = random.Random(seed)
    prompts = []
    for number in range(count):
        first, length = rng.randrange(len(text) - longest), rng.randrange(shortest, longest)
        prompts.append([300 + number, *text[first : first + length]])
    return prompts


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], new_tokens: int, clear: float = 0.0) -> list[list[int]]:
    """Greedy tokens of each prompt, up to the first that leads by less than ``clear``."""
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + new_tokens:
            best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            if float(best.values[0] - best.values[1]) < clear:
                break
            tokens.append(int(best.indices[0]))
        found.append(tokens[len(prompt) :])
    return found


def clear_texts(model: Any, count: int, new_tokens: int, clear: float, seed: int = 0) -> list[list[int]]:
    """The first of ``texts`` all of whose greedy tokens lead by ``clear`` at least.

    Int8 KV that is computed in a batch of another make-up may be rounded the other way: that moves logits by less.
    """
    many = texts(4 * count, seed=seed)
    clearly = (prompt for prompt in many if len(greedy(model, [prompt], new_tokens, clear)[0]) == new_tokens)
    return list(islice(clearly, count))
