"""Whether a grammar can be compiled, and what its first steps cost: found out without the model's tokenizer.

A trial over a tokenizer of bytes generates a few of them, so that grammars which no text satisfies, or whose masks cost
too much, are refused before a request is placed. What the real vocabulary adds is bounded by :data:`LIMITS`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Iterator

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from baton.errors import InvalidRequestError
from baton.types import Grammar

MAX_PARTS = 20_000
"""Of an expression whose repeats of groups are written out."""

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\{(?P<low>\d*+)(?P<to>,?+)(?P<high>\d*+)\}|.", re.DOTALL)
"""Each takes its length in time, whatever comes: a class that is not closed goes on to the end."""


def check_repeats(pattern: str, field: str) -> None:
    """Refuse an expression that has too many parts.

    Raises:
        InvalidRequestError: Names ``field``.
    """
    if count_parts(pattern) > MAX_PARTS:
        raise InvalidRequestError(
            f"{field}: the repeats of this regular expression make more than {MAX_PARTS} parts of it", field=field
        )


def count_parts(pattern: str) -> int:
    """Return the number of parts, repeats of groups written out; broken expressions are counted somehow."""
    groups = [(0, 0)]  # per open group its parts, and those that it has where it is repeated
    parts = 0  # of the piece before: what a repeat would repeat
    written = 0
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if piece == "(":
            groups.append((0, 0))
            continue
        if piece == ")":
            parts, written = groups.pop() if len(groups) > 1 else (0, 0)
        elif match["low"] is not None and (match["low"] or match["high"]):
            times = max(int(match["low"][:9] or 0), int(match["high"][:9] or 0), 1)
            _add(groups, -parts, -written)
            parts, written = (1, times) if written == 1 else (written * times, written * times)
        elif piece in "?*+|^$":
            continue
        else:
            parts = written = 1
        _add(groups, parts, written)
    return sum(parts for parts, _ in groups)


def _add(groups: list[tuple[int, int]], parts: int, written: int) -> None:
    before = groups[-1]
    groups[-1] = before[0] + parts, before[1] + written


LIMITS = LLParserLimits(
    max_grammar_size=200_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
"""Of the work and memory of one grammar, at compilation and per step."""
MAX_TRIAL_S = 0.3
"""CPU time that compilation and trial may take."""
TRIAL_BYTES = 12

_PART = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*+|/(?P<regex>(?:\\.|[^/\\\n])++)/?')
"""A string, a comment or a regular expression of a Lark grammar."""
_EOS = 256
_ONE_OF = re.compile("oneOf constraints are not supported.*")
"""What the compiler says of alternatives that may overlap; it goes on with an option that requests do not have."""
_TOKEN_IDS = "<["
_UNKNOWN_TOKEN = "unknown special token"
_SPECIAL = "can't validate <special_token>"
"""How tokens are written by their ids, and what the compiler says of those by name: with a tokenizer, and without."""


def check_grammar(grammar: Grammar, field: str) -> Grammar:
    """Return a grammar if it can be compiled, satisfied and afforded.

    Releases the interpreter's lock while it compiles.

    Args:
        grammar: A grammar in the normal form.
        field: Name of the request field, for errors.

    Raises:
        InvalidRequestError: It cannot; names ``field`` and, where the compiler says it, the place.
    """
    grammar.validate(field=field)
    started = time.thread_time()
    if grammar.kind in ("regex", "grammar", "structural_tag"):
        for match in _PART.finditer(grammar.text):
            check_repeats(match["regex"] or "", field)
    with _panics_refused(field):
        matcher = LLMatcher(_bytes_tokenizer(), grammar.text, log_level=0, limits=LIMITS)
        if (_TOKEN_IDS in grammar.text or _UNKNOWN_TOKEN in matcher.get_error()) and _has_tokens(grammar, field):
            return grammar
        unsupported = matcher.get_grammar_warnings()
        if unsupported and not matcher.is_error():
            raise InvalidRequestError(f"{field}: {plain_error(unsupported[0])}", field=field)
        _try(matcher, field, started)
    return grammar


def _has_tokens(grammar: Grammar, field: str) -> bool:
    """Tell whether a grammar names special tokens of the model, which bytes have none of; check it if it does."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar.text, limits=LIMITS)
    unknown = [message for message in messages if _SPECIAL not in message]
    if failed or unknown:
        raise InvalidRequestError(f"{field}: {plain_error(unknown[0])}", field=field)
    return bool(messages)


@contextlib.contextmanager
def _panics_refused(field: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's; its class cannot be imported
            raise
        raise InvalidRequestError(f"{field}: the compiler of grammars cannot read it", field=field) from error


def _try(matcher: LLMatcher, field: str, started: float) -> None:
    for _ in range(TRIAL_BYTES):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << _EOS) - 1)
        if time.thread_time() - started > MAX_TRIAL_S:
            raise InvalidRequestError(f"{field} costs too much: a step of it takes too long", field=field)
        if not mask:
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    if matcher.is_error():
        error = matcher.get_error()
        reason = "no text satisfies it" if error.startswith("NoExtension") else plain_error(error)
        raise InvalidRequestError(f"{field}: {reason}", field=field)


def plain_error(message: str) -> str:
    """Return a compiler's message in few lines, without its state."""
    message = message.partition("<state>")[0].partition("<non-verbose/>")[0]
    message = _ONE_OF.sub("only alternatives of oneOf that visibly exclude each other are supported", message)
    return message.strip().replace("\n", " | ")[:400]


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(_EOS)), b"<eos>")
    special_token_ids = (_EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
