"""Checks at load that every way to run a model gives the logits of transformers' own forward.

Two sequences near position 0 go through a paged pool in two ragged steps (chunks of both, then what is left of them in
another order). A short one follows at each far position: where the original context ends (rope and scales of queries
change there) and at the end of the longest sequence. For these transformers is told that the tokens before were
dropped, and the modules here get positions that are not the pool's, so that no long prompt is computed.

The fused decoder rotates by the pool's positions. It is compared with the modules instead, at the same far positions:
single tokens after a long context, whose block table repeats a few blocks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from baton.engine.executor.base import Quality
from baton.engine.models.loader import quiet_transformers
from baton.engine.models.quirks import has_experts, original_length
from baton.engine.models.recurrent import cache_argument
from baton.engine.quantization.modules import exact_inputs, quantized_layers
from baton.engine.runner.input_batch import ForwardBatch
from baton.engine.runner.model_runner import WholeModel
from baton.errors import ConfigError
from baton.tokenizer import Tokenizer

LENGTHS = (37, 9)
SPLITS = (21, 8)
FAR_TOKENS = 9
FAR_ROWS = 3
"""Single tokens at each far position."""
TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Largest |difference| / |logits| of what is checked; a wrong attention gives about 1."""
SLACK = {"float32": 2e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""How much more than twice the generic path's error the fast path may have; rounding grows to that in some tokens."""

MOST_STATES = 4
"""Convolution states, or recurrent ones, that a layer has at most."""
COMPARED_TOKENS = 8
"""Tokens whose logits are float32 at a time: a token's are as many as the vocabulary."""

STORAGE_TOLERANCE = {"bfloat16": 0.2, "int8": 0.5, "fp8_e4m3": 0.7}
"""By KV type, how much most tokens' logits may differ from those with KV in the model's dtype: a wrong operator gives
about 1. Trained models were seen to differ by 0.01 with int8, a mixture of random weights by 0.2."""

UNRELATED = 0.9
"""Error in 16 bits from which on logits count as others: those of another token have about 1.4. Rounding was seen to
reach 0.6 in a token of models of random weights."""

Forward = Callable[[ForwardBatch, int, int], torch.Tensor]
"""Runs a step over scratch memory of so many blocks, with an offset of the modules' positions; returns its logits."""
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step, the offset of its modules' positions, and what transformers gives for each of its sequences."""

    batch: ForwardBatch
    offset: int
    expected: list[torch.Tensor]


class SelfCheck:
    """What transformers computes for some sequences, and the steps that have to give the same.

    Transformers' own attention runs when this is made: before the model is divided or changed.

    Attributes:
        num_blocks: Blocks of scratch memory that the steps need.
    """

    def __init__(self, whole: WholeModel, block_size: int) -> None:
        model = whole.model
        max_len = whole.max_len
        self._dtype = model.dtype
        self._has_experts = has_experts(model.module)
        self._vocab_size = int(model.text_config.vocab_size)
        generator = np.random.default_rng(0)
        lengths = [min(length, max_len) for length in LENGTHS]
        near = [generator.integers(0, self._vocab_size, length) for length in lengths]
        self._blocks_of = _block_tables(lengths, block_size)
        last = max_len - FAR_TOKENS
        starts = (original_length(model.text_config, max_len), last)
        self._far = sorted({_within_chunks(start, whole) for start in starts if 0 < start <= last})
        self._near = near
        self._expected = [reference_logits(whole, tokens, 0) for tokens in near]
        if whole.recurrent is not None and len(near[1]) > 1:
            self._expected[1] = decoded_logits(whole, near[1])  # its last token is a step of its own here, too
        self._worst_offset = 0
        self._near_error = 0.0
        self._rounding = self._of_rounded_inputs(whole) if model.rounds_inputs else 0.0
        self._steps = _near_steps(near, self._expected, self._blocks_of)
        far_tokens = generator.integers(0, self._vocab_size, FAR_TOKENS)
        for start in self._far:
            batch = step_of([(far_tokens, 0, self._blocks_of[1])])
            self._steps.append(_Step(batch, start, [reference_logits(whole, far_tokens, start)]))
        self.num_blocks = sum(map(len, self._blocks_of)) + FAR_ROWS * len(self._far)
        self._far_batch = self._far_rows(far_tokens, block_size)
        self._far_logits: torch.Tensor | None = None

    def _far_rows(self, tokens: Tokens, block_size: int) -> ForwardBatch | None:
        """Single tokens at the far positions, whose context repeats the blocks of the first sequence."""
        filled = self._blocks_of[0]
        rows = []
        own = sum(map(len, self._blocks_of))
        for index, position in enumerate(start + FAR_TOKENS - 1 - i for start in self._far for i in range(FAR_ROWS)):
            before = [filled[i % len(filled)] for i in range(position // block_size)]
            rows.append((tokens[index : index + 1], position, [*before, own + index]))
        return step_of(rows[::-1]) if rows else None

    @property
    def tolerance(self) -> float:
        """The largest error of transformers' modules over a paged pool."""
        return max(TOLERANCE[self._dtype], 2 * self._rounding)

    def _of_rounded_inputs(self, whole: WholeModel) -> float:
        """What rounding of layers' inputs to 8 bits costs.

        Sums that differ in their last bits round to other numbers now and then, and all that follows rounds otherwise:
        two right ways to compute differ by as much as either differs from exact inputs.
        """
        with exact_inputs(whole.model.module):
            exact = [reference_logits(whole, tokens, 0) for tokens in self._near]
        return self._overall([_errors(got, want) for got, want in zip(self._expected, exact, strict=True)])

    def generic_error(self, forward: Forward) -> float:
        """Return the error of transformers' modules over the paged pool; infinite if there are NaNs.

        The largest one: of a token in float32; in 16 bits of the median token of a sequence's part in a step, or of a
        token whose logits are unrelated. Mixtures may have such tokens by chance (near ties of a router), but no parts.
        """
        worst = 0.0
        near = []
        for step in self._steps:
            parts = self._errors(forward, step)
            near += [] if step.offset else parts
            error = max(self._unrelated(parts), *(float(self._of_most(part)) for part in parts))
            if error > worst:
                worst = error
                self._worst_offset = step.offset
        self._near_error = self._overall(near)
        return worst

    def agrees(self, forward: Forward) -> str:
        """Say how a faster path's logits differ, nothing if they do not: from transformers', far out from the modules'.

        Its errors may be twice those of the modules, in float32 of any token, in 16 bits of most.
        """
        parts = [part for step in self._steps if not step.offset for part in self._errors(forward, step)]
        near = max(self._overall(parts), self._unrelated(parts))
        allowed = 2 * (self._near_error + self._rounding) + SLACK[self._dtype]
        if not near <= allowed:
            return f"relative error {near:.2g}"
        if self._far_batch is None or self._far_logits is None:
            return ""
        rows = _errors(self._run_far(forward, self._far_batch), self._far_logits)
        far = max(self._overall([rows]), self._unrelated([rows]))
        if not far <= (2 * allowed if self._dtype == "float32" else max(2 * allowed, TOLERANCE[self._dtype])):
            return f"relative error {far:.2g} at far positions"
        return ""

    def storage_error(self, plain: Forward, stored: Forward) -> float:
        """Return how much KV of another type changes logits: the (upper) median token's relative error."""
        batches = [step.batch for step in self._steps if not step.offset]
        stored_logits, plain_logits = (
            torch.cat([forward(batch, self.num_blocks, 0).cpu() for batch in batches])
            for forward in (stored, plain)  # one after the other: each has scratch memory of its own
        )
        return float(_errors(stored_logits, plain_logits).median())

    def keep_far(self, forward: Forward) -> None:
        """Keep what the modules compute for single tokens at far positions, for :meth:`agrees`."""
        if self._far_batch is not None:
            for step in self._steps:
                if not step.offset:  # fills the blocks that the rows' context is made of
                    forward(step.batch, self.num_blocks, 0)
            self._far_logits = self._run_far(forward, self._far_batch)

    def _run_far(self, forward: Forward, batch: ForwardBatch) -> torch.Tensor:
        return forward(batch, self.num_blocks, 0).cpu()

    def _errors(self, forward: Forward, step: _Step) -> list[torch.Tensor]:
        """Run a step and return the errors of the tokens of each sequence."""
        logits = forward(step.batch, self.num_blocks, step.offset).cpu()
        starts = step.batch.query_starts
        return [_errors(logits[starts[row] : starts[row + 1]], want) for row, want in enumerate(step.expected)]

    def _of_most(self, part: torch.Tensor) -> torch.Tensor:
        """The largest of a part's errors in float32, the median in 16 bits."""
        return part.max() if self._dtype == "float32" else part.median()

    def _unrelated(self, parts: list[torch.Tensor]) -> float:
        """Return the largest error if logits are unrelated, else 0: in 16 bits of any token, in a mixture of a part."""
        worst = max(float(part.median() if self._has_experts else part.max()) for part in parts)
        return worst if worst >= UNRELATED and self._dtype != "float32" else 0.0

    def _overall(self, parts: list[torch.Tensor]) -> float:
        """The largest of all tokens' errors in float32, the (upper) median in 16 bits."""
        errors = torch.cat(parts).sort().values
        return float(errors[-1 if self._dtype == "float32" else len(errors) // 2])

    def explain(self, whole: WholeModel) -> str:
        """Say why the modules' logits are others over the paged pool; the model is of no use afterwards."""
        if self._worst_offset:
            return f"over a paged KV cache its logits from position {self._worst_offset} on differ from its own"
        whole.model.module.set_attn_implementation("eager")
        if whole.recurrent is not None:
            whole.recurrent.detach()
        for tokens, expected in zip(self._near, self._expected, strict=True):
            explicit_logits = reference_logits(whole, tokens, 0, explicit=True)
            if float(_errors(explicit_logits, expected).median()) > TOLERANCE[self._dtype]:
                return "it counts positions by itself, and not from 0"
        return "over a paged KV cache its logits differ from its own"


def _within_chunks(start: int, whole: WholeModel) -> int:
    """Move a far position so that the tokens there are of one chunk, where layers attend within chunks."""
    chunks = {spec.chunk for spec in whole.specs.values() if spec.chunk}
    crossed = any(start // chunk != (start + FAR_TOKENS - 1) // chunk for chunk in chunks)
    return max(0, start - FAR_TOKENS) if crossed else start


def _errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|difference| / |logits| of every token of logits [tokens, vocab]; infinite where that is no number."""
    errors = []
    for actual, reference in in_float32(got, expected):
        errors.append(actual.sub_(reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-6))
    return torch.cat(errors).nan_to_num(float("inf"))


def in_float32(*logits: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield copies of some tokens' logits at a time, of each of several [tokens, vocab]."""
    for parts in zip(*(torch.split(each, COMPARED_TOKENS) for each in logits), strict=True):
        yield tuple(part.to(torch.float32, copy=True) for part in parts)


def _block_tables(lengths: list[int], block_size: int) -> list[list[int]]:
    """Blocks of each sequence, in descending order, so that none is where its index would have it."""
    widths = [-(-length // block_size) for length in lengths]
    blocks = iter(reversed(range(sum(widths))))
    return [[next(blocks) for _ in range(width)] for width in widths]


def _near_steps(near: list[Tokens], expected: list[torch.Tensor], tables: list[list[int]]) -> list[_Step]:
    """Chunks of both, then what is left of both in the other order."""
    splits = [min(split, len(tokens) - 1) for split, tokens in zip(SPLITS, near, strict=True)]
    steps = []
    for order, part in (((0, 1), slice(0, 1)), ((1, 0), slice(1, 2))):
        pieces = []
        wanted = []
        for row in order:
            begin, end = [(0, splits[row]), (splits[row], len(near[row]))][part.start]
            if end > begin:
                pieces.append((near[row][begin:end], begin, tables[row]))
                wanted.append(expected[row][begin:end])
        if pieces:
            steps.append(_Step(step_of(pieces), 0, wanted))
    return steps


def step_of(pieces: Sequence[tuple[Tokens, int, list[int]]]) -> ForwardBatch:
    """Return a step of (new tokens, tokens before, blocks) per sequence that asks for all logits."""
    counts = [len(tokens) for tokens, _, _ in pieces]
    tables = np.zeros((len(pieces), max(len(blocks) for _, _, blocks in pieces)), dtype=np.int32)
    for row, (_, _, blocks) in enumerate(pieces):
        tables[row, : len(blocks)] = blocks
    return ForwardBatch(
        token_ids=np.concatenate([tokens for tokens, _, _ in pieces]),
        positions=np.concatenate([np.arange(done, done + len(tokens)) for tokens, done, _ in pieces]),
        query_starts=np.array([0, *np.cumsum(counts)], dtype=np.int32),
        context_lens=np.array([done + len(tokens) for tokens, done, _ in pieces], dtype=np.int32),
        block_tables=tables,
        logit_rows=np.arange(sum(counts)),
        state_slots=tables[:, 0],  # one block is one sequence's
    )


class _DroppedTokens:
    """What a cache layer says whose tokens are all gone: models count on from them and see none."""

    _dropped: int

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self._dropped


class _DroppedLayer(_DroppedTokens, DynamicLayer):
    def __init__(self, dropped: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dropped = dropped


class _DroppedHybridLayer(_DroppedTokens, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc,override,no-untyped-call]
    """Of a layer that may also keep a state: it has none yet."""

    def __init__(self, dropped: int) -> None:
        super().__init__(number_of_states=MOST_STATES)
        self._dropped = dropped


def reference_logits(whole: WholeModel, tokens: Tokens, start: int, *, explicit: bool = False) -> torch.Tensor:
    """Return the logits [length, vocab] of tokens from a position on, by the model's own attention to these alone.

    They are of the model's type: a vocabulary of 150,000 makes 0.6 MB of a token's in float32.
    """
    model = whole.model
    ids = torch.from_numpy(tokens)[None].to(model.device)
    options: dict[str, Any] = {}
    if start:
        layers: list[Any] = [_DroppedLayer(start) for _ in whole.specs]
        if whole.recurrent is not None:
            layers = [_DroppedHybridLayer(start) for _ in range(model.text_config.num_hidden_layers)]
        options["past_key_values"] = Cache(layers=layers)
    if start or explicit:
        options["position_ids"] = torch.arange(start, start + len(tokens), device=model.device)[None]
    with quiet_transformers(), torch.inference_mode():
        logits: torch.Tensor = model.module(input_ids=ids, use_cache=False, **options).logits[0]
    return logits.cpu()


def decoded_logits(whole: WholeModel, tokens: Tokens) -> torch.Tensor:
    """Return the logits [length, vocab] of tokens of which the last one is decoded, as ``generate`` does.

    Some recurrent layers of transformers compute a single token a little differently from one of several.
    """
    model = whole.model
    ids = torch.from_numpy(tokens)[None].to(model.device)
    name = cache_argument(model.module)
    options: dict[str, Any] = {"use_cache": True}
    if "position_ids" in inspect.signature(model.module.forward).parameters:  # from its cache it may count wrongly
        options["position_ids"] = torch.tensor([[len(tokens) - 1]], device=model.device)
    with quiet_transformers(), torch.inference_mode():
        prompt = model.module(input_ids=ids[:, :-1], use_cache=True)
        last = model.module(input_ids=ids[:, -1:], **options, **{name: getattr(prompt, name)})
    return torch.cat([prompt.logits[0], last.logits[0]]).cpu()


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
needs to cross the Earth's orbit. In 1676 no one knew how wide that orbit was, so that the result was a time and not yet
a speed. Questions for the reader: 1. Why is the difference not exactly 1,000 seconds? 2. What else moves?
"""
"""Read by every model; of most it is some 400 tokens."""


def compare(logits: torch.Tensor, reference: torch.Tensor) -> Quality:
    """Compare logits [tokens, vocab] with those of the reference."""
    divergence = []
    same = []
    for parts in in_float32(reference, logits):
        expected, actual = (each.log_softmax(-1) for each in parts)
        divergence.append((expected.exp() * (expected - actual)).sum(-1).clamp_min(0))
        same.append(parts[0].argmax(-1) == parts[1].argmax(-1))
    return Quality(float(torch.cat(divergence).mean()), float(torch.cat(same).float().mean()), len(logits))


def fixed_tokens(model: str, longest: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the fixed text as a model's tokens int64 [T], or random ones of a model that has no tokenizer.

    Args:
        model: Path of the model's files.
        longest: Tokens it takes.
        vocab_size: Number of token ids.
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
        model: Path of the model's files.
        block_size: Tokens per block of the pool.
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
        reference = self._reference
        self._reference = None
        if reference is None:
            return None
        blocks = -(-len(self._tokens) // self._block_size)
        logits = forward(step_of([(self._tokens, 0, list(range(blocks)))]), blocks, 0)
        return compare(logits.cpu(), reference)
