"""A model's tokenizer, from its ``tokenizer.json`` alone; its text side as one thing, and a cache of that."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from baton.errors import ConfigError, InvalidRequestError
from baton.token_ids import TokenIds
from baton.tokenizer.chat_template import ChatTemplate
from baton.tokenizer.control_tokens import ControlTokens, Hidden
from baton.tokenizer.generation_config import sampling_defaults
from baton.tokenizer.model_files import (
    ByteScheme,
    byte_scheme,
    model_directory,
    most_chars_per_token,
    read_file,
    read_json,
    token_content,
)

if TYPE_CHECKING:
    import fastokens

log = logging.getLogger(__name__)

_PROSE = (
    "It's WE'LL don't, of  two\twords (and More) x y  z1 a\tb c\n d e-f\r\n\r\n  g_h iJ Kl 3 12345 n4 o... !? "
    "\n\n  \v\f /a\n/ \u00e4\u00df\u4e2d\u6587 \u0663\u2163 \u00a0\u3000'\u017f \U0001f600 \u01c5"
)
"""What split rules differ on: contractions, runs of digits, case, kinds of white space, letters of other scripts."""
_TEXTS = (
    "",
    " ",
    "a",
    " a",
    "a ",
    "\n",
    "\x00\x01\x1c\x7f\x85\u2028\ufeff\ufffd",
    _PROSE,
    "def f(x):\n    return [x ** 2 for x in range(10)]  # squares\n\n\nclass C:\n\tpass\n",
    '{"name": "get_weather", "arguments": {"city": "Z\u00fcrich", "days": [1, 22, 333, 4444]}}',
    "e\u0301 \u1112\u1161\u11ab \u212b \u2126 q\u0323\u0307 \ufb01 \u0958",  # what normalization changes
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ed \u2764\ufe0f \U000e0041",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u05e2\u05d1\u05e8\u05d9\u05ea "
    "\u0627\u0644\u0639\u0631\u0628 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u041f\u0440\u0438\u0432\u0435\u0442",
    "\u2581 \u2581a <0x0A> \u0120 </s> <s>",  # spelt as vocabularies spell
    "x" * 3000,
    " " * 1000 + "a" + "\n" * 300,
    "\u4e2d" * 700,
    "0123456789" * 30,
    "-" * 100 + "=" * 33 + "." * 17,
    "".join(chr(97 + at * at % 26) for at in range(500)),
)
_CHARACTERS = (*range(0, 0x3000, 7), *range(0x3000, 0xD800, 509), *range(0xE000, 0x110000, 509))
_CHARACTERS_PER_TEXT = 512
_MAX_ADDED = 256
_MAX_VOCABULARY = 2048


class FastEncoder:
    """A ``fastokens`` tokenizer that gave the library's ids for every text of the probe. Safe to use from threads.

    Attributes:
        failures: Texts that it could not tokenize.
    """

    def __init__(self, fast: fastokens.Tokenizer) -> None:
        self._fast = fast
        self.failures = 0

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds | None:
        """Return the ids of a text; ``None``: it fails, and the library must do it. Releases the GIL meanwhile.

        Raises:
            UnicodeEncodeError: The text has a lone surrogate.
        """
        try:
            data, _ = self._fast.encode_batch_flat([text], add_special_tokens)
        except UnicodeEncodeError:
            raise
        except BaseException as error:
            if not _failed(error):
                raise
            self.failures += 1
            # Such as a split rule that takes more steps than its regular expression may; clients could flood the log.
            level = logging.WARNING if self.failures == 1 else logging.DEBUG
            log.log(level, "a text of %d characters is tokenized by tokenizers: %s", len(text), error)
            return None
        ids = array("I")
        ids.frombytes(data)
        return ids


def fast_encoder(backend: tokenizers.Tokenizer, parts: dict[str, Any]) -> FastEncoder | None:
    """Return the fast twin of a tokenizer, or ``None`` where there is none.

    Args:
        backend: The tokenizer, without truncation and padding.
        parts: Content of ``tokenizer.json``.
    """
    try:
        fast = _load(backend.to_str())
        differs = first_difference(backend, fast, parts)
    except ImportError:
        log.info("the tokenizer runs on tokenizers: fastokens is not installed")
        return None
    except BaseException as error:
        if not _failed(error):
            raise
        log.info("the tokenizer runs on tokenizers: fastokens does not take it (%s)", error)
        return None
    if differs is not None:
        log.warning("the tokenizer runs on tokenizers: fastokens gives other ids for %.80r", differs)
        return None
    log.info("the tokenizer runs on fastokens")
    return FastEncoder(fast)


def _load(content: str) -> fastokens.Tokenizer:
    """Load the content of a ``tokenizer.json``.

    Raises:
        ImportError: ``fastokens`` is not installed.
        ValueError: It does not implement this tokenizer.
    """
    from fastokens import Tokenizer

    fast = Tokenizer.from_json_str(content)
    fast.enable_segment_cache(0)
    return fast


def _failed(error: BaseException) -> bool:
    """Whether the library failed: a Rust panic arrives as an exception that is not an ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def first_difference(backend: tokenizers.Tokenizer, fast: fastokens.Tokenizer, parts: dict[str, Any]) -> str | None:
    """Return a text for which two tokenizers give different ids; ``None``: no text of the probe is one."""
    probe = [(False, list(probe_texts(parts))), (True, list(_TEXTS[:4]))]  # what is added does not depend on the text
    for special, texts in probe:
        expected = backend.encode_batch_fast(texts, add_special_tokens=special)
        for text, encoding in zip(texts, expected, strict=True):
            if fast.encode(text, special).ids != encoding.ids:
                return text
    return None


def probe_texts(parts: dict[str, Any]) -> Iterator[str]:
    """Yield the texts that two tokenizers are compared on: always the same for a ``tokenizer.json``."""
    yield from _TEXTS
    for at in range(0, len(_CHARACTERS), _CHARACTERS_PER_TEXT):
        yield "".join(f"a{chr(code)}b {chr(code)}1\n" for code in _CHARACTERS[at : at + _CHARACTERS_PER_TEXT])
    for token in islice(parts.get("added_tokens") or (), _MAX_ADDED):
        content = token["content"]
        yield f"a {content} b{content}{content}\n{content.upper()}{content[:-1]} {content}"
    vocabulary = (parts.get("model") or {}).get("vocab") or ()
    words = list(vocabulary)[:: 1 + len(vocabulary) // _MAX_VOCABULARY] if isinstance(vocabulary, dict) else []
    for at in range(0, len(words), 64):
        yield "".join(words[at : at + 64]).replace("\u0120", " ").replace("\u2581", " ").replace("\u010a", "\n")


_SHORT_CHARS = 1024
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    Attributes:
        vocab_size: Ids are below it, as far as the tokenizer knows; a model may have more (padded embeddings).
        special_ids: Ids that are left out of decoded text unless asked for.
        marker_ids: Ids of added tokens that grammars know as tokens, and not by their text: special ones, and those in
            angle brackets whether they are special (``<tool_call>`` of Qwen's is not) or not.
        special_tokens: Named special tokens (``bos_token`` and so on), as chat templates want them.
        eos_token_ids: Ids that end a text, by ``generation_config.json``, else by the named end token.
        encoder: What makes ids of text: ``fastokens``, or ``tokenizers`` where that cannot or gives other ids.
        scheme: How tokens become bytes, or ``None`` where only the library's way of decoding is right.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: frozenset[int] | None = None,
    ) -> None:
        """Wrap a tokenizer of the ``tokenizers`` library, whose truncation and padding are switched off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        bracketed = (i for i, token in added.items() if token.content.startswith("<") and token.content.endswith(">"))
        self.marker_ids = self.special_ids.union(bracketed)
        eos = self.token_id(self.special_tokens.get("eos_token"))
        self.eos_token_ids = eos_token_ids or frozenset(() if eos is None else (eos,))
        parts = json.loads(backend.to_str())
        self.scheme: ByteScheme | None = byte_scheme(parts.get("decoder"))
        self._most_chars = most_chars_per_token(parts, list(backend.get_vocab(with_added_tokens=True)))
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}
        """Of ids whose bytes are whole characters, as far as they were met; a look takes 0.1 us, decoding 0.3."""
        self._fast = fast_encoder(backend, parts)
        self.encoder = "tokenizers" if self._fast is None else "fastokens"

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a model's directory, GGUF file or hub name.

        Args:
            path: A directory with ``tokenizer.json``, a GGUF file, or a hub name such as ``org/name``.

        Raises:
            ConfigError: No such model, or a file of it that cannot be read.
        """
        directory = model_directory(path)
        file = directory / "tokenizer.json"
        content = read_file(file)
        if content is None:
            raise ConfigError(
                f"{directory} has no tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})",
                field="model",
            )
        try:
            backend = tokenizers.Tokenizer.from_buffer(content)
        except BaseException as error:
            if not _failed(error):
                raise
            raise ConfigError(f"{file} cannot be read: {error}", field="model") from error
        named = _named_tokens(directory)
        return cls(backend, special_tokens=named, eos_token_ids=_configured_eos(directory))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; see :meth:`encode_array`."""
        return self.encode_array(text, add_special_tokens).tolist()

    def encode_array(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Return the ids of a text. Releases the GIL while it works on a long one.

        Args:
            text: Special tokens in it are recognized by their names.
            add_special_tokens: Let the post-processor add what it adds, mostly the begin token.

        Raises:
            InvalidRequestError: The text has a lone surrogate, which is no character, or the tokenizer fails on it.
        """
        try:
            if self._fast is not None:
                ids = self._fast.encode(text, add_special_tokens)
                if ids is not None:
                    return ids
            if len(text) <= _SHORT_CHARS:
                return array("I", self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            # The batch call without offsets takes half the time of encode() and gives up the GIL, which encode() does
            # not; but it goes through a thread pool, which costs more than a short text does.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # fastokens raises the first, tokenizers the second
            message = "the text has a lone surrogate, which is no character"
            raise InvalidRequestError(message, field="prompt") from error
        except BaseException as error:
            if not _failed(error):
                raise
            # Such as a split rule that takes more steps than its regular expression may.
            raise InvalidRequestError(f"the model's tokenizer fails on the text: {error}", field="prompt") from error
        return array("I", encoding.ids)

    def control_tokens(self, template: str) -> ControlTokens:
        """Return what keeps text from becoming control tokens, with a chat template of this source."""
        return ControlTokens(self._backend, template)

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without tokenizing it; 0 if nothing is known."""
        return -(-len(text) // self._most_chars) if self._most_chars else 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids that the tokenizer doesn't know have none, bytes that are no text are U+FFFD."""
        if self.scheme is None or not self.scheme.byte_fallback:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        # The library turns a whole run of byte tokens into U+FFFD if any of it is broken, which no stream that has
        # already delivered the run's good beginning can follow; for text that is well formed there is no difference.
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(item) for item in ids if item not in hidden).decode(errors="replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.scheme.strip_start) :]

    def token_id(self, token: str | None) -> int | None:
        """Return the id of a token as the vocabulary spells it."""
        return None if token is None else self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for an id that the tokenizer doesn't know."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if token_id < self.vocab_size else None
            if token is None:
                return b""
            scheme = self.scheme
            known = scheme.to_bytes(token) if scheme else self.decode([token_id], skip_special_tokens=False).encode()
            self._bytes[token_id] = known  # at most one entry per id of the vocabulary
        return known

    def token_text(self, token_id: int) -> str:
        """Return a token's text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    def bos_token_id(self) -> int | None:
        """The id of the begin token, if the model names one."""
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        """The id of the named end token; :attr:`eos_token_ids` may hold more."""
        return self.token_id(self.special_tokens.get("eos_token"))

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token, if the model names one."""
        return self.token_id(self.special_tokens.get("pad_token"))


def _named_tokens(directory: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_json(directory / file)
        for name in _NAMED_TOKENS:
            content = token_content(values.get(name))
            if content is not None:
                tokens[name] = content
    return tokens


def _configured_eos(directory: Path) -> frozenset[int] | None:
    for file in ("generation_config.json", "config.json"):
        value: Any = read_json(directory / file).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(isinstance(item, int) for item in ids):
            return frozenset(ids)
    return None


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt's text, and which names in it are control tokens.

    Attributes:
        text: As the model is to read it.
        private: The same, with private names for control tokens, where not all names in ``text`` are some.
    """

    text: str
    private: str | None = None


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer and chat template of one model.

    Attributes:
        tokenizer: The model's tokenizer.
        chat_template: The model's chat template; ``None``: it has none.
        config: Content of ``tokenizer_config.json``; empty without one.
        sampling_defaults: Sampling parameters of requests that do not set them, from ``generation_config.json``.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _control: ControlTokens = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        template = self.chat_template.source if self.chat_template is not None else ""
        object.__setattr__(self, "_control", self.tokenizer.control_tokens(template))

    @classmethod
    def load(cls, path: str | Path) -> TextModel:
        """Load from a model's directory, GGUF file or hub name.

        Raises:
            ConfigError: No such model, or a file of it that cannot be read.
        """
        directory = model_directory(path)
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate.load(directory, tokenizer.special_tokens)
        config = read_json(directory / "tokenizer_config.json")
        return cls(tokenizer, template, config, sampling_defaults(directory))

    def prompt_text(self, text: str, *, allow_special_tokens: bool = True) -> PromptText:
        """Return a prompt of a text.

        Args:
            text: The text.
            allow_special_tokens: Names of special tokens in it are such tokens.
        """
        return PromptText(text, None if allow_special_tokens or not self._control.finds(text) else text)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        allow_special_tokens: bool = False,
    ) -> PromptText:
        """Return the prompt of a conversation; see :meth:`ChatTemplate.render`.

        Args:
            messages: The messages.
            add_generation_prompt: End with what begins the assistant's answer.
            continue_final_message: Leave the last message open.
            variables: More names for the template.
            tools: Definitions of the tools that the model may call.
            allow_special_tokens: Names of special tokens in messages are such tokens; else only the template's are.

        Raises:
            InvalidRequestError: The model has no chat template, or that refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError("the model has no chat template: send a prompt instead", field="messages")
        extra = variables or {}
        named = {"tools": tools}
        known = allow_special_tokens or not self._control.in_conversation([*messages, named], extra)
        hidden = None if known else Hidden()
        if hidden is not None:
            messages = [self._control.hide(message, hidden) for message in messages]
            extra = self._control.hide(extra, hidden)
            tools = self._control.hide(named, hidden)["tools"]
        text = self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=extra,
            tools=tools,
        )
        return PromptText(text) if hidden is None else PromptText(*self._control.private(text, hidden))

    def encode(self, prompt: PromptText, add_special_tokens: bool = True) -> TokenIds:
        """Return the ids of a prompt.

        Args:
            prompt: The prompt.
            add_special_tokens: Let the tokenizer add what it adds to a text; a conversation has it already.

        Raises:
            InvalidRequestError: The text has a lone surrogate, which is no character.
        """
        if prompt.private is not None:
            return self._control.encode(prompt.private, add_special_tokens)
        return self.tokenizer.encode_array(prompt.text, add_special_tokens)


class TextModelCache:
    """Loads text models once, off the event loop. For one event loop."""

    def __init__(self, override: str = "", *, capacity: int = 4, generation_config: bool = True) -> None:
        """Begin empty.

        Args:
            override: Load from here, whatever path is asked for: for a router that sees the model's files elsewhere.
            capacity: Models kept; the one not used for longest goes first.
            generation_config: Whether requests get the sampling defaults of models' ``generation_config.json``.
        """
        self._override = override
        self._generation_config = generation_config
        self._capacity = capacity
        self._models: OrderedDict[str, TextModel] = OrderedDict()
        self._loading: dict[str, asyncio.Task[TextModel]] = {}

    async def get(self, path: str) -> TextModel:
        """Return the text model of a path.

        Raises:
            ConfigError: It cannot be loaded; the next call tries again.
        """
        model = self.loaded(path)
        if model is not None:
            return model
        key = self._override or path
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(self._load(key), name=f"load {key}")
            loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        return await asyncio.shield(loading)  # who leaves ends no load: the next one would begin another

    async def _load(self, key: str) -> TextModel:
        try:
            model = await asyncio.to_thread(TextModel.load, key)
            if not self._generation_config:
                model = replace(model, sampling_defaults={})
            elif model.sampling_defaults:
                said = ", ".join(f"{name} {value}" for name, value in model.sampling_defaults.items())
                log.info("%s: requests that set none get the model's own %s (--generation-config)", key, said)
            self._models[key] = model
        finally:
            del self._loading[key]
        while len(self._models) > self._capacity:
            self._models.popitem(last=False)
        return model

    def loaded(self, path: str) -> TextModel | None:
        """Return the text model of a path if it is loaded already."""
        key = self._override or path
        entry = self._models.get(key)
        if entry is not None and len(self._models) > 1:
            self._models.move_to_end(key)
        return entry

    @property
    def num_slow(self) -> int:
        """Loaded tokenizers that run on the ``tokenizers`` library because ``fastokens`` cannot do it."""
        return sum(model.tokenizer.encoder == "tokenizers" for model in self._models.values())
