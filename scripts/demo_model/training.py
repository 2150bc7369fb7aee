"""The network, its loss, and the training loop."""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from .batches import CHAT_FRACTION, RowSource
from .tokenizer import END_OF_TEXT, TURN_END, IntArray

LOGGER = logging.getLogger(__name__)

MAX_CONTEXT = 2048
LONG_EVERY = 12
"""Every so many steps the rows have the full context."""
WEIGHT_DECAY = 0.1
CURVE_POINTS = 40


@dataclass(frozen=True)
class Shape:
    """Widths of a model."""

    hidden: int = 192
    mlp: int = 512
    heads: int = 6
    kv_heads: int = 2


def build_model(tokenizer: Any, layers: int, shape: Shape = Shape(), max_context: int = MAX_CONTEXT) -> Any:
    """Create the untrained model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        max_position_embeddings=max_context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config)


def token_losses(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the loss of every target token, in nats; all three of shape ``(rows, context)``."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    losses = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
    return losses.view(targets.shape)


@torch.no_grad()
def evaluate_rows(model: Any, rows: IntArray, batch: int) -> npt.NDArray[np.float64]:
    """Compute the losses of ``(rows, context + 1)`` tokens, ``batch`` rows at a time.

    Returns:
        Losses of shape ``(rows, context)`` in nats, NaN where the target is negative.
    """
    parts: list[npt.NDArray[np.float64]] = []
    for start in range(0, len(rows), batch):
        block = torch.from_numpy(rows[start : start + batch])
        targets = block[:, 1:]
        losses = token_losses(model, block[:, :-1].clamp(min=0), targets)
        parts.append(losses.masked_fill(targets < 0, float("nan")).double().numpy())
    return np.concatenate(parts)


def make_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    """Create AdamW with weight decay on the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, warmup: int, progress: float) -> float:
    """Share of the peak: linear warm-up by steps, cosine decay to 2 % by progress."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * cosine)


def compile_losses(model: Any, rows: int, context: int) -> Callable[..., torch.Tensor] | None:
    """Compile ``token_losses`` for one shape; None where that fails, for want of a C++ compiler, say."""
    compiled = torch.compile(token_losses, dynamic=False)
    probe = torch.zeros(rows, context, dtype=torch.int64)
    try:
        torch.autograd.backward(compiled(model, probe, probe).mean())
    except Exception:
        LOGGER.warning("torch.compile failed here; going on without it", exc_info=True)
        return None
    finally:
        model.zero_grad()
    return compiled


def train(
    model: Any, source: RowSource, held_out: IntArray, args: argparse.Namespace, started: float
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Train the model in place until the steps, or the minutes since ``started`` (monotonic seconds), are spent.

    Returns:
        The loss curve (``held_out`` rows give its held-out loss) and facts for the log.
    """
    optimizer = make_optimizer(model, args.lr)
    loop_started = time.monotonic()
    compiled = compile_losses(model, args.rows, args.context) if args.compile else None
    curve: list[dict[str, float]] = []
    recent = [math.log(model.config.vocab_size)]  # what an untrained model should lose
    step, tokens, next_point = 0, 0, 0.0
    while True:
        minutes = (time.monotonic() - started) / 60.0
        # The schedule of a run bounded by steps must not depend on the clock.
        progress = step / args.steps if args.steps else minutes / args.minutes
        finished = progress >= 1.0 or minutes >= args.minutes
        if finished or progress >= next_point:
            held_out_loss = float(np.nanmean(evaluate_rows(model, held_out, args.rows)))
            point = {
                "step": step,
                "tokens": tokens,
                "minutes": round((time.monotonic() - started) / 60.0, 2),
                "train_loss": round(float(np.mean(recent)), 4),
                "held_out_loss": round(held_out_loss, 4),
            }
            curve.append(point)
            LOGGER.info("step %d  tokens %d  %.1f min  train %.3f  held-out %.3f", *point.values())
            recent.clear()
            next_point += 1.0 / CURVE_POINTS
        if finished:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, args.warmup, progress)
        if step % LONG_EVERY == LONG_EVERY - 1:
            inputs, targets = source.batch(max(1, args.rows * args.context // MAX_CONTEXT), MAX_CONTEXT)
            loss = token_losses(model, inputs, targets).mean()
        else:
            inputs, targets = source.batch(args.rows, args.context)
            loss = (compiled or token_losses)(model, inputs, targets).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        recent.append(loss.item())
        tokens += inputs.numel()
        step += 1
    spent = time.monotonic() - loop_started
    facts = {"long_every": LONG_EVERY, "weight_decay": WEIGHT_DECAY, "chat_fraction": CHAT_FRACTION}
    facts |= {"steps": step, "tokens": tokens, "plain_tokens": source.plain_tokens, "chat_tokens": source.chat_tokens}
    facts |= {"training_minutes": round(spent / 60.0, 2), "tokens_per_second": round(tokens / max(spent, 1e-9))}
    return curve, facts | {"compiled": compiled is not None}


def save_model(out: Path, model: Any, tokenizer: Any) -> dict[str, int]:
    """Round the weights to bfloat16, write them with configuration and tokenizer, and describe them."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    config = model.config
    generation: Any = GenerationConfig
    model.generation_config = generation(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    # Readers that predate `rope_parameters` and `dtype` look for these two names.
    _amend(out / "config.json", rope_theta=config.rope_parameters["rope_theta"], torch_dtype="bfloat16")
    # transformers 4 takes a list under this name alone: under `extra_special_tokens` it wants an object, and fails.
    file = out / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    more = settings.pop("extra_special_tokens", [])
    settings.pop("backend", None)
    file.write_text(json.dumps(settings), encoding="utf-8")
    _amend(file, tokenizer_class="PreTrainedTokenizerFast", additional_special_tokens=more)
    return {
        "parameters": model.num_parameters(),
        "weights_bytes": weights.stat().st_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_context": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
    }


def _amend(path: Path, **entries: object) -> None:
    settings = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
