"""A model's tokenizer files: finding, reading and comparing them, and what ``tokenizer.json`` says about its tokens.

A GGUF file counts as a directory: its files are made from the metadata when they are read.

What ``tokenizer.json`` says is their bytes, and how much text one of them can stand for. Two families cover nearly
every model served today. *Byte-level* BPE (GPT-2, Llama 3, Qwen, GPT-OSS) writes each byte as one printable character.
*SentencePiece* with byte fallback (Llama 2, Mistral, Gemma) writes a space as ``▁`` and a byte that no token covers as
``<0x0A>``, and drops one space at the start of a text. For both, decoding is a table look-up and one UTF-8 decoder,
which is exact, incremental and several times cheaper than decoding a window of tokens again and again.
Anything else has no :class:`ByteScheme` and is decoded by the ``tokenizers`` library.

The most characters of a token bound from below how many tokens a text has, so a text that cannot fit in the context is
refused before it is tokenized.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config.files import open_regular
from baton.errors import ConfigError, shown
from baton.gguf import is_gguf, open_gguf

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MOST_OF = {
    "num_hidden_layers": 4096,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "max_position_embeddings": 1 << 40,
}
"""Largest sizes of a ``config.json``, far above those of any model: beyond, the sizes alone would fill the memory."""
_DIGEST_PARTS = ("added_tokens", "model", "normalizer", "pre_tokenizer")


def model_directory(path: str | Path, files: Sequence[str] = TOKENIZER_FILES) -> Path:
    """Return the local directory of a model, or its GGUF file, which :func:`read_file` takes for one.

    Args:
        path: A directory, a GGUF file, or a hub name such as ``org/name``.
        files: Patterns of the files to download of a model on the hub; default: the tokenizer's.

    Raises:
        ConfigError: Neither of them, or a repository that cannot be reached.
    """
    check_model_path(path)
    local = Path(path).expanduser()
    if local.exists():
        return local
    name = str(path)
    # Imported here: a local directory needs none of it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:
        # The hub client has a family of its own for "no such repository" and raises OSError, ValueError and its HTTP
        # library's errors for the rest; to the caller all mean that the files can't be had.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{name} is neither a local directory nor a hub model that can be downloaded: {reason} (HF_HUB_OFFLINE=1 "
            "takes it from the cache, HF_ENDPOINT names a mirror, HF_TOKEN opens gated models)",
            field="model",
        ) from error


def check_model_path(path: str | Path) -> None:
    """Check that a path is a directory or a GGUF file, or may be a hub name.

    Raises:
        ConfigError: It is none of them, or something in the directory is a pipe or a device, which does not end.
    """
    local = Path(path).expanduser()
    name = str(path)
    if local.is_dir():
        try:
            items = list(local.iterdir())
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}", field="model") from error
        for item in items:
            if item.exists() and not (item.is_file() or item.is_dir()):
                raise ConfigError(f"{item} is no regular file", field="model")
        return
    if is_gguf(local):
        return
    if local.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"{name} is neither a directory with a model in it nor a GGUF file", field="model")


def read_file(path: Path) -> bytes | None:
    """Return the content of a file in a model's directory; ``None`` if there is no such file.

    Args:
        path: The file. Where its directory is a GGUF file the content is made from that one's metadata.

    Raises:
        ConfigError: It cannot be read.
    """
    if path.parent.is_file():
        return open_gguf(path.parent).read(path.name)
    try:
        with open_regular(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file. See :func:`read_file`.

    Raises:
        ConfigError: The file holds no JSON object.
    """
    content = read_file(path)
    if content is None:
        return {}
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object", field="model")
    return value


def check_model_config(path: Path, config: dict[str, Any]) -> None:
    """Check that a ``config.json`` names its kind, and that no size in it is beyond any model's.

    Args:
        path: The file, for errors.
        config: Object in the file.

    Raises:
        ConfigError: Names the field.
    """
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f"{path}: model_type must be a string, got {shown(kind)}", field="model")
    for holder in (config, config.get("text_config")):
        if not isinstance(holder, dict):
            continue
        for name, most in _MOST_OF.items():
            value = holder.get(name)
            if isinstance(value, int) and value > most:
                raise ConfigError(f"{path}: {name} must be at most {most}, got {shown(value)}", field="model")
        window = holder.get("sliding_window")
        if isinstance(window, int) and window < 0 and holder.get("use_sliding_window") is not False:
            raise ConfigError(f"{path}: sliding_window must be at least 0, got {shown(window)}", field="model")
        _eos_token_ids(path, holder)


def read_eos_token_ids(path: Path) -> frozenset[int]:
    """Return the ``eos_token_id`` of a ``generation_config.json``, one or a list; empty if it has none.

    Raises:
        ConfigError: It is something else.
    """
    return _eos_token_ids(path, read_json(path))


def _eos_token_ids(path: Path, content: dict[str, Any]) -> frozenset[int]:
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ConfigError(
            f"{path}: eos_token_id must be a number or a list of numbers, got {shown(value)}", field="model"
        )
    return frozenset(ids)


def token_content(value: Any) -> str | None:
    """Return a special token's text, written as a string or as ``{"content": ...}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def tokenizer_digest(model: str | Path) -> str:
    """Return the hex digest of the parts of ``tokenizer.json`` that decide which ids a text becomes.

    Args:
        model: A model's directory or GGUF file. Empty if it is none (a hub name, say) or has no such file.

    Raises:
        ConfigError: The file cannot be read.
    """
    file = Path(model) / "tokenizer.json"
    raw = read_file(file)
    if raw is None:
        return ""
    try:
        content = json.loads(raw)
        parts = {name: content.get(name) for name in _DIGEST_PARTS}
        merges = (parts["model"] or {}).get("merges")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", field="model") from error
    if merges:
        # Written as "a b" by older libraries and as ["a", "b"] by newer ones.
        parts["model"]["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_COMPOSED = 4
"""Most characters that NFC composes into one: a base and three marks, or three Hangul letters."""


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
    """Return the scheme of a ``tokenizer.json``'s decoder section, or ``None`` if it is of neither family.

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
        kind = step.get("type")
        pattern = (step.get("pattern") or {}).get("String")
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
