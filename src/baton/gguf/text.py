"""The tokenizer of a GGUF file, as the ``tokenizers`` library has it, and the chat template.

Two kinds are supported: byte-level BPE with its merges (``gpt2``), where the file only names the way of splitting text
into words, and SentencePiece's BPE (``llama``), whose merges follow from the tokens' scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from baton.errors import ConfigError
from baton.gguf.container import GgufFile, shown

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens."""
_SPACE = "▁"
_MAX_MERGED = 256
"""Longest token, in characters, whose merges are searched; longer ones are matched as added tokens alone."""
_MAX_VOCABULARY = 1 << 21

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s|"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"\p{N}" + _SLASHED
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}" + _SLASHED

_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
"""Regular expressions of words by ``tokenizer.ggml.pre``, as the models' own tokenizers have them."""
_GPT2 = frozenset({"gpt-2", "phi-2", "olmo", "mpt"})
_DIGITS = frozenset({"smollm", "starcoder", "command-r", "refact", "codeshell", "exaone", "minerva-7b"})
"""Names of ``tokenizer.ggml.pre`` that split off every digit, then words as GPT-2 does."""
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
"""Names where a word that is a token becomes that token, whatever its merges are."""
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
_BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"})
"""Names where a text begins with the begin token, unless the file says otherwise."""

_TURN_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"}
)
"""Control tokens that end an answer, in addition to the one that the file names."""


class GgufText:
    """The tokenizer and chat template of one file.

    Raises:
        ConfigError: The file's tokens cannot be used; names the file and the key.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._tokens = self._strings("tokens")
        if not 1 <= len(self._tokens) <= _MAX_VOCABULARY:
            self._refuse("tokens", f"{len(self._tokens)} tokens")
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            self._refuse("tokens", "the same token twice")
        self._types = self._numbers("token_type", _NORMAL)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the tokenizer.

        Raises:
            ConfigError: The tokenizer is not supported, or cannot be built; names the file and the key.
        """
        kind = self._file.metadata.get("tokenizer.ggml.model")
        name = kind if isinstance(kind, str) else ""
        if name == "gpt2":
            built, begins = self._byte_level()
        elif name == "llama":
            built = self._sentencepiece()
            begins = True
        else:
            self._refuse("model", f"the tokenizer {shown(kind)} is not supported (supported: gpt2, llama)")
        self._add_tokens(built)
        ends = [self._flag("add_bos_token", begins), self._flag("add_eos_token", default=False)]
        named = [self.named_token(name) if wanted else None for name, wanted in zip(("bos", "eos"), ends, strict=True)]
        if any(named):
            begin, end = named
            template = " ".join(part for part in (begin and "<begin>", "$A", end and "<end>") if part)
            pieces = [("<begin>", begin), ("<end>", end)]
            built.post_processor = _template(template, [(name, self._ids[t], t) for name, t in pieces if t])
        return built

    def named_token(self, name: str) -> str | None:
        """Return a special token that the file names, such as ``bos``; ``None``: it names none."""
        token_id = self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(self._tokens):
            return None
        return self._tokens[token_id]

    def end_ids(self) -> list[int]:
        """Return the ids of tokens that end an answer, the named one first."""
        named = [self.named_token(name) for name in ("eos", "eot", "eom")]
        control = [t for t in self._tokens if t in _TURN_ENDS and self._types[self._ids[t]] == _CONTROL]
        return list(dict.fromkeys(self._ids[token] for token in (*named, *control) if token is not None))

    @property
    def chat_template(self) -> str | None:
        """The chat template; ``None``: the file has none."""
        template = self._file.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        pre = str(self._file.metadata.get("tokenizer.ggml.pre", "gpt-2"))
        if pre not in {*_WORDS, *_GPT2, *_DIGITS}:
            known = ", ".join(sorted({*_WORDS, *_GPT2, *_DIGITS}))
            self._refuse("pre", f"{shown(pre)} is no way of splitting words that Baton knows ({known})")
        merges = []
        for index, merge in enumerate(self._strings("merges")):
            left, _, right = merge.partition(" ")
            if left not in self._ids or right not in self._ids or left + right not in self._ids:
                self._refuse("merges", f"merge {index} ({shown(merge)}) is not of two tokens that make a third")
            merges.append((left, right))
        built = tokenizers.Tokenizer(models.BPE(vocab=self._ids, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
        if pre in _NFC:
            built.normalizer = normalizers.NFC()
        words: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _WORDS)]
        if pre in _WORDS:
            words.insert(0, pre_tokenizers.Split(Regex(_WORDS[pre]), "isolated"))
        elif pre in _DIGITS:
            words.insert(0, pre_tokenizers.Digits(individual_digits=True))
        built.pre_tokenizer = pre_tokenizers.Sequence(words) if len(words) > 1 else words[0]
        built.decoder = decoders.ByteLevel()
        return built, pre in _BEGINS

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        scores = self._numbers("scores", 0.0)
        if not np.isfinite(scores).all():
            self._refuse("scores", "a score is no number")
        unknown = self.named_token("unknown")
        merges = [(left, right) for _, _, left, right in sorted(self._merges(scores.tolist()))]
        bytes_there = all(f"<0x{byte:02X}>" in self._ids for byte in range(256))
        built = tokenizers.Tokenizer(
            models.BPE(
                vocab=self._ids,
                merges=merges,
                unk_token=unknown,
                fuse_unk=unknown is not None,
                byte_fallback=bytes_there,
            )
        )
        prefix = self._flag("add_space_prefix", default=True)
        steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
        built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        plain = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        built.decoder = decoders.Sequence([*plain, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
        return built

    def _merges(self, scores: list[float]) -> list[tuple[float, tuple[int, int], str, str]]:
        """Return all pairs of tokens that make a third, with its negated score."""
        ids = self._ids
        merges = []
        for token, score, kind in zip(self._tokens, scores, self._types.tolist(), strict=True):
            if kind not in (_NORMAL, _USER_DEFINED) or not 2 <= len(token) <= _MAX_MERGED:
                continue
            for cut in range(1, len(token)):
                left = token[:cut]
                right = token[cut:]
                if left in ids and right in ids:
                    merges.append((-score, (ids[left], ids[right]), left, right))
        return merges

    def _add_tokens(self, built: tokenizers.Tokenizer) -> None:
        special = []
        plain = []
        for token, kind in zip(self._tokens, self._types.tolist(), strict=True):
            if token and kind in (_CONTROL, _UNKNOWN):
                special.append(AddedToken(token, normalized=False, special=True))
            elif token and kind == _USER_DEFINED:
                plain.append(AddedToken(token, normalized=False))
        built.add_special_tokens(special)
        built.add_tokens(plain)

    def _strings(self, name: str) -> list[str]:
        strings = self._file.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(strings, list):
            self._refuse(name, "there is no such list of strings")
        return strings

    def _numbers(self, name: str, default: float) -> np.ndarray[Any, Any]:
        """Return a number for each token."""
        numbers = self._file.metadata.get(f"tokenizer.ggml.{name}")
        if numbers is None:
            return np.full(len(self._tokens), default)
        if not isinstance(numbers, np.ndarray) or len(numbers) != len(self._tokens):
            self._refuse(name, f"is not one number for each of {len(self._tokens)} tokens")
        return numbers

    def _flag(self, name: str, default: bool) -> bool:
        flag = self._file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(flag, bool):
            self._refuse(name, f"is {shown(flag)}, not a bool")
        return flag

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise ConfigError(f"{self._file.path}: tokenizer.ggml.{name}: {why}", field="model")


def _template(single: str, named: list[tuple[str, int, str]]) -> processors.TemplateProcessing:
    for name, _, token in named:
        single = single.replace(name, token)
    return processors.TemplateProcessing(single=single.split(" "), special_tokens=[(t, i) for _, i, t in named])
