"""Prompts of the data sets: what is sent, and how many tokens are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from baton.errors import ConfigError, shown
from baton.tokenizer import Tokenizer
from baton_bench.serve.options import ServeOptions
from baton_bench.traces import draw_length, read_lines, read_trace, scaled, scaled_block

Prompt = str | tuple[int, ...] | list[dict[str, str]]
"""Text, token ids, or chat messages."""

_MIN_SHAREGPT_TOKENS = 4
_MAX_SHAREGPT_PROMPT = 1024
_MAX_SHAREGPT_TOKENS = 2048
"""Longer conversations are left out, as vLLM's and SGLang's benchmarks do."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        prompt: Prompt as text or token ids, or the chat messages.
        output_tokens: Wanted.
        at_s: When a trace sends it, in seconds after its first request.
        session: Conversation that it belongs to; empty: unknown.
        delay_s: Seconds from the session's last answer to this request; ``None``: it has a time.
    """

    prompt: Prompt
    output_tokens: int
    at_s: float = 0.0
    session: str = ""
    delay_s: float | None = None


class PromptSource:
    """Makes requests of a data set.

    Args:
        options: Options of the command line.

    Raises:
        ConfigError: The tokenizer or the file cannot be read.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._tokenizer = Tokenizer.load(options.tokenizer) if options.tokenizer else None
        size = self._tokenizer.vocab_size if self._tokenizer else options.vocab_size
        special = self._tokenizer.special_ids if self._tokenizer else frozenset(range(min(8, size // 2)))
        self._ids = np.array([i for i in range(size) if i not in special], dtype=np.int64)
        self._from_file = self._read_file() if options.file or options.trace else []

    @property
    def count(self) -> int:
        return self._options.requests or len(self._from_file) or 100

    def warmup(self, draw: int) -> list[PlannedRequest]:
        """Return the requests that are sent first; synthetic ones, also before a trace, are not those that count."""
        number = self._options.warmup
        counted = self._from_file and not self._options.trace_file  # a trace's prefixes would be known already
        return self._cycled(number) if counted else self._synthetic(number, [draw, 1])

    def requests(self, draw: int, count: int | None = None) -> list[PlannedRequest]:
        """Return the requests that count.

        Args:
            draw: Synthetic prompts of different draws have nothing in common but, in one run, the shared prefixes.
            count: Number of requests; those of a file are repeated; default: as the options say.
        """
        number = self.count if count is None else count
        return self._synthetic(number, [draw, 0]) if not self._from_file else self._cycled(number)

    def _cycled(self, count: int) -> list[PlannedRequest]:
        known = self._from_file
        return [known[i % len(known)] for i in range(count)]

    def _synthetic(self, count: int, draw: Sequence[int]) -> list[PlannedRequest]:
        options = self._options
        rng = np.random.default_rng([options.seed, *draw])
        shared = options.dataset == "shared-prefix"
        prefixes = self._prefixes() if shared else [()]
        made = []
        for _ in range(count):
            prefix = prefixes[int(rng.integers(len(prefixes)))]
            own = tuple(self._draw(rng, draw_length(rng, options.isl, options.range_ratio)))
            output = draw_length(rng, options.osl, options.range_ratio)
            made.append(PlannedRequest(self._written((*prefix, *own)), output))
        return made

    def _prefixes(self) -> list[tuple[int, ...]]:
        rng = np.random.default_rng([self._options.seed, 2**31])
        return [tuple(self._draw(rng, self._options.prefix_len)) for _ in range(self._options.num_prefixes)]

    def _draw(self, rng: np.random.Generator, count: int) -> list[int]:
        results: list[int] = rng.choice(self._ids, count).tolist()
        return results

    def _written(self, ids: tuple[int, ...]) -> Prompt:
        """Return the prompt as it is sent: token ids, or with a tokenizer a text of about as many tokens."""
        if self._tokenizer is None:
            return ids
        text = self._tokenizer.decode(ids)
        # Random ids joined to a text are split otherwise than they were drawn: it is cut or filled to the length.
        for _ in range(4):
            got = self._tokenizer.encode(text, add_special_tokens=False)
            if len(got) == len(ids):
                break
            got = got[: len(ids)] + list(ids[: len(ids) - len(got)])
            text = self._tokenizer.decode(got)
        return text

    # --- files ---

    def _read_file(self) -> list[PlannedRequest]:
        path = Path(self._options.file)
        limit = self._options.requests
        if self._options.trace_file:
            return self._read_trace(Path(self._options.trace_file), limit)
        if self._options.dataset == "sharegpt":
            results = self._read_sharegpt(path, limit)
        else:
            results = [self._line(value, where) for where, value in read_lines(path, limit)]
        if not results:
            raise ConfigError(f"{path} has no request that can be used", field="file")
        return results

    def _line(self, value: dict[str, Any], where: str) -> PlannedRequest:
        prompt = value.get("prompt", value.get("messages", value.get("text")))
        is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        is_chat = isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids or is_chat):
            raise ConfigError(f"{where} needs prompt (text or token ids) or messages", field="prompt")
        number = value.get("output_tokens", value.get("max_tokens", self._options.osl))
        if type(number) is not int or number < 1:
            raise ConfigError(f"{where}: output_tokens must be a number above 0, got {shown(number)}", field="prompt")
        return PlannedRequest(tuple(prompt) if is_ids else prompt, number)

    def _read_sharegpt(self, path: Path, limit: int | None) -> list[PlannedRequest]:
        try:
            rows = orjson.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="file") from error
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno} is no JSON: {error.msg}", field="file") from error
        if not isinstance(rows, list):
            raise ConfigError(f"{path} is no list of conversations", field="file")
        results: list[PlannedRequest] = []
        for number, row in enumerate(rows):
            if limit is not None and len(results) >= limit:
                break
            request = self._conversation(row, f"{path}, conversation {number}")
            if request is not None:
                results.append(request)
        return results

    def _conversation(self, row: Any, where: str) -> PlannedRequest | None:
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
            raise ConfigError(f"{where} has no list of conversations", field="file")
        texts = [t.get("value", t.get("content")) for t in turns[:2]]
        if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
            return None
        if self._tokenizer is None:
            return PlannedRequest(texts[0], self._options.osl)
        prompt, output = (len(self._tokenizer.encode(text)) for text in texts)
        short = min(prompt, output) < _MIN_SHAREGPT_TOKENS
        if short or prompt > _MAX_SHAREGPT_PROMPT or prompt + output > _MAX_SHAREGPT_TOKENS:
            return None
        return PlannedRequest(texts[0], output)

    def _read_trace(self, path: Path, limit: int | None) -> list[PlannedRequest]:
        scale = self._options.scale
        trace = scaled(read_trace(path, limit), scale, 1 / self._options.speedup)
        block_tokens = scaled_block(scale)
        blocks: dict[int, tuple[int, ...]] = {}
        results = []
        for row in trace:
            for block in row.blocks:
                if block not in blocks:
                    rng = np.random.default_rng([self._options.seed, 3, block])
                    blocks[block] = tuple(self._draw(rng, block_tokens))
            ids = [token for block in row.blocks for token in blocks[block]][: row.input_tokens]
            prompt: Prompt = tuple(ids) if self._tokenizer is None else self._tokenizer.decode(ids)
            at = (row.at_ms - trace[0].at_ms) / 1e3
            delay = None if row.delay_ms is None else row.delay_ms / 1e3
            results.append(PlannedRequest(prompt, row.output_tokens, at, row.session, delay))
        return results
