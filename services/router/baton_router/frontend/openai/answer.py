"""The formatters: write a generation's chunks as one response object, or as server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import orjson

from baton.dialects import CallArguments, CallStart, DialectParser, Event, Reasoning, Text
from baton.errors import BatonError
from baton.tokenizer import IncrementalDetokenizer, Tokenizer
from baton.types import FinishReason, TokenLogprob
from baton_router.frontend.http.errors import baton_error_object
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.processor.output_processor import GenerationClock
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextDelta

DONE = b"data: [DONE]\n\n"
_NULL = b"null"
_COUNTED_TOGETHER = 16
"""Tokens after which an :class:`EventWriter` updates counters."""
_SUFFIXES: dict[bytes, bytes] = {}
"""Suffixes of plain events: few, and one object for all streams stays in the processor's caches."""
_JSON_TEXTS: WeakKeyDictionary[Tokenizer, dict[int, bytes]] = WeakKeyDictionary()
"""Texts of tokens as JSON strings, as far as they were used."""
_SLICE = 256
"""Tokens whose log probabilities are encoded together: their objects are freed, and other threads run in between."""
_LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""

Drafts = tuple[int, int]
"""Draft tokens of speculative decoding that were verified, and those that were accepted."""


class LogprobWriter:
    """Writes log probabilities in the formats of chat and of plain completions.

    Args:
        tokenizer: Tokenizer of the model.
        as_ids: Write tokens as ``token_id:17``.
    """

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, items: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Return the entries of a chat answer's ``logprobs.content``."""
        return [
            {
                **self._chat_token(item.token_id, item.logprob),
                "top_logprobs": [self._chat_token(token_id, value) for token_id, value in item.top],
            }
            for item in items
        ]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._as_ids else data.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": list(data)}

    def completion(
        self, ids: Sequence[int], items: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Return a completion's ``logprobs``.

        Args:
            ids: Token ids.
            items: Log probabilities of ``ids``; ``None`` for a prompt's first token.
            offsets: Offsets of ``ids`` in the text, in characters.
        """
        return {
            "tokens": [self._completion_token(token_id) for token_id in ids],
            "token_logprobs": [None if item is None else max(item.logprob, _LOWEST) for item in items],
            "top_logprobs": [None if item is None else self._top(item) for item in items],
            "text_offset": list(offsets),
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """Return the most probable tokens, and the chosen one if it is not among them."""
        top = {self._completion_token(token_id): max(value, _LOWEST) for token_id, value in item.top}
        top.setdefault(self._completion_token(item.token_id), max(item.logprob, _LOWEST))
        return top

    def _completion_token(self, token_id: int) -> str:
        """Return a token as text; bytes that are not UTF-8 are escaped, so that keys differ."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def completion_json(
        self, ids: Sequence[int], items: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> dict[str, orjson.Fragment]:
        """Return :meth:`completion` with lists as JSON, made slice by slice."""
        slices = [
            {name: orjson.dumps(column) for name, column in self.completion(ids[cut], items[cut], offsets[cut]).items()}
            for cut in _slices(max(1, len(ids)))
        ]
        return {name: _joined([part[name] for part in slices]) for name in slices[0]}

    def prompt(self, items: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """Return a prompt's log probabilities in the extended format: by token id, with rank and text."""
        return [None if item is None else self._prompt_token(item) for item in items]

    def _prompt_token(self, item: TokenLogprob) -> dict[str, Any]:
        ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(item.top, 1)]
        entries = {item.token_id: (item.logprob, item.rank)}
        for token_id, value, rank in ranked:
            entries.setdefault(token_id, (value, rank))
        return {
            str(token_id): {
                "logprob": max(value, _LOWEST),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, (value, rank) in entries.items()
        }


def _slices(length: int) -> list[slice]:
    return [slice(at, at + _SLICE) for at in range(0, length, _SLICE)]


def _joined(lists: Sequence[bytes]) -> orjson.Fragment:
    """Return lists in JSON as one list."""
    return orjson.Fragment(b"[" + b",".join([each[1:-1] for each in lists if len(each) > 2]) + b"]")


def _list_json(write: Callable[[Any], list[Any]], items: Sequence[Any]) -> orjson.Fragment:
    """Return ``write(items)`` as JSON, made slice by slice."""
    return _joined([orjson.dumps(write(items[cut])) for cut in _slices(len(items))])


def text_offsets(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool) -> list[int]:
    """Return, for each token, how many characters of the text come before it."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    offsets = []
    chars = 0
    for token_id in ids:
        offsets.append(chars)
        chars += len(detokenizer.push((token_id,)))
    return offsets


def usage_object(
    prepared: Sequence[PreparedRequest], output_tokens: int, cached_tokens: int, drafts: Sequence[Drafts] = ()
) -> dict[str, Any]:
    """Return the ``usage`` of one HTTP request, all its prompts together.

    Args:
        prepared: The prepared prompts.
        output_tokens: Generated tokens of all sequences.
        cached_tokens: Cached tokens of all prompts.
        drafts: Verified and accepted draft tokens, per prompt.
    """
    prompt_tokens = sum([item.prompt_tokens for item in prepared])
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if drafted := sum([each[0] for each in drafts]):
        accepted = sum([each[1] for each in drafts])
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return usage


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Return server-sent events, named by their ``type``."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


class Echo:
    """The prompt as the beginning of a completion."""

    __slots__ = ("ids", "logprobs", "offsets", "text")

    def __init__(self, prepared: PreparedRequest, prompt_logprobs: list[TokenLogprob | None] | None) -> None:
        tokenizer = prepared.text_model.tokenizer
        skip = prepared.request.skip_special_tokens
        self.ids = list(prepared.routed.prompt_token_ids)
        prompt = prepared.request.prompt
        self.text = prompt if isinstance(prompt, str) else tokenizer.decode(self.ids, skip)
        self.logprobs: list[TokenLogprob | None] = prompt_logprobs or []
        self.offsets = text_offsets(tokenizer, self.ids, skip_special_tokens=skip) if self.logprobs else []


class Choice:
    """One sequence of an answer, as it grows."""

    __slots__ = ("_chars", "anchors", "finish_reason", "ids", "logprobs", "offsets", "stop_reason", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._chars = 0
        self.anchors: list[int] = []
        """Places in all of the text; see :class:`TextDelta`."""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        """Add a delta of the sequence."""
        self.texts.append(delta.text)
        self.anchors += [self._chars + at for at in delta.anchors]
        self._chars += len(delta.text)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def whole(self) -> TextDelta:
        """Return all of the text as one delta, without tokens."""
        finish = self.finish_reason or FinishReason.STOP
        text = "".join(self.texts)
        return TextDelta(0, text, [], finish_reason=finish, stop_reason=self.stop_reason, anchors=self.anchors)


class WholeAnswer:
    """The formatter of answers in one piece.

    Args:
        request: The HTTP request.
        prepared: The prepared prompts.
        ident: Identifier of the answer.
        created: Creation time, in seconds since 1970.

    Attributes:
        num_logprobs: Number of log probabilities, which take nearly all of the memory, and of the time of :meth:`end`.
    """

    __slots__ = (
        "_cached",
        "_choices",
        "_drafts",
        "_encoded",
        "_head",
        "_per_prompt_token",
        "_per_token",
        "_prepared",
        "_prompt_logprobs",
        "_request",
        "num_logprobs",
    )

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        self._request = request
        self._prepared = prepared
        self._head = {"id": ident, "created": created, "model": prepared[0].info.name}
        self._choices = [[Choice() for _ in range(request.n)] for _ in prepared]
        self._prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(prepared)
        self._cached = [0] * len(prepared)
        self._drafts: list[Drafts] = [(0, 0)] * len(prepared)
        self._encoded: bytes | None = None
        sampling = prepared[0].routed.sampling
        self._per_token = (sampling.logprobs or 0) + 1
        self._per_prompt_token = ((sampling.prompt_logprobs or 0) + 1) * (request.n if request.echo else 1)
        self.num_logprobs = 0

    def encode(self) -> None:
        """Do the work of :meth:`end` before it, with no effects outside: in a thread, for long answers."""
        self._encoded = self._encode()
        for choice in (choice for choices in self._choices for choice in choices):
            choice.logprobs.clear()  # freeing them takes time, too

    def add(self, chunk: TextChunk) -> bytes:
        """Add a chunk; nothing is sent before the end."""
        if chunk.trace is not None:
            self._cached[chunk.prompt_index] = chunk.cached_tokens
            self._drafts[chunk.prompt_index] = chunk.trace.drafted_tokens, chunk.trace.accepted_tokens
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs[chunk.prompt_index] = chunk.prompt_logprobs
            self.num_logprobs += len(chunk.prompt_logprobs) * self._per_prompt_token
        choices = self._choices[chunk.prompt_index]
        for delta in chunk.deltas:
            choices[delta.index].add(delta)
            self.num_logprobs += len(delta.logprobs) * self._per_token
        return b""

    @property
    def _writer(self) -> LogprobWriter:  # created on demand, which is rare
        return LogprobWriter(self._prepared[0].text_model.tokenizer, as_ids=self._request.tokens_as_ids)

    def end(self) -> bytes:
        """Return the response object as JSON."""
        return self._encode() if self._encoded is None else self._encoded

    def _encode(self) -> bytes:
        request = self._request
        choices = []
        tokens = 0
        for at in range(len(self._prepared)):
            for index, choice in enumerate(self._choices[at]):
                tokens += 0 if request.score_only else len(choice.ids)
                write = self._chat_choice if request.chat else self._completion_choice
                choices.append(write(at, index, choice))
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion" if request.chat else "text_completion",
            "choices": choices,
            "usage": usage_object(self._prepared, tokens, sum(self._cached), self._drafts),
        }
        if request.chat and request.return_token_ids:
            body["prompt_token_ids"] = list(self._prepared[0].routed.prompt_token_ids)
        if request.chat and request.prompt_logprobs:
            body["prompt_logprobs"] = _list_json(self._writer.prompt, self._prompt_logprobs[0] or [])
        return orjson.dumps(body)

    def _chat_choice(self, at: int, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs:
            logprobs = {"content": _list_json(self._writer.chat, choice.logprobs), "refusal": None}
        out: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            out["token_ids"] = choice.ids
        return out

    def _completion_choice(self, at: int, index: int, choice: Choice) -> dict[str, Any]:
        request = self._request
        echo = Echo(self._prepared[at], self._prompt_logprobs[at]) if request.echo else None
        if request.score_only:
            choice = Choice()
            choice.finish_reason = FinishReason.LENGTH
        text = "".join(choice.texts)
        out: dict[str, Any] = {
            "index": at * request.n + index,
            "text": echo.text + text if echo else text,
            "logprobs": self._completion_logprobs(choice, echo) if request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.return_token_ids:
            out["prompt_token_ids"] = list(self._prepared[at].routed.prompt_token_ids)
            out["token_ids"] = choice.ids
        if request.prompt_logprobs:
            out["prompt_logprobs"] = _list_json(self._writer.prompt, self._prompt_logprobs[at] or [])
        return out

    def _completion_logprobs(self, choice: Choice, echo: Echo | None) -> dict[str, orjson.Fragment]:
        """Return a completion's ``logprobs``, with those of the prompt first if it is echoed."""
        ids = choice.ids
        items = list[TokenLogprob | None](choice.logprobs)
        offsets = choice.offsets
        if echo is not None:
            ids = [*echo.ids, *ids]
            items = [*echo.logprobs, *items]
            offsets = [*echo.offsets, *(len(echo.text) + offset for offset in offsets)]
        return self._writer.completion_json(ids, items, offsets)


class EventWriter:
    """Writes the events of the plain tokens of one sequence, as HTTP chunks; a ``baton.rpc.multiplex.TokenWriter``.

    Between two tokens of a stream the kernel and other streams use the processor's caches, so that most of a token's
    time is waiting for memory. The writer needs few objects per token, and updates counters for many tokens at once.

    Args:
        prefix: Bytes of an event before the token's text.
        suffix: Bytes of an event after it.
        write: Sends bytes.
        tokenizer: Tokenizer of the model.
        token_ids: Tokens of the sequence so far; those that are taken are appended.
        clock: Clock of the generation.
        count_tokens: Called with the number of tokens taken since the last call, every ``_COUNTED_TOGETHER`` tokens
            and by :meth:`close`.
    """

    __slots__ = (
        "_clock",
        "_count_tokens",
        "_frame_size",
        "_itl",
        "_json_texts",
        "_last",
        "_num_counted",
        "_prefix",
        "_suffix",
        "_token_ids",
        "_tokenizer",
        "_unsent",
        "_write",
    )

    def __init__(
        self,
        prefix: bytes,
        suffix: bytes,
        write: Callable[[bytes], None],
        tokenizer: Tokenizer,
        token_ids: list[int],
        clock: GenerationClock,
        count_tokens: Callable[[int], None],
    ) -> None:
        self._prefix = prefix
        self._suffix = suffix
        self._frame_size = len(prefix) + len(suffix)
        self._write = write
        self._tokenizer = tokenizer
        self._count_tokens = count_tokens
        self._unsent = b""
        self._token_ids = token_ids
        self._num_counted = len(token_ids)
        self._clock = clock
        self._itl = clock.itl
        self._last = clock.last_token_at(0)
        self._json_texts = _JSON_TEXTS.setdefault(tokenizer, {})

    def push(self, token_id: int, now: float) -> bool:
        """Take a token, if its text is known and has no incomplete character."""
        text = self._json_texts.get(token_id)
        if text is None:
            known = self._tokenizer.whole_texts.get(token_id)
            if known is None or token_id in self._tokenizer.special_ids:
                return False
            text = orjson.dumps(known)
            self._json_texts[token_id] = text
        token_ids = self._token_ids
        token_ids.append(token_id)
        self._itl.observe(now - self._last)
        self._last = now
        if len(token_ids) - self._num_counted >= _COUNTED_TOGETHER:
            self._count()
        self._unsent += b"%x\r\n%b%b%b\r\n" % (self._frame_size + len(text), self._prefix, text, self._suffix)
        return True

    def flush(self) -> None:
        """Send the events of this turn."""
        unsent = self._unsent
        self._unsent = b""
        if unsent:
            self._write(unsent)

    def close(self) -> None:
        """Send and count everything that was taken."""
        self.flush()
        self._count()

    def _count(self) -> None:
        if count := len(self._token_ids) - self._num_counted:
            self._num_counted += count
            self._clock.add_measured(0, count, self._last)
            self._count_tokens(count)


class EventStream:
    """The formatter of streamed answers; created like :class:`WholeAnswer`.

    Everything that is the same for all events is encoded once; per event the text is encoded and concatenated.
    """

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        self._request = request
        self._prepared = prepared
        self._writer = LogprobWriter(prepared[0].text_model.tokenizer, as_ids=request.tokens_as_ids)
        self._tokens = 0
        self._cached = [0] * len(prepared)
        self._drafts: list[Drafts] = [(0, 0)] * len(prepared)
        head = {
            "id": ident,
            "object": "chat.completion.chunk" if request.chat else "text_completion",
            "created": created,
            "model": prepared[0].info.name,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        before_text = b',"delta":{"content":' if request.chat else b',"text":'
        indices = range(request.n * len(prepared))
        self._before_text = [self._head + b'{"index":%d' % index + before_text for index in indices]
        self._after_text = b'},"logprobs":' if request.chat else b',"logprobs":'
        # With include_usage every event has the field: null up to the last one.
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        suffix = self._after_text + b'null,"finish_reason":null}' + self._tail
        self._after_plain = _SUFFIXES.setdefault(suffix, suffix)
        self._is_plain = not (
            request.logprobs or request.return_token_ids or request.continuous_usage or request.score_only
        )
        """Whether the event of a plain chunk is its text between a prefix and a suffix that never change."""
        self._begun = [False] * len(prepared)
        self._echo_chars = [0] * len(prepared)

    def add(self, chunk: TextChunk) -> bytes:
        """Return the events for a chunk; empty if there is nothing to send yet."""
        request = self._request
        at = chunk.prompt_index
        if chunk.plain and self._is_plain:
            (delta,) = chunk.deltas
            self._tokens += len(delta.token_ids)
            if not delta.text:
                return b""
            return self._before_text[at * request.n + delta.index] + orjson.dumps(delta.text) + self._after_plain
        if chunk.trace is not None:
            self._cached[at] = chunk.cached_tokens
            self._drafts[at] = chunk.trace.drafted_tokens, chunk.trace.accepted_tokens
        continuous = request.continuous_usage
        if continuous:
            self._tail = self._with_usage() + b"}\n\n"
        events = []
        if not self._begun[at]:
            self._begun[at] = True
            events += self._begin(at, chunk.prompt_logprobs)
        by_token = request.logprobs or request.return_token_ids
        for delta in chunk.deltas:
            if request.score_only:
                if delta.finish_reason is not None:
                    events.append(self._piece(at, TextDelta(delta.index, "", [], finish_reason=FinishReason.LENGTH)))
                continue
            self._tokens += len(delta.token_ids)
            if continuous:
                self._tail = self._with_usage() + b"}\n\n"
            if delta.text or delta.finish_reason or (delta.token_ids and by_token):
                events.append(self._piece(at, delta))
        return b"".join(events)

    def token_writer(
        self,
        write: Callable[[bytes], None],
        token_ids: list[int],
        clock: GenerationClock,
        count_tokens: Callable[[int], None],
    ) -> EventWriter | None:
        """Return a writer for the tokens of an answer of one sequence; ``None`` if their events vary.

        Args:
            write: Sends bytes that are encoded as HTTP chunks.
            token_ids: Tokens of the sequence so far; the writer appends those that it takes.
            clock: Clock of the generation; its first token must have been counted.
            count_tokens: Called now and then with the number of tokens taken since the last call.
        """
        if not self._is_plain or len(self._before_text) > 1:
            return None

        def count(tokens: int) -> None:
            self._tokens += tokens
            count_tokens(tokens)

        tokenizer = self._prepared[0].text_model.tokenizer
        return EventWriter(self._before_text[0], self._after_plain, write, tokenizer, token_ids, clock, count)

    def end(self) -> bytes:
        """Return the events that end a stream."""
        if not self._request.include_usage:
            return DONE
        return self._head + self._with_usage() + b"}\n\n" + DONE

    def _with_usage(self) -> bytes:
        usage = usage_object(self._prepared, self._tokens, sum(self._cached), self._drafts)
        return b'],"usage":' + orjson.dumps(usage)

    def error(self, error: BatonError) -> bytes:
        """Return the event that ends a stream with an error."""
        return b"data: " + orjson.dumps(baton_error_object(error)) + b"\n\n"

    def _begin(self, at: int, prompt_logprobs: list[TokenLogprob | None] | None) -> list[bytes]:
        """Return the events before the text: the role of a chat message, or the echoed prompt."""
        request = self._request
        first: dict[str, Any] = {}
        tail = self._tail
        if request.return_token_ids:
            ids = list(self._prepared[at].routed.prompt_token_ids)
            first["prompt_token_ids"] = ids
            if request.chat:  # also beside the choices, as in an answer in one piece
                tail = b'],"prompt_token_ids":' + orjson.dumps(ids) + tail.removeprefix(b"]")
        if request.chat:
            first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None, **first}
        elif request.echo:
            echo = Echo(self._prepared[at], prompt_logprobs)
            self._echo_chars[at] = len(echo.text)
            logprobs = self._writer.completion(echo.ids, echo.logprobs, echo.offsets) if request.logprobs else None
            first = {"text": echo.text, "logprobs": logprobs, "finish_reason": None, **first}
        elif first:
            first = {"text": "", "logprobs": None, "finish_reason": None, **first}
        else:
            return []
        indices = range(at * request.n, (at + 1) * request.n)
        return [self._head + orjson.dumps({"index": index, **first}) + tail for index in indices]

    def _piece(self, at: int, delta: TextDelta) -> bytes:
        request = self._request
        finish = delta.finish_reason
        parts = [
            self._before_text[at * request.n + delta.index],
            orjson.dumps(delta.text),
            self._after_text,
            self._logprobs(at, delta) if request.logprobs else _NULL,
            b',"finish_reason":',
            _NULL if finish is None else b'"%s"' % finish.encode(),
        ]
        if finish is not None:
            parts += (b',"stop_reason":', orjson.dumps(delta.stop_reason))
        if request.return_token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
        parts += (b"}", self._tail)
        return b"".join(parts)

    def _logprobs(self, at: int, delta: TextDelta) -> bytes:
        if self._request.chat:
            return orjson.dumps({"content": self._writer.chat(delta.logprobs), "refusal": None})
        offsets = [self._echo_chars[at] + offset for offset in delta.offsets]
        return orjson.dumps(self._writer.completion(delta.token_ids, delta.logprobs, offsets))


TOOL_CALLS = "tool_calls"
"""Why a sequence ended that the model ended with calls."""


Formatter: TypeAlias = type[WholeAnswer] | type[EventStream]


def chat_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    """Return the formatter of a chat request."""
    if prepared[0].parser() is not None:
        return MessageEvents if request.stream else WholeMessage
    return plain_formatter(request, prepared)


def plain_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    """Return what writes an answer that is text alone."""
    return EventStream if request.stream else WholeAnswer


class WholeMessage(WholeAnswer):
    """The formatter of answers in one piece; made as :class:`WholeAnswer`."""

    __slots__ = ()

    def _chat_choice(self, at: int, index: int, choice: Choice) -> dict[str, Any]:
        out = super()._chat_choice(at, index, choice)
        events = parse_delta(self._prepared[at].parser(), choice.whole())
        message = out["message"] = message_of(events, reasoning=self._request.reasoning)
        if TOOL_CALLS in message and choice.finish_reason == FinishReason.STOP:
            out["finish_reason"] = TOOL_CALLS
        return out


def message_of(events: Sequence[Event], *, reasoning: bool) -> dict[str, Any]:
    """Return the chat message of an answer.

    Args:
        events: All parser events of the answer.
        reasoning: Whether the message includes the reasoning.
    """
    content = []
    thoughts = []
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Text():
                content.append(event.text)
            case Reasoning():
                thoughts.append(event.text)
            case CallStart():
                calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
            case CallArguments():
                calls[event.index]["function"]["arguments"] += event.text
    text = "".join(content)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thoughts and reasoning:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def parse_delta(parser: DialectParser | None, delta: TextDelta) -> list[Event]:
    """Return the events of more text of a sequence.

    Args:
        parser: Parser of the sequence's calls and reasoning; ``None``: all of it is text.
        delta: The text, possibly empty; the last one has a finish reason.
    """
    if parser is None:
        return [Text(delta.text)] if delta.text else []
    events = parser.feed(delta.text, delta.anchors)
    return events if delta.finish_reason is None else [*events, *parser.finish()]


def reasoning_tokens(prepared: PreparedRequest, thoughts: str) -> int:
    """Return how many tokens the text of an answer's reasoning has."""
    return len(prepared.text_model.tokenizer.encode(thoughts, False)) if thoughts else 0


class MessageEvents(EventStream):
    """The formatter of streamed chats with calls or reasoning.

    Once the rest of a sequence is plain text, it is written as by :class:`EventStream`.
    """

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._parsers: list[DialectParser | None] = [prepared[0].parser() for _ in range(request.n)]
        self._when_plain = self._is_plain
        self._is_plain = self._is_plain and not any(self._parsers)

    def _piece(self, at: int, delta: TextDelta) -> bytes:
        parser = self._parsers[delta.index]
        if parser is None:
            return super()._piece(at, delta)
        finish: str | None = delta.finish_reason
        events = parse_delta(parser, delta)
        if finish is not None:
            if parser.calls and finish == FinishReason.STOP:
                finish = TOOL_CALLS
        elif parser.plain:
            self._parsers[delta.index] = None
            self._is_plain = self._when_plain and not any(self._parsers)
        changes = [change for event in events if (change := self._change(event)) is not None]
        request = self._request
        if finish is not None:
            changes.append({})
        elif not changes and delta.token_ids and (request.logprobs or request.return_token_ids):
            changes.append({"content": ""})
        pieces = []
        for place, change in enumerate(changes):
            piece: dict[str, Any] = {"index": delta.index, "delta": change, "logprobs": None, "finish_reason": None}
            if place == 0 and request.logprobs:
                piece["logprobs"] = orjson.Fragment(self._logprobs(at, delta))
            if place == len(changes) - 1 and finish is not None:
                piece["finish_reason"] = finish
                piece["stop_reason"] = delta.stop_reason
            if place == 0 and request.return_token_ids:
                piece["token_ids"] = delta.token_ids
            pieces.append(self._head + orjson.dumps(piece) + self._tail)
        return b"".join(pieces)

    def _change(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text():
                return {"content": event.text}
            case Reasoning() if self._request.reasoning:
                return {"reasoning": event.text, "reasoning_content": event.text}
            case CallStart():
                function = {"name": event.name, "arguments": ""}
                return {TOOL_CALLS: [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
            case CallArguments():
                return {TOOL_CALLS: [{"index": event.index, "function": {"arguments": event.text}}]}
        return None
