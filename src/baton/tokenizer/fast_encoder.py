"""Text to token ids by ``fastokens``, where it provably gives the ids that the ``tokenizers`` library gives.

``fastokens`` tokenizes byte-level and SentencePiece BPE ten to twenty times as fast. It refuses tokenizers that it does
not implement (Unigram, WordPiece, Metaspace and so on); one that it accepts is compared with the library on a fixed set
of texts when it is loaded, and is not used if one id differs. Which of the two a tokenizer uses is logged, and
``Tokenizer.encoder`` says it.

Caches: ``fastokens`` remembers the ids of single words (of a text as the split rule cuts it), as ``tokenizers`` does
too, in tables of bounded size per thread. These tables know no tenants. What a tenant can learn from them is little: a
hit saves the merging of one whole word (about a microsecond; more for words of kilobytes), and looking for a word puts
it in, so that every guess can be timed only once. Its opt-in caches of whole texts (segments, common beginnings) would
tell more and stay off.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from baton.token_ids import TokenIds

if TYPE_CHECKING:
    import fastokens
    import tokenizers

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
        parts: Its ``tokenizer.json``.
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
