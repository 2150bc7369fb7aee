"""Train the demo model ``models/baton-tiny`` from the Python standard library.

The script needs no download.  It reads the sources of the standard library of
the interpreter that runs it, trains a byte-level BPE tokenizer on them, trains
a small Llama-architecture model on plain source text mixed with chat samples
built out of the same sources, and writes a directory in Hugging Face format
together with a model card whose figures come from the run itself.

Typical use::

    python scripts/train_demo_model.py --minutes 25 --threads 2

With ``--minutes`` the learning-rate schedule follows the wall clock, so the
run always ends in time but depends on the speed of the machine.  With
``--steps`` (and a generous ``--minutes``) the run is reproducible for a seed on
one machine and one set of package versions.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import html
import itertools
import json
import logging
import math
import platform
import random
import sys
import sysconfig
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import torch.nn.functional as functional
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

LOGGER = logging.getLogger("train_demo_model")

PAD = "<|pad|>"
BOS = "<|bos|>"
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, END_OF_TEXT, TURN_START, TURN_END)

SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['content'] is string %}
        {%- set text = message['content'] %}
    {%- else %}
        {%- set parts = namespace(text='') %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] == 'text' %}
                {%- set parts.text = parts.text + part['text'] %}
            {%- endif %}
        {%- endfor %}
        {%- set text = parts.text %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + text | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant that writes Python code.",
    "You write Python functions.",
    "You are an expert Python programmer. Answer with code only.",
    "Answer with a single Python function.",
    "You are a coding assistant. Be brief.",
)

# Directories that hold tests, tables or third-party code rather than programs.
EXCLUDED_PARTS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idle_test",
        "msilib",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
EXCLUDED_FILES = frozenset({"html/entities.py", "this.py", "stringprep.py"})
SPLIT_SALT = "baton-tiny held-out split"

VERB_LIST = """
accept add append apply ask assert assign build calculate call change check
clean clear close compare compile compute connect construct convert copy
count create decode decorate define delete determine disable discard display
do dump emit enable encode end ensure enter escape evaluate execute exit expand
extend extract fetch fill filter find fix flush force format generate get give
handle help ignore indicate initialize insert install invoke issue iterate
join list load locate log look make map mark match merge move normalize notify
open output parse perform pop prepare print process produce provide push put
quote raise read receive record register release remove rename render replace
report reset resolve restore retrieve return reverse run save scan search seek
select send set show shut shutdown sort split start stop store strip swap
switch take test transform translate truncate try turn unregister update use
validate wait walk wrap write yield
"""
VERBS = frozenset(VERB_LIST.split())

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Module:
    """One source file of the standard library.

    Attributes:
        path: POSIX path relative to the library directory.
        text: The decoded source.
    """

    path: str
    text: str


@dataclass(frozen=True)
class Function:
    """A function or method found in a module.

    Attributes:
        name: The bare name.
        arguments: The argument list as written by ``ast.unparse``.
        owner: The enclosing class, or ``None`` for a plain function.
        summary: First line of the docstring, empty when there is none.
        source: The dedented source with its decorators.
    """

    name: str
    arguments: str
    owner: str | None
    summary: str
    source: str


@dataclass
class RunLog:
    """Everything the model card quotes; written as ``training_log.json``.

    Attributes:
        data: Facts about the corpus.
        model: Facts about the model.
        training: Facts about the optimisation.
        results: Held-out figures.
        curve: One point per evaluation.
        samples: Generated texts.
    """

    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)


# --------------------------------------------------------------------------
# Corpus
# --------------------------------------------------------------------------


def load_modules(root: Path) -> list[Module]:
    """Read the standard library's program sources in a stable order.

    Args:
        root: Directory of the standard library.

    Returns:
        The modules, sorted by path.
    """
    modules: list[Module] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if EXCLUDED_PARTS.intersection(relative.parts) or name in EXCLUDED_FILES:
            continue
        if any(part.startswith(("config-", "_sysconfigdata")) for part in relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= 200:
            modules.append(Module(name, text))
    return modules


def is_held_out(path: str, fraction: float) -> bool:
    """Decide by a hash of its path whether a module is held out."""
    digest = hashlib.sha256(f"{SPLIT_SALT}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction


def extract_functions(module: Module, max_chars: int) -> Iterator[Function]:
    """Yield the functions and methods of a module that make good answers.

    Args:
        module: The module to read.
        max_chars: Longest source that is still used.

    Yields:
        Functions with a body that does something.
    """
    try:
        tree = ast.parse(module.text)
    except SyntaxError:
        return
    lines = module.text.splitlines(keepends=True)

    def visit(node: ast.AST, owner: str | None) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, child.name)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                source = textwrap.dedent("".join(lines[first - 1 : child.end_lineno]))
                doc = (ast.get_docstring(child) or "").strip()
                body = child.body[1:] if doc else child.body
                trivial = not body or (len(body) == 1 and isinstance(body[0], ast.Pass | ast.Raise))
                if trivial or len(source) > max_chars or not _parses(source):
                    continue
                yield Function(
                    name=child.name,
                    arguments=ast.unparse(child.args),
                    owner=owner,
                    summary=doc.split("\n\n")[0].replace("\n", " ").strip()[:200],
                    source=source.strip("\n"),
                )
            elif isinstance(child, ast.If | ast.Try):
                yield from visit(child, owner)

    yield from visit(tree, None)


def _parses(source: str) -> bool:
    """Tell whether a text is a Python program."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def third_person(summary: str) -> str | None:
    """Turn an imperative docstring line into what follows "that".

    Args:
        summary: For example ``"Return the sum of x."``.

    Returns:
        For example ``"returns the sum of x"``, or ``None`` when the line does
        not start with a known verb.
    """
    first, _, rest = summary.rstrip(" .").partition(" ")
    word = first.lower()
    if word not in VERBS:
        singular = word.removesuffix("s")
        return f"{word} {rest}".strip() if singular in VERBS else None
    if word.endswith(("sh", "ch", "x", "o", "ss")):
        word += "es"
    elif word.endswith("y") and word[-2:-1] not in "aeiou":
        word = word[:-1] + "ies"
    else:
        word += "s"
    return f"{word} {rest}".strip()


def make_request(function: Function, rng: random.Random) -> str:
    """Write the user message that a function answers."""
    name, summary = function.name, function.summary
    kind = "function" if function.owner is None else "method"
    where = "" if function.owner is None else f" for the class `{function.owner}`"
    action = third_person(summary)
    options: list[str] = []
    if action:
        options = [
            f"Write a {kind} `{name}`{where} that {action}.",
            f"Write a {kind} `{name}`{where} that {action}.",
            f"Write a {kind} `{name}({function.arguments})`{where} that {action}.",
            f"Write a Python {kind}{where} that {action}.",
            f"Please write a Python {kind} called {name}{where} that {action}.",
        ]
    elif summary:
        options = [
            f"Write a {kind} `{name}`{where}: {summary}",
            f"Write a {kind} `{name}({function.arguments})`{where}. {summary}",
        ]
    else:
        options = [
            f"Write a {kind} `{name}`{where}.",
            f"Write a {kind} `{name}({function.arguments})`{where}.",
        ]
    return rng.choice(options)


def build_conversations(modules: Sequence[Module], rng: random.Random, max_chars: int) -> list[list[dict[str, str]]]:
    """Turn the functions of some modules into chats.

    Args:
        modules: Where the functions come from.
        rng: Source of the variation.
        max_chars: Longest function that is used.

    Returns:
        Conversations of one or, now and then, two exchanges.
    """
    pairs: list[list[dict[str, str]]] = []
    for module in modules:
        for function in extract_functions(module, max_chars):
            # Undocumented methods say little about what was asked: keep a third.
            if not function.summary and function.owner and rng.random() > 0.34:
                continue
            pairs.append(
                [
                    {"role": "user", "content": make_request(function, rng)},
                    {"role": "assistant", "content": function.source},
                ]
            )
    rng.shuffle(pairs)
    conversations: list[list[dict[str, str]]] = []
    while pairs:
        chat = list(pairs.pop())
        if pairs and rng.random() < 0.08:
            chat += pairs.pop()
        if rng.random() < 0.3:
            chat.insert(0, {"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
        conversations.append(chat)
    return conversations


# --------------------------------------------------------------------------
# Tokenizer
# --------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> Any:
    """Train the byte-level BPE tokenizer.

    Args:
        texts: Training texts.
        vocab_size: Number of tokens, special ones included.
        max_length: Context length noted in the tokenizer's configuration.

    Returns:
        A fast tokenizer with its chat template set.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer=trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, core.token_to_id(BOS))],
    )
    wrap: Any = PreTrainedTokenizerFast
    fast = wrap(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[END_OF_TEXT, TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[IntArray]:
    """Encode texts without adding special tokens."""
    core = tokenizer.backend_tokenizer
    return [
        np.asarray(encoding.ids, dtype=np.int64)
        for encoding in core.encode_batch(list(texts), add_special_tokens=False)
    ]


def render_chats(tokenizer: Any, chats: Sequence[list[dict[str, str]]]) -> list[str]:
    """Render finished conversations with the tokenizer's own template."""
    return [cast(str, tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]


# --------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------


class RowSource:
    """Deterministic, endless source of training rows.

    Every row starts with the begin-of-text token, so the model may be prompted
    from any point of a program.
    """

    def __init__(
        self,
        documents: Sequence[IntArray],
        chats: Sequence[IntArray],
        line_start: npt.NDArray[np.bool_],
        bos: int,
        chat_fraction: float,
        seed: int,
    ) -> None:
        """Set up the source.

        Args:
            documents: Plain documents, each ended by the end-of-text token.
            chats: Rendered chats, each begun by the begin-of-text token.
            line_start: Table of tokens that do not begin with white space,
                followed by (second row) tokens that end with a line break.
            bos: Begin-of-text token.
            chat_fraction: Share of rows that hold chats.
            seed: Seed of the order.
        """
        self._documents = documents
        self._chats = chats
        self._table = line_start
        self._bos = bos
        self._chat_fraction = chat_fraction
        self._rng = random.Random(seed)
        self._stream: IntArray = np.zeros(0, dtype=np.int64)
        self._offset = 0
        self._chat_order: list[int] = []
        self.plain_tokens = 0
        self.chat_tokens = 0

    def _snap(self, start: int, stop: int) -> int:
        """Move a start forward to the next top-level line, if one is near."""
        piece = self._stream[max(start - 1, 0) : stop]
        good = self._table[1, piece[:-1]] & self._table[0, piece[1:]]
        found = np.flatnonzero(good)
        return start + int(found[0]) if len(found) else start

    def _plain(self, length: int) -> IntArray:
        if self._offset + length > len(self._stream):
            order = list(range(len(self._documents)))
            self._rng.shuffle(order)
            self._stream = np.concatenate([self._documents[i] for i in order])
            self._offset = self._rng.randrange(length)
        start = self._offset
        if self._rng.random() < 0.5:
            start = self._snap(start, min(start + 128, len(self._stream) - length))
        row = self._stream[start : start + length - 1]
        self._offset = start + length - 1
        self.plain_tokens += len(row)
        return np.concatenate([[self._bos], row])

    def _chat(self, length: int) -> IntArray:
        pieces: list[IntArray] = []
        have = 0
        while have < length:
            if not self._chat_order:
                self._chat_order = list(range(len(self._chats)))
                self._rng.shuffle(self._chat_order)
            piece = self._chats[self._chat_order.pop()]
            pieces.append(piece)
            have += len(piece)
        self.chat_tokens += length
        return np.concatenate(pieces)[:length]

    def batch(self, rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one batch of inputs and targets.

        Args:
            rows: Number of rows.
            context: Tokens per row.

        Returns:
            Inputs and targets of shape ``(rows, context)``.
        """
        made = [
            self._chat(context + 1) if self._rng.random() < self._chat_fraction else self._plain(context + 1)
            for _ in range(rows)
        ]
        block = torch.from_numpy(np.stack(made))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def token_table(tokenizer: Any) -> npt.NDArray[np.bool_]:
    """Mark the tokens that may begin a top-level line and that end a line."""
    size = len(tokenizer)
    table = np.zeros((2, size), dtype=np.bool_)
    for index in range(size):
        text = tokenizer.decode([index])
        table[0, index] = bool(text) and not text[0].isspace()
        table[1, index] = text.endswith("\n")
    return table


# --------------------------------------------------------------------------
# Model, losses, baselines
# --------------------------------------------------------------------------


def build_model(args: argparse.Namespace, tokenizer: Any) -> LlamaForCausalLM:
    """Create the untrained model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[
            tokenizer.convert_tokens_to_ids(TURN_END),
            tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        ],
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config)


def token_losses(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the loss of every target token, in nats."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    losses = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
    return losses.view(targets.shape)


def held_out_rows(documents: Sequence[IntArray], bos: int, context: int) -> IntArray:
    """Cut held-out documents into rows; the ragged end is padded with -100.

    Args:
        documents: Documents, each ended by the end-of-text token.
        bos: Begin-of-text token put in front of every row.
        context: Tokens per row.

    Returns:
        Rows of ``context + 1`` tokens.
    """
    stream = np.concatenate(documents)
    count = math.ceil(len(stream) / context)
    rows = np.full((count, context + 1), -100, dtype=np.int64)
    rows[:, 0] = bos
    for index in range(count):
        piece = stream[index * context : (index + 1) * context]
        rows[index, 1 : 1 + len(piece)] = piece
    return rows


@torch.no_grad()
def evaluate_rows(model: Any, rows: IntArray, batch: int) -> npt.NDArray[np.float64]:
    """Compute the loss of every target of some rows.

    Args:
        model: The model.
        rows: Rows with -100 where there is no target.
        batch: Rows per forward pass.

    Returns:
        Losses of shape ``(rows, context)``, NaN where there is no target.
    """
    model.eval()
    parts: list[npt.NDArray[np.float64]] = []
    for start in range(0, len(rows), batch):
        block = torch.from_numpy(rows[start : start + batch])
        targets = block[:, 1:]
        losses = token_losses(model, block[:, :-1].clamp(min=0), targets)
        parts.append(losses.masked_fill(targets < 0, float("nan")).double().numpy())
    model.train()
    return np.concatenate(parts)


def chat_rows(
    tokenizer: Any, chats: Sequence[list[dict[str, str]]], context: int, limit: int
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Encode held-out one-exchange chats for the answer loss.

    Args:
        tokenizer: The tokenizer.
        chats: Conversations.
        context: Longest row.
        limit: Most rows.

    Returns:
        Rows for :func:`evaluate_rows` and a mask of the answers' tokens.
    """
    rows: list[IntArray] = []
    masks: list[npt.NDArray[np.bool_]] = []
    for chat in chats:
        if len(chat) > 3 or len(rows) == limit:
            continue
        prompt = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
        head, ids = encode_all(tokenizer, [prompt, whole])
        if len(ids) > context + 1:
            continue
        row = np.full(context + 1, -100, dtype=np.int64)
        row[: len(ids)] = ids
        mask = np.zeros(context, dtype=np.bool_)
        mask[len(head) - 1 : len(ids) - 1] = True
        rows.append(row)
        masks.append(mask)
    return np.stack(rows), np.stack(masks)


def ngram_baselines(train: Sequence[IntArray], held_out: Sequence[IntArray], vocab: int) -> tuple[float, float]:
    """Compute the held-out loss of a unigram and of a smoothed bigram model.

    The bigram model backs off to the unigram model with a Dirichlet prior
    whose strength is chosen on the held-out text, in the baseline's favour.

    Args:
        train: Training documents.
        held_out: Held-out documents.
        vocab: Vocabulary size.

    Returns:
        Loss per token in nats of both models.
    """
    stream = np.concatenate(train)
    unigram = np.bincount(stream, minlength=vocab).astype(np.float64) + 0.5
    unigram /= unigram.sum()
    pairs = Counter((stream[:-1] * vocab + stream[1:]).tolist())
    context = np.bincount(stream[:-1], minlength=vocab).astype(np.float64)
    test = np.concatenate(held_out)
    first, second = test[:-1], test[1:]
    seen = np.asarray([pairs[key] for key in (first * vocab + second).tolist()], dtype=np.float64)
    best = math.inf
    for strength in (10.0, 30.0, 100.0, 300.0, 1000.0):
        chance = (seen + strength * unigram[second]) / (context[first] + strength)
        best = min(best, float(-np.log(chance).mean()))
    return float(-np.log(unigram[test]).mean()), best


# --------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------


def learning_rate(step: int, warmup: int, progress: float) -> float:
    """Share of the peak: linear warm-up by steps, cosine decay to 2 % by progress."""
    warm = min(1.0, (step + 1) / warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return warm * (0.02 + 0.98 * cosine)


def make_optimizer(model: torch.nn.Module, peak: float, decay: float) -> torch.optim.AdamW:
    """Create AdamW with weight decay on the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def train(
    model: LlamaForCausalLM,
    source: RowSource,
    quick_rows: IntArray,
    args: argparse.Namespace,
    started: float,
    log: RunLog,
) -> None:
    """Run the training loop until the time budget or the steps are spent.

    Args:
        model: The model, trained in place.
        source: Where the batches come from.
        quick_rows: Held-out rows for the loss curve.
        args: The command line.
        started: ``time.monotonic()`` at the start of the script.
        log: Receives the curve and the training facts.
    """
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    budget = args.minutes * 60.0
    step_loss: Callable[..., torch.Tensor] = token_losses
    if args.compile:
        step_loss = torch.compile(token_losses, dynamic=False)
    tokens = 0
    step = 0
    recent: list[float] = []
    next_point = 0.0
    compiled = args.compile
    model.train()
    loop_started = time.monotonic()
    while True:
        elapsed = time.monotonic() - started
        progress = elapsed / budget
        if args.steps:
            by_steps = step / args.steps
            # A run bounded by steps must not depend on the clock.
            finished = by_steps >= 1.0 or progress >= 1.0
            progress = by_steps
        else:
            finished = progress >= 1.0
        if finished or progress >= next_point:
            losses = evaluate_rows(model, quick_rows, args.rows)
            point = {
                "step": step,
                "tokens": tokens,
                "minutes": round((time.monotonic() - started) / 60.0, 2),
                "train_loss": round(float(np.mean(recent or [math.log(args.vocab)])), 4),
                "held_out_loss": round(float(np.nanmean(losses)), 4),
            }
            log.curve.append(point)
            LOGGER.info(
                "step %d  tokens %d  %.1f min  train %.3f  held-out %.3f",
                *point.values(),
            )
            recent.clear()
            next_point += 1.0 / args.points
            if finished:
                break
        rate = learning_rate(step, args.warmup, progress)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        long = args.long_every > 0 and step % args.long_every == args.long_every - 1
        context = args.max_context if long else args.context
        rows = max(1, args.rows * args.context // context)
        inputs, targets = source.batch(rows, context)
        function = token_losses if long else step_loss
        try:
            loss = function(model, inputs, targets).mean()
            torch.autograd.backward(loss)
        except Exception:
            if not compiled or step > 0:
                raise
            LOGGER.warning("torch.compile failed here; going on without it")
            step_loss, compiled = token_losses, False
            model.zero_grad()
            loss = step_loss(model, inputs, targets).mean()
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        recent.append(loss.item())
        tokens += inputs.numel()
        step += 1
    spent = time.monotonic() - loop_started
    log.training.update(
        steps=step,
        tokens=tokens,
        plain_tokens=source.plain_tokens,
        chat_tokens=source.chat_tokens,
        training_minutes=round(spent / 60.0, 2),
        tokens_per_second=round(tokens / max(spent, 1e-9)),
        compiled=compiled,
    )


# --------------------------------------------------------------------------
# Samples
# --------------------------------------------------------------------------


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompt: str, length: int, temperature: float = 0.0) -> tuple[str, bool]:
    """Generate a continuation of an already rendered prompt.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        prompt: Text that already holds its special tokens.
        length: Most tokens to generate.
        temperature: Zero for greedy decoding.

    Returns:
        The text and whether it ended with an end token.
    """
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": 0.95}
    output = model.generate(
        input_ids=ids["input_ids"],
        attention_mask=ids["attention_mask"],
        max_new_tokens=length,
        **options,
    )
    new = output[0, ids["input_ids"].shape[1] :].tolist()
    ended = bool(new) and new[-1] in model.generation_config.eos_token_id
    return tokenizer.decode(new, skip_special_tokens=True), ended


def chat_prompt(tokenizer: Any, request: str, system: str | None = None) -> str:
    """Render a request with the generation prompt."""
    messages = [{"role": "user", "content": request}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return cast(
        str,
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
    )


def measure_answers(
    model: Any, tokenizer: Any, chats: Sequence[list[dict[str, str]]], count: int, seconds: float = 240.0
) -> dict[str, Any]:
    """Greedily answer held-out requests and count what ends and parses.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        chats: Held-out conversations.
        count: How many to try.
        seconds: Stop early after this time.

    Returns:
        The counts.
    """
    deadline = time.monotonic() + seconds
    tried = ended = parsed = 0
    for chat in chats:
        if len(chat) > 3:
            continue
        prompt = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        text, done = complete(model, tokenizer, prompt, 256)
        tried += 1
        ended += done
        parsed += done and _parses(text)
        if tried == count or time.monotonic() > deadline:
            break
    return {"requests": tried, "ended": ended, "parsed": parsed}


def draw_samples(model: Any, tokenizer: Any, seed: int) -> list[dict[str, str]]:
    """Generate the samples of the model card."""
    samples: list[dict[str, str]] = []
    requests: list[tuple[str, str | None]] = [
        ("Write a function `read_file` that returns the contents of a file.", None),
        ("Write a function `is_valid_name` that checks a name.", SYSTEM_MESSAGES[2]),
        ("Write a method `close` for the class `Connection` that closes the connection.", None),
    ]
    for request, system in requests:
        text, ended = complete(model, tokenizer, chat_prompt(tokenizer, request, system), 200)
        title = request if system is None else f"[system: {system}] {request}"
        samples.append({"kind": "chat, greedy", "prompt": title, "text": text, "ended": str(ended)})
    torch.manual_seed(seed)
    text, ended = complete(model, tokenizer, chat_prompt(tokenizer, requests[0][0]), 200, temperature=0.7)
    samples.append(
        {
            "kind": "chat, temperature 0.7, top-p 0.95",
            "prompt": requests[0][0],
            "text": text,
            "ended": str(ended),
        }
    )
    start = "import os\nimport sys\n\n\ndef main():\n"
    text, ended = complete(model, tokenizer, BOS + start, 120, temperature=0.7)
    samples.append(
        {
            "kind": "plain completion, temperature 0.7, top-p 0.95",
            "prompt": start,
            "text": text,
            "ended": str(ended),
        }
    )
    return samples


# --------------------------------------------------------------------------
# Output
# --------------------------------------------------------------------------


def draw_curve(curve: Sequence[dict[str, float]], bigram: float) -> str:
    """Draw the loss curve as an SVG document.

    Args:
        curve: The points.
        bigram: Held-out loss of the bigram model, drawn as a line.

    Returns:
        The SVG text.
    """
    width, height, left, bottom, top, right = 720, 360, 56, 44, 24, 16
    last = max(point["tokens"] for point in curve) or 1
    low = math.floor(min(p[k] for p in curve for k in ("train_loss", "held_out_loss")))
    high = math.ceil(max(p[k] for p in curve for k in ("train_loss", "held_out_loss")))

    def x(tokens: float) -> float:
        return left + (width - left - right) * tokens / last

    def y(loss: float) -> float:
        return top + (height - top - bottom) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'role="img" aria-label="Loss curve of baton-tiny" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for loss in range(low, high + 1):
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(loss):.1f}" '
            f'y2="{y(loss):.1f}" stroke="#dddddd"/>'
            f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>'
        )
    for index in range(6):
        tokens = last * index / 5
        parts.append(
            f'<text x="{x(tokens):.1f}" y="{height - bottom + 18}" text-anchor="middle">{tokens / 1e6:.1f} M</text>'
        )
    parts.append(
        f'<line x1="{left}" x2="{width - right}" y1="{y(bigram):.1f}" '
        f'y2="{y(bigram):.1f}" stroke="#888888" stroke-dasharray="5 4"/>'
        f'<text x="{width - right}" y="{y(bigram) - 5:.1f}" text-anchor="end" '
        f'fill="#666666">bigram model, held-out: {bigram:.2f}</text>'
    )
    for key, colour, label, row in (
        ("train_loss", "#1f77b4", "training (plain and chat)", 0),
        ("held_out_loss", "#d62728", "held-out modules", 1),
    ):
        points = " ".join(f"{x(p['tokens']):.1f},{y(p[key]):.1f}" for p in curve)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{width - right - 8}" y="{top + 16 + 18 * row}" '
            f'text-anchor="end" fill="{colour}">{html.escape(label)}</text>'
        )
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 6}" '
        'text-anchor="middle">training tokens</text>'
        f'<text x="14" y="{(top + height - bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(top + height - bottom) / 2})">'
        "loss (nats per token)</text></svg>"
    )
    return "\n".join(parts) + "\n"


def write_card(out: Path, log: RunLog) -> None:
    """Write the model card from the log.

    Args:
        out: Directory of the model.
        log: The run's log.
    """
    data, model, training, results = log.data, log.model, log.training, log.results
    steps = max(1, len(log.curve) // 12)
    chosen = [*log.curve[:-1:steps], log.curve[-1]]
    curve = "\n".join(
        f"| {p['step']} | {p['tokens'] / 1e6:.2f} M | {p['minutes']:.1f} "
        f"| {p['train_loss']:.3f} | {p['held_out_loss']:.3f} |"
        for p in chosen
    )
    samples = "\n".join(
        f"**{s['kind']}** - {'ended by itself' if s['ended'] == 'True' else 'cut at the length limit'}\n\n"
        f"Prompt:\n\n~~~text\n{s['prompt'].rstrip()}\n~~~\n\n"
        f"Output:\n\n~~~python\n{s['text'].rstrip()}\n~~~\n"
        for s in log.samples
    )
    positions = "\n".join(f"| {name} | {value:.3f} |" for name, value in results["loss_by_position"].items())
    answers = results["answers"]

    def split(name: str) -> str:
        size, tokens = data[f"{name}_bytes"] / 1e6, data[f"{name}_tokens"] / 1e6
        return f"{data[f'{name}_modules']} modules ({size:.2f} MB, {tokens:.2f} M tokens)"

    batch = (
        f"{training['rows']} x {training['context']} tokens; "
        f"every {training['long_every']}th step uses rows of {model['max_context']}"
    )
    optimiser = (
        f"AdamW, peak learning rate {training['lr']:g}, {training['warmup']} warm-up steps, "
        f"cosine decay, weight decay {training['weight_decay']:g}"
    )
    machine = (
        f"{training['threads']} CPU threads, torch {training['torch']}, "
        f"{training['tokens_per_second']} tokens per second"
    )
    text = f"""# baton-tiny

A very small Llama-architecture language model that comes with Baton so that the
whole system can be tried, demonstrated and tested without a download and
without a GPU. It writes Python-looking code. It is **not** useful as a coding
assistant: what it writes has the form of Python, seldom the meaning asked for.

Everything in this directory was made by `scripts/train_demo_model.py`; every
figure below was computed by that run and is also in `training_log.json`.

## Model

| | |
|---|---|
| Architecture | `LlamaForCausalLM`, tied embeddings |
| Parameters | {model["parameters"]:,} |
| Hidden size, layers | {model["hidden_size"]}, {model["layers"]} |
| Query heads, key/value heads, head size | {model["heads"]}, {model["kv_heads"]}, {model["head_dim"]} |
| MLP size | {model["intermediate_size"]} |
| Context | {model["max_context"]} tokens (trained mostly at {training["context"]}) |
| Vocabulary | {model["vocab_size"]}, byte-level BPE, trained on the training modules |
| Weights | bfloat16 safetensors, {model["weights_bytes"] / 1e6:.2f} MB |

Special tokens: `{PAD}` (padding), `{BOS}` (begin of text; added by the
tokenizer to plain text, written by the chat template itself), `{END_OF_TEXT}`
(end of a document), `{TURN_START}` and `{TURN_END}` (begin and end of a turn).
Generation stops at `{TURN_END}` or `{END_OF_TEXT}`.

The chat template renders each message as

```text
{TURN_START}ROLE
CONTENT{TURN_END}
```

after one `{BOS}`; the generation prompt is `{TURN_START}assistant` and a line
break. System messages are accepted. A rendered chat must be encoded with
`add_special_tokens=False`, otherwise it starts with two `{BOS}`.

## Data

Source files of the standard library of {data["implementation"]} {data["python_version"]}, as installed with the
interpreter: {data["modules"]} modules, {data["bytes"] / 1e6:.2f} MB. Tests, character-set tables and
third-party packages are left out. A hash of each file's path decides the
split: {split("train")} for training and
{split("held_out")} held out. The held-out ones were
used neither for the weights nor for the tokenizer. Some standard-library
modules resemble each other, so the held-out figures are a little flattering.

Chats are made out of the same modules: the request is built from a function's
name and the first line of its docstring, the answer is the function's source.
There are {data["train_chats"]} training chats ({data["train_chat_tokens"] / 1e6:.2f} M tokens); about
{training["chat_fraction"]:.0%} of the training rows hold chats, some with a system message or
a second exchange.

## Training

```bash
{training["command"]}
```

| | |
|---|---|
| Steps, tokens | {training["steps"]}, {training["tokens"] / 1e6:.2f} M |
| Batch | {batch} |
| Optimiser | {optimiser} |
| Precision | float32 for training, rounded to bfloat16 at the end |
| Machine | {machine} |
| Training time | {training["training_minutes"]:.2f} minutes |
| Whole run | {training["total_minutes"]:.2f} minutes, with tokenizer and evaluation |
| Seed | {training["seed"]} |

With a time budget (`--minutes`) the learning rate follows the clock, so another
machine, or the same one under another load, gives other weights. With `--steps`
a run depends only on the seed, the thread count, the kind of CPU and the
installed versions.

![Loss curve](loss_curve.svg)

| Step | Tokens | Minutes | Training loss | Held-out loss (subset) |
|---:|---:|---:|---:|---:|
{curve}

## Results

Measured after rounding to bfloat16, in float32 arithmetic, on all held-out
modules cut into rows of {training["context"]} tokens.

| Held-out figure | Value |
|---|---:|
| Loss (nats per token) | {results["held_out_loss"]:.4f} |
| Perplexity per token | {results["held_out_perplexity"]:.2f} |
| Bits per byte | {results["bits_per_byte"]:.4f} |
| Loss of a smoothed bigram model | {results["bigram_loss"]:.4f} |
| Loss of a unigram model | {results["unigram_loss"]:.4f} |
| Loss on the answers of held-out chats | {results["chat_answer_loss"]:.4f} |
| Held-out requests whose greedy answer ended within 256 tokens | {answers["ended"]} of {answers["requests"]} |
| ... and parsed as Python | {answers["parsed"]} of {answers["requests"]} |

Held-out loss by position in rows of {model["max_context"]} tokens:

| Positions | Loss |
|---|---:|
{positions}

## Samples

Not selected; the prompts are fixed in the script.

{samples}
## Limits

* It knows a few megabytes of Python and no natural language to speak of.
* It does not follow instructions; it was never trained on safety, facts or dialogue.
* Its code is mostly wrong, may loop, and may repeat pieces of the standard library.
* It often ignores the function name that the request asks for.
* Greedy decoding repeats itself easily; a temperature near 0.7 reads better.
* Above {training["context"]} tokens of context it has seen little training.

## Licence of the data

The training text is the Python standard library, (c) Python Software
Foundation and contributors, used under the PSF License Agreement Version 2
(<https://docs.python.org/3/license.html>), which some of its files supplement
with notices of their own. The weights are offered under the licence of this
repository; text that the model may reproduce verbatim from the standard library
remains under the terms of its source.
"""
    (out / "README.md").write_text(text, encoding="utf-8")


def save_model(out: Path, model: LlamaForCausalLM, tokenizer: Any) -> None:
    """Write weights, configuration and tokenizer.

    Args:
        out: Directory to write to.
        model: The trained model; its weights are rounded to bfloat16.
        tokenizer: The tokenizer.
    """
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.config.use_cache = True
    generation: Any = GenerationConfig
    model.generation_config = generation(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    # Readers that predate `rope_parameters` look for these two names.
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train the demo model baton-tiny from the standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_out = Path(__file__).resolve().parent.parent / "models" / "baton-tiny"
    add = parser.add_argument
    add("--out", type=Path, default=default_out, help="directory to write")
    add("--minutes", type=float, default=25.0, help="time budget of the training loop's end")
    add("--steps", type=int, default=0, help="number of steps; 0: as the time allows")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights and order")
    add("--context", type=int, default=512, help="tokens per row")
    add("--rows", type=int, default=8, help="rows per step")
    add("--long-every", type=int, default=12, help="every n-th step uses the full context")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--warmup", type=int, default=80, help="warm-up steps")
    add("--weight-decay", type=float, default=0.1, help="weight decay of the matrices")
    add("--chat-fraction", type=float, default=0.35, help="share of rows with chats")
    add("--held-out", type=float, default=0.05, help="share of modules held out")
    add("--points", type=int, default=40, help="points of the loss curve")
    add("--answers", type=int, default=40, help="held-out requests to answer at the end")
    add("--vocab", type=int, default=4096, help="vocabulary size")
    add("--hidden", type=int, default=192, help="hidden size")
    add("--intermediate", type=int, default=512, help="MLP size")
    add("--layers", type=int, default=6, help="number of layers")
    add("--heads", type=int, default=6, help="query heads")
    add("--kv-heads", type=int, default=2, help="key/value heads")
    add("--head-dim", type=int, default=32, help="size of a head")
    add("--max-context", type=int, default=2048, help="longest context")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use torch.compile (needs a C++ compiler; falls back without one)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the model and write its directory.

    Args:
        argv: Command line without the program's name.

    Returns:
        The exit status.
    """
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parse_arguments(arguments)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    log = RunLog()

    root = Path(sysconfig.get_paths()["stdlib"])
    modules = load_modules(root)
    kept = [m for m in modules if not is_held_out(m.path, args.held_out)]
    held = [m for m in modules if is_held_out(m.path, args.held_out)]
    LOGGER.info("%d modules, %d held out", len(modules), len(held))
    tokenizer = train_tokenizer([m.text for m in kept], args.vocab, args.max_context)
    bos = tokenizer.bos_token_id
    train_docs = encode_all(tokenizer, [m.text + END_OF_TEXT for m in kept])
    held_docs = encode_all(tokenizer, [m.text + END_OF_TEXT for m in held])
    chats = build_conversations(kept, random.Random(args.seed), max_chars=2400)
    held_chats = build_conversations(held, random.Random(args.seed), max_chars=1600)
    chat_docs = encode_all(tokenizer, render_chats(tokenizer, chats))
    corpus_hash = hashlib.sha256()
    for module in modules:
        corpus_hash.update(module.path.encode() + b"\0" + module.text.encode() + b"\0")
    log.data.update(
        implementation=platform.python_implementation(),
        python_version=platform.python_version(),
        modules=len(modules),
        bytes=sum(len(m.text.encode()) for m in modules),
        sha256=corpus_hash.hexdigest(),
        train_modules=len(kept),
        train_bytes=sum(len(m.text.encode()) for m in kept),
        train_tokens=sum(len(d) for d in train_docs),
        train_chats=len(chats),
        train_chat_tokens=sum(len(d) for d in chat_docs),
        held_out_modules=len(held),
        held_out_bytes=sum(len(m.text.encode()) for m in held),
        held_out_tokens=sum(len(d) for d in held_docs),
        held_out_paths=[m.path for m in held],
    )
    LOGGER.info("%s", {k: v for k, v in log.data.items() if k != "held_out_paths"})

    model = build_model(args, tokenizer)
    log.training.update(
        command="python scripts/train_demo_model.py " + " ".join(arguments),
        seed=args.seed,
        threads=args.threads,
        rows=args.rows,
        context=args.context,
        long_every=args.long_every,
        lr=args.lr,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        chat_fraction=args.chat_fraction,
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
    )
    rows = held_out_rows(held_docs, bos, args.context)
    picks = np.random.default_rng(args.seed).permutation(len(rows))[:32]
    source = RowSource(train_docs, chat_docs, token_table(tokenizer), bos, args.chat_fraction, args.seed)
    train(model, source, rows[np.sort(picks)], args, started, log)

    save_model(args.out, model, tokenizer)
    model.to(torch.float32)  # type: ignore[arg-type]
    model.train(False)
    losses = evaluate_rows(model, rows, args.rows)
    total = float(np.nansum(losses))
    mean = total / int(np.isfinite(losses).sum())
    long_rows = held_out_rows(held_docs, bos, args.max_context)
    by_position = evaluate_rows(model, long_rows, 2)
    edges = [e for e in (0, 128, 512, 1024, 2048) if e < args.max_context] + [args.max_context]
    answer_rows, mask = chat_rows(tokenizer, held_chats, args.context, 200)
    answer_losses = evaluate_rows(model, answer_rows, args.rows)
    unigram, bigram = ngram_baselines(train_docs, held_docs, args.vocab)
    log.results.update(
        held_out_loss=round(mean, 4),
        held_out_perplexity=round(math.exp(mean), 4),
        bits_per_byte=round(total / math.log(2) / log.data["held_out_bytes"], 4),
        unigram_loss=round(unigram, 4),
        bigram_loss=round(bigram, 4),
        chat_answer_loss=round(float(np.nanmean(answer_losses[mask])), 4),
        loss_by_position={
            f"{a} to {b - 1}": round(float(np.nanmean(by_position[:, a:b])), 4) for a, b in itertools.pairwise(edges)
        },
    )
    LOGGER.info("%s", log.results)
    model.train(False)
    # One token at a time, threads cost more than they bring.
    torch.set_num_threads(1)
    log.results["answers"] = measure_answers(model, tokenizer, held_chats, args.answers)
    log.samples = draw_samples(model, tokenizer, args.seed)
    weights = args.out / "model.safetensors"
    log.model.update(
        parameters=sum(p.numel() for p in model.parameters()),
        weights_bytes=weights.stat().st_size,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_context=args.max_context,
        vocab_size=len(tokenizer),
    )
    log.training["total_minutes"] = round((time.monotonic() - started) / 60.0, 2)
    (args.out / "training_log.json").write_text(
        json.dumps(log.__dict__, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (args.out / "loss_curve.svg").write_text(draw_curve(log.curve, bigram), encoding="utf-8")
    write_card(args.out, log)
    LOGGER.info("answers %s; wrote %s", log.results["answers"], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
