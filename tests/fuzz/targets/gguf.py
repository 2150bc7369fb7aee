"""GGUF files that anybody may have made: read as what they are, or refused in one line."""

from __future__ import annotations

import functools
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from tests.fuzz.choices import Choices

from baton.errors import ConfigError
from baton.gguf import tensor_rules
from baton.gguf.files import GgufModel

_SIZES = {
    "context_length": 64,
    "block_count": 1,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 16,
    "attention.sliding_window": 8,
}
_SHAPES = {
    "token_embd.weight": [12, 32],
    "output_norm.weight": [32],
    "blk.0.attn_norm.weight": [32],
    "blk.0.attn_q.weight": [32, 32],
    "blk.0.attn_k.weight": [16, 32],
    "blk.0.attn_v.weight": [16, 32],
    "blk.0.attn_output.weight": [32, 32],
    "blk.0.ffn_norm.weight": [32],
    "blk.0.ffn_gate.weight": [64, 32],
    "blk.0.ffn_up.weight": [64, 32],
    "blk.0.ffn_down.weight": [32, 64],
}
_NAMES = [
    *("general.architecture", "general.alignment", "split.count", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
    *(
        f"tokenizer.ggml.{name}"
        for name in ("tokens", "merges", "scores", "token_type", "eos_token_id", "add_bos_token")
    ),
    *("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.unknown_token_id", "tokenizer.chat_template"),
    *(
        f"llama.{name}"
        for name in (*_SIZES, "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "expert_count")
    ),
]
_READ = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_Q8_0 = 8


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="baton-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def _string(text: str) -> bytes:
    content = text.encode(errors="surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    """Return the type and the bytes of a value."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<IQ", 10, value % 2**64) if value >= 2**32 or value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        return struct.pack("<IIQ", 9, 6, len(value)) + b"".join(struct.pack("<f", item) for item in value)
    return struct.pack("<I", 8) + _string(str(value))


def _metadata(choices: Choices) -> dict[str, Any]:
    """Return a small llama's metadata, with some of it changed."""
    spm = choices.flag()
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁" if spm else "Ġ", "ba", "aba", "c", "d", "e"]
    found: dict[str, Any] = {"general.architecture": choices.pick(["llama", "llama", "qwen3", "gemma2", "gemma3"])}
    found |= {f"{found['general.architecture']}.{name}": value for name, value in _SIZES.items()}
    found[f"{found['general.architecture']}.attention.layer_norm_rms_epsilon"] = 1e-5
    found |= {
        "tokenizer.ggml.model": "llama" if spm else "gpt2",
        "tokenizer.ggml.pre": choices.pick(["gpt-2", "qwen2"]),
    }
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b", "b a", "ab a"]}
    found |= {"tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))], "tokenizer.ggml.eos_token_id": 2}
    found |= {"tokenizer.ggml.token_type": [3.0, 3.0, 3.0, *[1.0] * 9], "tokenizer.ggml.bos_token_id": 1}
    for _ in range(choices.number(0, 3)):
        name, kind = choices.pick(_NAMES), choices.number(0, 4)
        if kind == 0:
            found.pop(name, None)
        elif kind == 1:
            found[name] = choices.integer()
        elif kind == 2:
            found[name] = choices.text()
        elif kind == 3:
            found[name] = [choices.text() for _ in range(choices.number(0, 12))]
        else:
            found[name] = choices.pick([True, 0.0, -1.0, 1e30, float("nan"), [float("inf")] * 12, [0.5] * 12])
    return found


def _file(choices: Choices) -> bytes:
    pairs = _metadata(choices)
    shapes = dict(_SHAPES)
    for _ in range(choices.number(0, 2)):
        name = choices.pick([*shapes, "rope_freqs.weight", "blk.7.attn_q.weight", "extra"])
        shapes[name] = [choices.number(0, 64) for _ in range(choices.number(0, 3))]
    table, offset = b"", 0
    for name, shape in shapes.items():
        packed = len(shape) == 2 and choices.flag()
        count = 1
        for length in shape:
            count *= length
        nbytes = count // 32 * 34 if packed else count * 4
        dims = shape[::-1]
        table += _string(name) + struct.pack(
            f"<I{len(dims)}QIQ", len(dims), *dims, _Q8_0 if packed else choices.pick([0, 0, 1, 12, 99]), offset
        )
        offset += -(-nbytes // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs))
    head += b"".join(_string(key) + _value(value) for key, value in pairs.items()) + table
    return head + bytes(-len(head) % 32) + bytes(offset)


def gguf(data: bytes) -> None:
    """Any file is refused as documented, or gives tensors within it, a configuration and a tokenizer that work."""
    choices = Choices(data)
    content = _file(choices)
    if choices.flag():
        content = choices.mutated(content)
    if choices.number(0, 3) == 0:
        content = content[: choices.number(0, len(content))]
    path = _folder() / "m.gguf"
    path.write_bytes(content)
    try:
        model = GgufModel(path)
    except ConfigError as error:
        _check(error)
        return
    for info in model.file.tensors.values():
        assert model.file.header_bytes <= info.offset
        assert info.offset + info.nbytes <= len(content)
    for name in _READ:
        try:
            found = model.read(name)
        except ConfigError as error:
            _check(error)
            continue
        if found is None:
            continue
        if name.endswith(".json"):
            json.loads(found)
        if name == "tokenizer.json":
            tokenizer = tokenizers.Tokenizer.from_buffer(found)
            tokenizer.decode(tokenizer.encode("abba aba é").ids)
    try:
        rules = tensor_rules(model.file)
    except ConfigError as error:
        _check(error)
    else:
        assert len({rule.name for rule in rules.values()}) == len(rules)


def _check(error: ConfigError) -> None:
    assert "\n" not in error.message, error.message
    assert len(error.message) < 1000, error.message
