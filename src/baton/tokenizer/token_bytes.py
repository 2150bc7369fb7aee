"""From token to bytes, for the tokenizers whose text is the concatenation of their tokens' bytes.

Two families cover nearly every model served today. *Byte-level* BPE (GPT-2, Llama 3, Qwen, GPT-OSS) writes each byte as
one printable character. *SentencePiece* with byte fallback (Llama 2, Mistral, Gemma) writes a space as ``▁`` and a byte
that no token covers as ``<0x0A>``, and drops one space at the start of a text. For both, decoding is a table look-up
and one UTF-8 decoder, which is exact, incremental and several times cheaper than decoding a window of tokens again
and again. Anything else returns ``None`` from :func:`byte_scheme` and is decoded by the general way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteScheme:
    """How tokens become bytes.

    Attributes:
        to_bytes: From a token as the vocabulary spells it to its bytes.
        strip_start: Spaces dropped at the start of a text.
        byte_fallback: Whether single bytes are tokens of their own beside ordinary ones (SentencePiece).
    """

    to_bytes: Callable[[str], bytes]
    strip_start: int = 0
    byte_fallback: bool = False


def byte_scheme(decoder: dict[str, Any] | None) -> ByteScheme | None:
    """Return the scheme of a ``tokenizer.json``'s decoder section, or ``None`` if it has none.

    Args:
        decoder: The ``decoder`` object.
    """
    if decoder is None:
        return None
    steps = list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return ByteScheme(_byte_level())
    strip_start = 0
    if steps and steps[-1].get("type") == "Strip":
        last = steps.pop()
        if last.get("content") != " " or last.get("stop") != 0:
            return None
        strip_start = int(last.get("start", 0))
    plain = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return ByteScheme(_sentencepiece, strip_start, byte_fallback=True) if steps == plain else None


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes((int(match[1], 16),)) if match else token.replace("▁", " ").encode()


def byte_level_chars() -> str:
    """Return GPT-2's alphabet: the printable character that byte-level tokenizers write each byte as."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(hidden)) for byte in range(256))


def _byte_level() -> Callable[[str], bytes]:
    """Return the inverse of GPT-2's mapping of bytes to printable characters."""
    table = {char: byte for byte, char in enumerate(byte_level_chars())}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([table[char] for char in token])
        except KeyError:
            # An added token with a character outside the alphabet, such as a space, stands for itself.
            return token.encode()

    return to_bytes
