"""Held-out losses, what simpler models reach there, answers and samples."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .batches import Dataset
from .conversations import SYSTEM_MESSAGES, parses
from .tokenizer import BOS, IntArray, encode_all, render
from .training import MAX_CONTEXT, evaluate_rows

NO_TARGET = -100
ANSWER_TOKENS, ANSWER_SECONDS = 256, 240.0
TOP_P = 0.95
REQUEST = "Write a function `read_file` that returns the contents of a file."

# The card's samples: kind, temperature (0: greedy), system message, text.
SAMPLES: tuple[tuple[str, float, str | None, str], ...] = (
    ("chat", 0.0, None, REQUEST),
    ("chat", 0.0, SYSTEM_MESSAGES[2], "Write a function `is_valid_name` that checks a name."),
    ("chat", 0.0, None, "Write a method `close` for the class `Connection` that closes the connection."),
    ("chat", 0.7, None, REQUEST),
    ("plain completion", 0.7, None, "import os\nimport sys\n\n\ndef main():\n"),
)


def held_out_rows(dataset: Dataset, context: int) -> IntArray:
    """Cut the held-out documents into rows of ``context + 1`` tokens, each begun by begin-of-text."""
    stream = np.concatenate(dataset.held_out_documents)
    count = math.ceil(len(stream) / context)
    padded = np.full(count * context, NO_TARGET, dtype=np.int64)
    padded[: len(stream)] = stream
    begin = np.full((count, 1), dataset.tokenizer.bos_token_id, dtype=np.int64)
    return np.concatenate([begin, padded.reshape(count, context)], axis=1)


def answer_rows(dataset: Dataset, context: int, limit: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Encode held-out chats that fit into ``context + 1`` tokens.

    Returns:
        At most ``limit`` rows, and a mask ``(rows, context)`` of the targets that belong to answers.
    """
    rows = np.full((limit, context + 1), NO_TARGET, dtype=np.int64)
    mask = np.zeros((limit, context), dtype=np.bool_)
    count = 0
    for chat in dataset.single_exchanges():
        texts = [render(dataset.tokenizer, chat[:-1], prompt=True), render(dataset.tokenizer, chat).rstrip("\n")]
        prompt, whole = encode_all(dataset.tokenizer, texts)
        if len(whole) <= context + 1 and count < limit:
            rows[count, : len(whole)] = whole
            mask[count, len(prompt) - 1 : len(whole) - 1] = True
            count += 1
    return rows[:count], mask[:count]


def ngram_baselines(dataset: Dataset, vocab: int) -> tuple[float, float]:
    """Compute the held-out loss per token, in nats, of a unigram and of a smoothed bigram model.

    The bigram model backs off to the unigram model with a Dirichlet prior whose
    strength is chosen on the held-out text, in the baseline's favour.
    """
    stream = np.concatenate(dataset.train_documents)
    unigram = np.bincount(stream, minlength=vocab).astype(np.float64) + 0.5
    unigram /= unigram.sum()
    pairs = Counter((stream[:-1] * vocab + stream[1:]).tolist())
    context = np.bincount(stream[:-1], minlength=vocab).astype(np.float64)
    test = np.concatenate(dataset.held_out_documents)
    first, second = test[:-1], test[1:]
    seen = np.asarray([pairs[key] for key in (first * vocab + second).tolist()], dtype=np.float64)
    bigram = min(
        float(-np.log((seen + strength * unigram[second]) / (context[first] + strength)).mean())
        for strength in (10.0, 30.0, 100.0, 300.0, 1000.0)
    )
    return float(-np.log(unigram[test]).mean()), bigram


def measure_losses(model: Any, dataset: Dataset, context: int, batch: int) -> dict[str, Any]:
    """Measure the model and the baselines on everything held out."""
    losses = evaluate_rows(model, held_out_rows(dataset, context), batch)
    total, count = float(np.nansum(losses)), int(np.isfinite(losses).sum())
    by_position = evaluate_rows(model, held_out_rows(dataset, MAX_CONTEXT), 2)
    answers, mask = answer_rows(dataset, context, 200)
    unigram, bigram = ngram_baselines(dataset, model.config.vocab_size)
    return {
        "held_out_loss": round(total / count, 4),
        "held_out_perplexity": round(math.exp(total / count), 4),
        "bits_per_byte": round(total / math.log(2) / dataset.facts["held_out_bytes"], 4),
        "unigram_loss": round(unigram, 4),
        "bigram_loss": round(bigram, 4),
        "chat_answer_loss": round(float(np.nanmean(evaluate_rows(model, answers, batch)[mask])), 4),
        "loss_by_position": {
            f"{start} to {stop - 1}": round(float(np.nanmean(by_position[:, start:stop])), 4)
            for start, stop in itertools.pairwise((0, 128, 512, 1024, MAX_CONTEXT))
        },
    }


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompt: str, length: int, temperature: float = 0.0) -> tuple[str, bool]:
    """Continue a prompt that already holds its special tokens by at most ``length`` tokens.

    Returns:
        The text, and whether it ended with an end token.
    """
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    sampling = {"temperature": temperature, "top_p": TOP_P} if temperature else {}
    output = model.generate(**inputs, max_new_tokens=length, do_sample=bool(temperature), **sampling)
    new = output[0, inputs["input_ids"].shape[1] :].tolist()
    ended = bool(new) and new[-1] in model.generation_config.eos_token_id
    return tokenizer.decode(new, skip_special_tokens=True), ended


def measure_answers(model: Any, dataset: Dataset, count: int) -> dict[str, int]:
    """Greedily answer up to ``count`` held-out requests; count the answers that end and those that also parse."""
    deadline = time.monotonic() + ANSWER_SECONDS
    tried = ended = parsed = 0
    for chat in itertools.islice(dataset.single_exchanges(), count):
        prompt = render(dataset.tokenizer, chat[:-1], prompt=True)
        text, done = complete(model, dataset.tokenizer, prompt, ANSWER_TOKENS)
        tried += 1
        ended += done
        parsed += done and parses(text)
        if time.monotonic() > deadline:
            break
    return {"requests": tried, "ended": ended, "parsed": parsed}


def draw_samples(model: Any, tokenizer: Any, seed: int) -> list[dict[str, str]]:
    """Generate the samples of the model card."""
    torch.manual_seed(seed)
    samples: list[dict[str, str]] = []
    for kind, temperature, system, text in SAMPLES:
        if kind == "chat":
            messages = [{"role": "system", "content": system}] if system else []
            prompt, length = render(tokenizer, [*messages, {"role": "user", "content": text}], prompt=True), 200
        else:
            prompt, length = BOS + text, 120
        output, ended = complete(model, tokenizer, prompt, length, temperature)
        how = f"temperature {temperature}, top-p {TOP_P}" if temperature else "greedy"
        title = f"[system: {system}] {text}" if system else text
        samples.append({"kind": f"{kind}, {how}", "prompt": title, "text": output, "ended": str(ended)})
    return samples
