"""Types that every part of Baton shares: identifiers, roles, sampling parameters."""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from baton.errors import InvalidRequestError, shown

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
Epoch = NewType("Epoch", bytes)
"""16 random bytes, drawn once per process: tells a restarted instance from the one before."""

BACKGROUND_PRIORITY = 2**30
"""Priority from which on a request is a background request: it runs in capacity that no other request needs, and gives
way on the instances whatever their policy is."""
MAX_LOGPROBS = 20
MAX_N = 128
MAX_SPECULATIVE_TOKENS = 16
MAX_SPECULATIVE_WIDTH = 8
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_START_TOKEN_IDS = 64


_TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of blocks, as the router authenticated it.

    Attributes:
        id: 1 to 64 letters, digits, ``_``, ``.`` and ``-``.
        kv_bytes: That its blocks may take in a KV store's memory; 0: the store's own default.
        kv_disk_bytes: On a KV store's disk.
    """

    id: str
    kv_bytes: int = 0
    kv_disk_bytes: int = 0

    def __post_init__(self) -> None:
        if not _TENANT_ID.fullmatch(self.id):
            message = f"a tenant's id has 1 to 64 letters, digits, '_', '.' and '-', not {shown(self.id)}"
            raise InvalidRequestError(message, field="tenant.id")
        for name in ("kv_bytes", "kv_disk_bytes"):
            if not 0 <= getattr(self, name) < 2**63:
                raise InvalidRequestError(f"{name} must fit into 63 bits", field=f"tenant.{name}")


class Role(enum.StrEnum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"


ORDER_HEADER = "x-baton-order"
"""Says, as HTTP header or in the metadata of ``RouterService.Generate``, in which order a request is to be served."""


class Order(enum.StrEnum):
    """Which instance a request is sent to first."""

    DECODE_FIRST = "decode_first"
    """The decode instance, which has a prefill instance compute the prompt."""
    PREFILL_FIRST = "prefill_first"
    """A prefill instance; the decode instance is chosen when the prompt is computed, and claims its KV."""

    @classmethod
    def parse(cls, field: str, text: str) -> Order:
        """Read an order by its name.

        Raises:
            InvalidRequestError: There is none of this name; names ``field``.
        """
        if text not in list(cls):
            raise InvalidRequestError(f"{field} must be {' or '.join(cls)}, got {shown(text)}", field=field)
        return cls(text)


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class PrefillPath(enum.StrEnum):
    """Where the KV of a prompt came from."""

    LOCAL = "local"
    REMOTE = "remote"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities (natural log, of the unscaled distribution after penalties and bias) of one token."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


_GRAMMAR_KIND = re.compile(r"[a-z_]{0,32}")


@dataclass(frozen=True)
class Grammar:
    """What an answer must be, in the one form that instances know; :mod:`baton.grammar` makes it of schemas and others.

    Attributes:
        kind: What it was made of, for metrics and people: ``json_schema``, ``regex``, ...
        text: llguidance's grammar: Lark, or JSON with several grammars.
        start_token_ids: It applies to what follows these tokens in the output (the end of reasoning); empty: to all.
    """

    kind: str
    text: str
    start_token_ids: tuple[int, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the text, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __str__(self) -> str:
        """Kind and digest: what logs and traces show."""
        return f"{self.kind} sha256:{self.digest[:12]}"

    def validate(self, *, vocab_size: int | None = None, field: str = "grammar") -> None:
        """Check the sizes; what the text says is checked by who compiles it.

        Raises:
            InvalidRequestError: The kind is no name, the text is none or too long, or a token id is not in the
                vocabulary; names ``field``.
        """
        if not _GRAMMAR_KIND.fullmatch(self.kind):
            raise InvalidRequestError(
                f"{field}.kind must be at most 32 small letters and '_', got {shown(self.kind)}", field=field
            )
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{field} has lone surrogates", field=field) from error
        if not 0 < size <= MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(f"{field} must have 1 to {MAX_GRAMMAR_BYTES} bytes, got {size}", field=field)
        tokens = self.start_token_ids
        wrong = [token for token in tokens if token < 0 or (vocab_size is not None and token >= vocab_size)]
        if wrong or len(tokens) > MAX_START_TOKEN_IDS:
            message = f"{field}.start_token_ids must be at most {MAX_START_TOKEN_IDS} ids of the vocabulary"
            raise InvalidRequestError(message, field=f"{field}.start_token_ids")


@dataclass(slots=True)  # not frozen: a frozen one takes six times as long to make, and requests make two
class SamplingParams:
    """How tokens are chosen; the same fields, defaults and meaning everywhere. Requests may share one: change a copy.

    Raises:
        InvalidRequestError: From :meth:`validate`, naming the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Stop strings; workers never see them, they are applied where the tokenizer is."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    """What the answer must be; a token that it forbids has probability 0."""
    speculative_tokens: int | None = None
    """Draft tokens per step at most, no more than the instance has; 0: none. It changes no token of the answer."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    def copy(self) -> SamplingParams:
        """Return a copy, which may be changed."""
        return SamplingParams(*_FIELD_VALUES(self))

    def replace(self, **changes: object) -> SamplingParams:
        """Return a copy with some fields changed."""
        copy = self.copy()
        for name, value in changes.items():
            if name not in SamplingParams.__slots__:
                raise TypeError(f"there is no {name}")
            setattr(copy, name, value)
        return copy

    def validate(self, *, vocab_size: int | None = None, prefix: str = "") -> None:
        """Check every field's range.

        Args:
            vocab_size: Token ids must be below it, if given.
            prefix: Put before field names in errors, e.g. ``"sampling."``.

        Raises:
            InvalidRequestError: Names the first field that is out of range.
        """
        for (name, low, high, what), value in zip(RANGES, _RANGED_VALUES(self), strict=True):
            if value is not None and not low <= value <= high:
                raise _out_of_range(name, what, value, prefix)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _out_of_range("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens, prefix)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _out_of_range("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", self.stop_token_ids, prefix)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _out_of_range("logit_bias", f"at most {MAX_LOGIT_BIAS} entries", self.logit_bias, prefix)
        for token, bias in self.logit_bias.items():
            ok = token >= 0 and (vocab_size is None or token < vocab_size) and -100.0 <= bias <= 100.0
            if not ok:
                raise InvalidRequestError(
                    f"logit_bias of token {token} is {bias!r}: the id must be a known token, the bias in [-100, 100]",
                    field=f"{prefix}logit_bias",
                )
        for token in self.stop_token_ids:
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise InvalidRequestError(
                    f"stop_token_ids has {token}, which is not in the vocabulary", field=f"{prefix}stop_token_ids"
                )
        if self.grammar is not None:
            self.grammar.validate(vocab_size=vocab_size, field=f"{prefix}grammar")


def _out_of_range(name: str, what: str, value: object, prefix: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {what}, got {shown(value)}", field=prefix + name)


_FIELD_VALUES = operator.attrgetter(*SamplingParams.__slots__)
_ABOVE_0 = math.nextafter(0.0, 1.0)
RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 1, math.inf, "at least 1"),
    ("min_tokens", 0, math.inf, "at least 0"),
    ("temperature", 0.0, 100.0, "between 0 and 100"),
    ("top_p", _ABOVE_0, 1.0, "above 0 and at most 1"),
    ("top_k", -1, math.inf, "-1, 0 or positive"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("repetition_penalty", 0.01, 100.0, "between 0.01 and 100"),
    ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
    ("seed", 0, 2**64 - 1, "between 0 and 2^64 - 1"),
    ("logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    ("speculative_tokens", 0, MAX_SPECULATIVE_TOKENS, f"between 0 and {MAX_SPECULATIVE_TOKENS}"),
    ("n", 1, MAX_N, f"between 1 and {MAX_N}"),
)
"""Fields of :class:`SamplingParams` that are numbers: least and greatest value, and what errors say."""
_RANGED_VALUES = operator.attrgetter(*(name for name, *_ in RANGES))
