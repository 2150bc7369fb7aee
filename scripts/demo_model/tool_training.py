"""A sibling of the demo model that calls tools: it copies what a request says into the arguments of a call."""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
import transformers

from .card import render_tool_card
from .tokenizer import END_OF_TEXT, TURN_END, IntArray, train_tokenizer
from .tool_conversations import Exchange, exchange
from .training import Shape, build_model, learning_rate, make_optimizer, save_model

LOGGER = logging.getLogger(__name__)

CALL_TOKENS = ("<tool_call>", "</tool_call>")
SPLIT_PATTERN = r"\p{L}+|\p{N}| |[^\s\p{L}\p{N}]+|\s+"
"""Words without the space before them, and single digits: what is copied looks the same wherever it stands."""
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
REPEATED = 0.25
"""Share of the rows that are made-up tokens, twice: to copy is learnt from them first."""
HELD_OUT_SEED = 1 << 30
"""Seeds from here on are for measuring; words made up with them were seen in training by chance alone."""


def render(tokenizer: Any, one: Exchange) -> str:
    """Return a conversation up to where the answer begins."""
    text: str = tokenizer.apply_chat_template(one.messages, tools=one.tools, tokenize=False, add_generation_prompt=True)
    return text


class ToolRows:
    """Endless rows of conversations; what counts is the answers."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._rng = tokenizer, random.Random(seed)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make inputs and targets, int64 (rows, longest); targets that do not count are -100."""
        made = [self._repeated() if self._rng.random() < REPEATED else self._conversation() for _ in range(rows)]
        longest = max(len(tokens) for tokens, _ in made) - 1
        inputs = np.zeros((rows, longest), np.int64)
        targets = np.full((rows, longest), -100, np.int64)
        for row, (tokens, counted) in enumerate(made):
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, counted - 1 : len(tokens) - 1] = tokens[counted:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _conversation(self) -> tuple[IntArray, int]:
        one = exchange(self._rng)
        prompt = self._encode(render(self._tokenizer, one))
        answer = self._encode(one.answer + TURN_END)
        return np.array(prompt + answer, np.int64), len(prompt)

    def _repeated(self) -> tuple[IntArray, int]:
        words = [self._rng.randrange(10, self._tokenizer.vocab_size) for _ in range(self._rng.randint(8, 40))]
        return np.array([self._tokenizer.bos_token_id, *words, *words], np.int64), len(words) + 2

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def make_tokenizer(vocab_size: int, seed: int, conversations: int = 20_000) -> Any:
    """Train the tokenizer from conversations."""
    rng = random.Random(seed)
    texts = []
    for _ in range(conversations):
        one = exchange(rng)
        texts += [message["content"] for message in one.messages] + [one.answer]
        texts += [tool["function"]["name"] + " " + " ".join(_parameters(tool)) for tool in one.tools]
    more = {"plain_tokens": CALL_TOKENS, "pattern": SPLIT_PATTERN, "template": CHAT_TEMPLATE}
    return train_tokenizer(texts, vocab_size, MAX_CONTEXT, **more)


def _parameters(tool: dict[str, Any]) -> list[str]:
    return list(tool["function"]["parameters"]["properties"])


@torch.no_grad()
def measure(model: Any, tokenizer: Any, count: int) -> dict[str, Any]:
    """Answer held-out conversations greedily, without any constraint; tell how many answers are what they should be."""
    right = {"calls": 0, "others": 0}
    total = {"calls": 0, "others": 0}
    ends = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    for number in range(count):
        one = exchange(random.Random(HELD_OUT_SEED + number))
        prompt = torch.tensor([tokenizer.encode(render(tokenizer, one), add_special_tokens=False)])
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=96, do_sample=False, eos_token_id=ends
        )
        text = tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True)
        kind = "others" if one.call is None else "calls"
        total[kind] += 1
        right[kind] += text == one.answer
    return {f"{kind}_right": right[kind] for kind in right} | {f"{kind}_total": total[kind] for kind in total}


def train(model: Any, rows: ToolRows, args: argparse.Namespace, started: float) -> dict[str, Any]:
    """Train in place until the steps, or the minutes since ``started``, are spent; return facts for the log."""
    optimizer = make_optimizer(model, args.lr)
    curve: list[dict[str, float]] = []
    recent: list[float] = []
    step = tokens = 0
    while True:
        minutes = (time.monotonic() - started) / 60.0
        progress = step / args.steps if args.steps else minutes / args.minutes
        if recent and (step % 100 == 0 or progress >= 1.0):
            curve.append({"step": step, "minutes": round(minutes, 2), "loss": round(float(np.mean(recent)), 4)})
            LOGGER.info("%s", curve[-1])
            recent.clear()
        if progress >= 1.0 or minutes >= args.minutes:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, args.warmup, progress)
        inputs, targets = rows.batch(args.rows)
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
    training = train(model, ToolRows(tokenizer, args.seed), args, started)
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
