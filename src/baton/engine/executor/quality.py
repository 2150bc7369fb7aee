"""How far what runs is from the weights that were loaded: over a fixed text, at load, where weights are quantized.

The reference multiplies by the dequantized weights and rounds no inputs. So the figures are of the operators and of
inputs rounded to 8 bits, not of the weights' quantization: what these have lost is not known where only they are there
(``baton bench quality`` compares with a plain checkpoint).
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.executor.base import Quality
from baton.engine.executor.self_check import Forward, in_float32, reference_logits, step_of
from baton.engine.quantization.modules import exact_inputs, quantized_layers
from baton.engine.runner.model_runner import WholeModel
from baton.errors import ConfigError
from baton.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TOKENS = 128
TEXT = """\
In a relay race one runner carries the baton as far and as fast as they can, and hands it over to the next one. The
hand-over is where races are won and lost: both runners move, neither waits, and the baton must not touch the ground.
Serving a language model is much the same. One machine reads the whole prompt at once and is busy with arithmetic. It
leaves behind a cache of keys and values, a pair for each token and each layer. Another machine takes that cache over
and writes the answer, one token after the other, and is busy with moving memory.

def read_lines(path, encoding="utf-8"):
    \"\"\"Return the lines of a file that are neither empty nor comments.\"\"\"
    with open(path, encoding=encoding) as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith("#")]


class Counter:
    def __init__(self, start=0):
        self.value = start

    def increment(self, by=1):
        self.value += by
        return self.value

The first people to measure the speed of light did so by watching the moons of Jupiter. When the Earth was far away the
eclipses came late, and when it was near they came early; the difference, about sixteen minutes, is the time that light
needs to cross the Earth's orbit. In 1676 nobody knew how wide that orbit was, so that the result was a time and not yet
a speed. Questions for the reader: 1. Why is the difference not exactly 1,000 seconds? 2. What else moves?
"""
"""Read by every model; of most it is some 400 tokens."""


def compare(logits: torch.Tensor, reference: torch.Tensor) -> Quality:
    """Compare logits [tokens, vocab] with those of the reference."""
    divergence, same = [], []
    for parts in in_float32(reference, logits):
        expected, found = (each.log_softmax(-1) for each in parts)
        divergence.append((expected.exp() * (expected - found)).sum(-1).clamp_min(0))
        same.append(parts[0].argmax(-1) == parts[1].argmax(-1))
    return Quality(float(torch.cat(divergence).mean()), float(torch.cat(same).float().mean()), len(logits))


def fixed_tokens(model: str, longest: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the fixed text as a model's tokens int64 [T], or random ones of a model that has no tokenizer.

    Args:
        model: Where its files are.
        longest: Tokens it takes.
        vocab_size: Ids it knows.
    """
    count = min(TOKENS, longest)
    try:
        tokens = np.array(Tokenizer.load(model).encode(TEXT)[:count], dtype=np.int64)
    except ConfigError as error:
        log.debug("quality is measured over random tokens: %s", error.message)
        tokens = np.empty(0, dtype=np.int64)
    if len(tokens) and tokens.max() < vocab_size:
        return tokens
    return np.random.default_rng(0).integers(0, vocab_size, count)


class QualityCheck:
    """Takes the reference before the model is divided or changed, and compares what runs with it.

    Args:
        whole: The model as it was loaded.
        model: Where its files are.
        block_size: Of the pool.
    """

    def __init__(self, whole: WholeModel, model: str, block_size: int) -> None:
        vocab_size = int(whole.model.text_config.vocab_size)
        self._reference: torch.Tensor | None = None
        if quantized_layers(whole.model.module):
            self._tokens = fixed_tokens(model, whole.max_len, vocab_size)
            with exact_inputs(whole.model.module):
                self._reference = reference_logits(whole, self._tokens, 0)
        self._block_size = block_size

    def measure(self, forward: Forward) -> Quality | None:
        """Compare; ``None``: no weights are quantized. The reference is dropped."""
        reference, self._reference = self._reference, None
        if reference is None:
            return None
        blocks = -(-len(self._tokens) // self._block_size)
        logits = forward(step_of([(self._tokens, 0, list(range(blocks)))]), blocks, 0)
        return compare(logits.cpu(), reference)
