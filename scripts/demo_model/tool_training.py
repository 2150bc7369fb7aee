"""A sibling of the demo model that calls tools: it copies what a request says into the arguments of a call."""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
import transformers

from .card import render_tool_card
from .induction import start_with_induction
from .tokenizer import TURN_END, train_tokenizer
from .tool_conversations import ConversationMaker, Exchange
from .training import Shape, build_model, learning_rate, make_optimizer, save_model

LOGGER = logging.getLogger(__name__)

CALL_TOKENS = ("<tool_call>", "</tool_call>")
SPLIT_PATTERN = r"\p{L}+|\p{N}{1,3}| |[^\s\p{L}\p{N}]+|\s+"
"""Words without the space before them, and numbers: what is copied looks the same wherever it stands."""
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}
        {%- set parameters = (tool.function.parameters or {}).properties or {} %}
        {{- tool.function.name + '(' + parameters | join(', ') + ')\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set text = namespace(value='') %}
    {%- if message.content is string %}
        {%- set text.value = message.content %}
    {%- else %}
        {%- for part in message.content or [] if part.type == 'text' %}
            {%- set text.value = text.value + part.text %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text.value }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SHAPE = Shape(hidden=128, mlp=256, heads=4, kv_heads=2)
MAX_CONTEXT = 1024
REPEATED, REPEATED_AT_FIRST = 0.1, 0.4
"""Share of the rows in which made-up tokens come again and again: to copy is learnt from them first."""
FIRST_PART = 0.1
"""Of the training: over it their share falls from the second to the first, and what is repeated grows longer."""
MAX_PERIOD = 24
CURVE_STEPS, CURVE_ANSWERS, MEASURED_ROWS = 200, 128, 32
HELD_OUT_SEED = 1
SORTED_BATCHES = 4
"""Rows of so many batches are sorted by length, so that a batch has little to fill up."""


def render(tokenizer: Any, one: Exchange) -> str:
    """Return a conversation up to where the answer begins."""
    text: str = tokenizer.apply_chat_template(one.messages, tools=one.tools, tokenize=False, add_generation_prompt=True)
    return text


class ToolRows:
    """Endless rows of conversations; what counts is the answers."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._maker = tokenizer, ConversationMaker(seed)
        self._rng = self._maker.rng
        texts = ((token, tokenizer.decode([token])) for token in range(tokenizer.vocab_size))
        self._pieces = [token for token, text in texts if text.isascii() and text.isalnum()]
        """Tokens that stand in words and numbers."""
        self._ready: list[list[Row]] = []

    def batch(self, rows: int, progress: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Make inputs and targets as :func:`pad` does, for what share of the training is over."""
        if not self._ready:
            begun = min(1.0, progress / FIRST_PART)
            made = [self._row(begun) for _ in range(rows * SORTED_BATCHES)]
            made.sort(key=lambda row: len(row.tokens))
            self._ready = [made[at : at + rows] for at in range(0, len(made), rows)]
            self._rng.shuffle(self._ready)
        return pad(self._ready.pop())

    def _row(self, begun: float) -> Row:
        if self._rng.random() < REPEATED_AT_FIRST + begun * (REPEATED - REPEATED_AT_FIRST):
            return self._repeated(begun)
        return conversation_row(self._tokenizer, self._maker.exchange())

    def _repeated(self, begun: float) -> Row:
        period = self._rng.randint(2, 6 + round(begun * (MAX_PERIOD - 6)))
        words = self._rng.sample(self._pieces, period)
        times = self._rng.randint(2, max(2, 36 // period))
        return Row([self._tokenizer.bos_token_id, *words * times], period + 2)


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens, and from which one on they count."""

    tokens: list[int]
    counted: int


def conversation_row(tokenizer: Any, one: Exchange) -> Row:
    """Return a conversation with its answer, which counts."""
    prompt, answer = (
        tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        for text in (render(tokenizer, one), one.answer + TURN_END)
    )
    return Row(prompt + answer, len(prompt))


def pad(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (one token on), int64 (rows, longest); targets that do not count are -100."""
    longest = max(len(row.tokens) for row in rows) - 1
    inputs = np.zeros((len(rows), longest), np.int64)
    targets = np.full((len(rows), longest), -100, np.int64)
    for at, row in enumerate(rows):
        inputs[at, : len(row.tokens) - 1] = row.tokens[:-1]
        targets[at, row.counted - 1 : len(row.tokens) - 1] = row.tokens[row.counted :]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def make_tokenizer(vocab_size: int, seed: int, conversations: int = 20_000) -> Any:
    """Train the tokenizer from conversations."""
    maker = ConversationMaker(seed)
    texts = []
    for _ in range(conversations):
        one = maker.exchange()
        texts += [message["content"] for message in one.messages] + [one.answer]
        texts += [tool["function"]["name"] + " " + " ".join(_parameters(tool)) for tool in one.tools]
    more = {"plain_tokens": CALL_TOKENS, "pattern": SPLIT_PATTERN, "template": CHAT_TEMPLATE}
    return train_tokenizer(texts, vocab_size, MAX_CONTEXT, **more)


def _parameters(tool: dict[str, Any]) -> list[str]:
    return list(tool["function"]["parameters"]["properties"])


@torch.no_grad()
def measure(model: Any, tokenizer: Any, count: int) -> dict[str, int]:
    """Tell how many greedy answers to held-out conversations, without any constraint, are right to the letter.

    A greedy answer is right where each of its tokens is the likeliest one after those before it, so one forward pass
    over conversation and answer tells.
    """
    found = dict.fromkeys(("calls_right", "others_right", "calls_total", "others_total"), 0)
    maker = ConversationMaker(HELD_OUT_SEED, held_out=True)
    for _ in range(0, count, MEASURED_ROWS):
        made = [maker.exchange() for _ in range(MEASURED_ROWS)]
        inputs, targets = pad([conversation_row(tokenizer, one) for one in made])
        likeliest = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
        right = ((likeliest == targets) | (targets < 0)).all(1).tolist()
        for one, each in zip(made, right, strict=True):
            kind = "others" if one.call is None else "calls"
            found[f"{kind}_right"] += each
            found[f"{kind}_total"] += 1
    return found


def train(model: Any, tokenizer: Any, args: argparse.Namespace, started: float) -> dict[str, Any]:
    """Train in place until the steps, or the minutes since ``started``, are spent; return facts for the log."""
    rows, optimizer = ToolRows(tokenizer, args.seed), make_optimizer(model, args.lr)
    curve: list[dict[str, float]] = []
    recent: list[float] = []
    step = tokens = 0
    while True:
        minutes = (time.monotonic() - started) / 60.0
        progress = step / args.steps if args.steps else minutes / args.minutes
        if recent and (step % CURVE_STEPS == 0 or progress >= 1.0):
            right = measure(model, tokenizer, CURVE_ANSWERS)
            share = round(right["calls_right"] / right["calls_total"], 3)
            loss_now = round(float(np.mean(recent)), 4)
            curve.append({"step": step, "minutes": round(minutes, 2), "loss": loss_now, "calls_right": share})
            LOGGER.info("%s", curve[-1])
            recent.clear()
        if progress >= 1.0 or minutes >= args.minutes:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, args.warmup, progress)
        inputs, targets = rows.batch(args.rows, progress)
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        at = targets >= 0  # logits of what counts alone
        loss = functional.cross_entropy(model.lm_head(hidden[at]).float(), targets[at])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        recent.append(loss.item())
        tokens += inputs.numel()
        step += 1
    return {"steps": step, "tokens": tokens, "training_minutes": round(minutes, 2), "curve": curve}


def run(args: argparse.Namespace, arguments: list[str], started: float) -> None:
    """Train the model that calls tools, measure it, and write its directory."""
    tokenizer = make_tokenizer(args.vocab, args.seed)
    LOGGER.info("vocabulary %d, an untrained model loses %.2f", len(tokenizer), math.log(len(tokenizer)))
    model = build_model(tokenizer, args.layers, SHAPE, MAX_CONTEXT)
    start_with_induction(model)
    training = train(model, tokenizer, args, started)
    shape = save_model(args.out, model, tokenizer)
    model.to(torch.float32).eval()  # the rounded weights are what is measured
    results = measure(model, tokenizer, args.answers)
    LOGGER.info("%s", results)
    curve = training.pop("curve")
    training |= {name: getattr(args, name) for name in ("seed", "threads", "rows", "lr", "warmup")}
    training |= {package.__name__: package.__version__ for package in (torch, transformers)}
    training["command"] = "python scripts/train_demo_model.py " + " ".join(arguments)
    log = {"model": shape, "training": training, "results": results, "curve": curve}
    (args.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    (args.out / "README.md").write_text(render_tool_card(log), encoding="utf-8")
    LOGGER.info("wrote %s", Path(args.out))
