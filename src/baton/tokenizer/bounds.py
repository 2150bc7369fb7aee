"""How few tokens a text can have: lets a text that cannot fit be refused before the work of tokenizing it is done."""

from __future__ import annotations

from typing import Any

from baton.tokenizer.token_bytes import byte_level_chars

_COMPOSED = 4
"""Characters that composition (NFC) makes one of, at most: a base and three marks, or three Hangul letters."""


def most_chars_per_token(tokenizer: dict[str, Any], vocab: list[str]) -> int | None:
    """Return how many characters of a text one token stands for, at most.

    Args:
        tokenizer: A ``tokenizer.json``.
        vocab: Every token as the vocabulary spells it, which takes at least a character per character of text.

    Returns:
        The bound, or ``None`` where some step may drop or merge any number of characters.
    """
    model = tokenizer.get("model") or {}
    normalized = _most_normalized(tokenizer.get("normalizer"))
    if normalized is None or model.get("type") != "BPE" or not vocab:
        return None
    if not _keeps_text(tokenizer.get("pre_tokenizer")) or not _covers_every_byte(model, tokenizer, set(vocab)):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in tokenizer.get("added_tokens") or ()):
        return None  # such a token takes all the white space beside it
    return normalized * max(map(len, vocab))


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part.get(key, ())) if part.get("type") == "Sequence" else [part]


def _most_normalized(normalizer: dict[str, Any] | None) -> int | None:
    """Return how many characters a normalizer makes one of, at most; ``None``: any number."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        kind, pattern = step.get("type"), (step.get("pattern") or {}).get("String")
        if kind == "NFC":
            most *= _COMPOSED
        elif kind == "Replace" and pattern and step.get("content"):
            most *= len(pattern)
        elif kind != "Prepend":
            return None
    return most


def _keeps_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    steps = _steps(pre_tokenizer, "pretokenizers")
    return all(
        step.get("type") in {"ByteLevel", "Metaspace", "Digits"}
        or (step.get("type") == "Split" and step.get("behavior") != "Removed")
        for step in steps
    )


def _covers_every_byte(model: dict[str, Any], tokenizer: dict[str, Any], vocab: set[str]) -> bool:
    """Whether no character can be unknown: unknown ones are dropped, or many of them become one token."""
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    return any(step.get("type") == "ByteLevel" for step in steps) and vocab.issuperset(byte_level_chars())
