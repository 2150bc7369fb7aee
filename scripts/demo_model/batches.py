"""What training reads, and what it must not."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .conversations import Chat, build_conversations
from .corpus import Sources, fingerprint, is_held_out
from .tokenizer import END_OF_TEXT, IntArray, encode_all, render, train_tokenizer

CHAT_FRACTION = 0.35
"""Share of the training rows that hold chats."""


@dataclass(frozen=True)
class Dataset:
    """The encoded corpus and its chats; ``facts`` go into the run's log."""

    tokenizer: Any
    train_documents: list[IntArray]
    train_chats: list[IntArray]
    held_out_documents: list[IntArray]
    held_out_chats: list[Chat]
    facts: dict[str, Any]

    def single_exchanges(self) -> Iterator[Chat]:
        """Yield the held-out chats with one question and one answer."""
        return (chat for chat in self.held_out_chats if len(chat) <= 3)


def prepare(sources: Sources, vocab_size: int, max_length: int, seed: int) -> Dataset:
    """Train the tokenizer on the training part of the modules alone, build chats, encode everything."""
    kept = [text for path, text in sources.items() if not is_held_out(path)]
    return encode_sources(sources, train_tokenizer(kept, vocab_size, max_length), seed)


def encode_sources(sources: Sources, tokenizer: Any, seed: int) -> Dataset:
    """Split the modules, build chats, encode everything."""
    kept = {path: text for path, text in sources.items() if not is_held_out(path)}
    held = {path: text for path, text in sources.items() if is_held_out(path)}
    documents = encode_all(tokenizer, [text + END_OF_TEXT for text in kept.values()])
    held_documents = encode_all(tokenizer, [text + END_OF_TEXT for text in held.values()])
    chats = encode_all(tokenizer, [render(tokenizer, chat) for chat in build_conversations(kept, 2400, seed)])
    facts: dict[str, Any] = {
        "implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "modules": len(sources),
        "bytes": sum(len(text.encode()) for text in sources.values()),
        "sha256": fingerprint(sources),
    }
    for name, part, encoded in (("train", kept, documents), ("held_out", held, held_documents)):
        facts[f"{name}_modules"] = len(part)
        facts[f"{name}_bytes"] = sum(len(text.encode()) for text in part.values())
        facts[f"{name}_tokens"] = sum(map(len, encoded))
    facts |= {
        "train_chats": len(chats),
        "train_chat_tokens": sum(map(len, chats)),
        "held_out_paths": list(held),
    }
    return Dataset(tokenizer, documents, chats, held_documents, build_conversations(held, 1600, seed), facts)


class RowSource:
    """Deterministic, endless source of training rows.

    Every row starts with the begin-of-text token, so the model may be prompted from any point of a program.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._documents = dataset.train_documents
        self._chats = dataset.train_chats
        self._bos = dataset.tokenizer.bos_token_id
        self._rng = random.Random(seed)
        self._stream: IntArray = np.zeros(0, dtype=np.int64)
        self._offset = 0
        self._chat_order: list[int] = []
        texts = [dataset.tokenizer.decode([token]) for token in range(len(dataset.tokenizer))]
        self._unindented = np.asarray([bool(text) and not text[0].isspace() for text in texts])
        self._ends_line = np.asarray([text.endswith("\n") for text in texts])
        self.plain_tokens = 0
        self.chat_tokens = 0

    def batch(self, rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make inputs and targets (one token on), both int64 of shape ``(rows, context)``."""
        made = [
            self._chat(context + 1) if self._rng.random() < CHAT_FRACTION else self._plain(context + 1)
            for _ in range(rows)
        ]
        block = torch.from_numpy(np.stack(made))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def _plain(self, length: int) -> IntArray:
        if self._offset + length > len(self._stream):
            self._stream = np.concatenate([self._documents[i] for i in self._shuffled(len(self._documents))])
            self._offset = self._rng.randrange(length)
        start = self._offset
        if self._rng.random() < 0.5:
            start = self._top_level(start, min(start + 128, len(self._stream) - length))
        row = self._stream[start : start + length - 1]
        self._offset = start + length - 1
        self.plain_tokens += len(row)
        return np.concatenate([[self._bos], row])

    def _top_level(self, start: int, stop: int) -> int:
        """Move a start forward to the next top-level line, if one is near."""
        piece = self._stream[max(start - 1, 0) : stop]
        found = np.flatnonzero(self._ends_line[piece[:-1]] & self._unindented[piece[1:]])
        return start + int(found[0]) if len(found) else start

    def _chat(self, length: int) -> IntArray:
        pieces: list[IntArray] = []
        while sum(map(len, pieces)) < length:
            self._chat_order = self._chat_order or self._shuffled(len(self._chats))
            pieces.append(self._chats[self._chat_order.pop()])
        self.chat_tokens += length
        return np.concatenate(pieces)[:length]

    def _shuffled(self, count: int) -> list[int]:
        order = list(range(count))
        self._rng.shuffle(order)
        return order
