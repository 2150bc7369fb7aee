"""Quantized checkpoints of random bytes: of any size within seconds, for what memory and time do not depend on values.

Embedding and head are bfloat16 (GGUF: float16 and quantized), as in most checkpoints that are published. There is no
tokenizer: what one takes does not depend on the model's size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tests.support.models.gguf_files import LAYER, NORMS, TOP, finish, random_blocks, write_sizes
from tests.support.models.quantized_checkpoints import BNB_4BIT, GPTQ, NF4, Tensors, ct, ct_weights
from transformers import LlamaConfig

GROUP = 128
SCALE = 2e-3
"""About that of scales, so that logits are finite."""


@dataclass(frozen=True)
class Shape:
    """Of a Llama; sizes as its configuration names them."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's linear layers."""
        head = self.hidden // self.heads
        names = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        rows = {f"self_attn.{name}_proj": (heads * head, self.hidden) for name, heads in names.items()}
        inner = {f"mlp.{name}_proj": (self.inner, self.hidden) for name in ("gate", "up")}
        return {
            **rows,
            "self_attn.o_proj": (self.hidden, self.heads * head),
            **inner,
            "mlp.down_proj": (self.hidden, self.inner),
        }

    @property
    def layer_elements(self) -> int:
        """Of the linear layers of one layer."""
        return sum(rows * columns for rows, columns in self.projections.values())

    @property
    def parameters(self) -> int:
        """Of all matrices."""
        return self.layers * self.layer_elements + 2 * self.vocab * self.hidden

    def config(self) -> LlamaConfig:
        """As transformers has it."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            dtype="bfloat16",
        )


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _int32(rows: int, columns: int) -> torch.Tensor:
    return _bytes(rows, columns * 4).view(torch.int32)


def _scales(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(rows, columns) * SCALE + SCALE / 2).to(dtype)


def _plain(rows: int, columns: int) -> torch.Tensor:
    some = torch.randn(1 << 16).mul_(0.02).bfloat16()
    return some.repeat(-(-rows * columns // len(some)))[: rows * columns].view(rows, columns).clone()


def _ct_int4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": _int32(rows, columns // 8),
        "weight_scale": _scales(rows, columns // GROUP, torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _ct_int8(rows: int, columns: int) -> Tensors:
    return {
        "weight": _bytes(rows, columns).view(torch.int8),
        "weight_scale": _scales(rows, 1, torch.bfloat16).div_(16),
    }


def _gptq(rows: int, columns: int) -> Tensors:
    return {
        "qweight": _int32(columns // 8, rows),
        "qzeros": _int32(columns // GROUP, rows // 8),
        "scales": _scales(columns // GROUP, rows, torch.float16),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def _awq(rows: int, columns: int) -> Tensors:
    return {
        "qweight": _int32(columns, rows // 8),
        "qzeros": _int32(columns // GROUP, rows // 8),
        "scales": _scales(columns // GROUP, rows, torch.float16),
    }


def _bnb_nf4(rows: int, columns: int) -> Tensors:
    blocks = rows * columns // 64
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [rows, columns],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": SCALE * 8,
    }
    return {
        "weight": _bytes(rows * columns // 2, 1),
        "weight.absmax": _bytes(blocks),
        "weight.quant_map": NF4.clone(),
        "weight.nested_absmax": torch.full((-(-blocks // 256),), SCALE * 4),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _fp8(rows: int, columns: int) -> Tensors:
    return {
        "weight": (_bytes(rows, columns) & 0xBF).view(torch.float8_e4m3fn),  # up to 2 in magnitude
        "weight_scale": _scales(rows, 1, torch.bfloat16).mul_(4),
    }


Pack = Callable[[int, int], Tensors]
FORMATS: dict[str, tuple[dict[str, Any] | None, Pack]] = {
    "bfloat16": (None, lambda rows, columns: {"weight": _plain(rows, columns)}),
    "ct-w4a16": (ct("pack-quantized", ct_weights(4, "int", "group", group_size=GROUP)), _ct_int4),
    "ct-w8a16": (ct("int-quantized", ct_weights(8, "int", "channel")), _ct_int8),
    "ct-fp8": (ct("float-quantized", ct_weights(8, "float", "channel")), _fp8),
    "gptq": ({**GPTQ, "group_size": GROUP, "desc_act": False}, _gptq),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        _awq,
    ),
    "bnb-nf4": ({**BNB_4BIT, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, _bnb_nf4),
}
"""Configuration, and what writes a matrix."""
GGUF_KINDS = {"gguf-q4_0": "Q4_0", "gguf-q8_0": "Q8_0", "gguf-q4_k": "Q4_K", "gguf-q6_k": "Q6_K"}


def write_random(folder: Path, form: str, shape: Shape) -> tuple[Path, int]:
    """Write a checkpoint of random bytes.

    Args:
        folder: To write to; made.
        form: A key of :data:`FORMATS` or :data:`GGUF_KINDS`.
        shape: Of the model.

    Returns:
        What ``--model`` takes, and the bytes of all tensors.
    """
    folder.mkdir(parents=True)
    config = shape.config()
    config.save_pretrained(folder)
    if form in GGUF_KINDS:
        return _write_gguf(folder, GGUF_KINDS[form], shape)
    settings, pack = FORMATS[form]
    torch.manual_seed(0)
    tensors: Tensors = {}
    for name, sizes in _matrices(shape):
        parts = pack(*sizes) if name.startswith("model.layers") else {"weight": _plain(*sizes)}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    tensors |= {f"{name}.weight": torch.ones(shape.hidden, dtype=torch.bfloat16) for name in _norms(shape)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if settings is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return folder, sum(tensor.nbytes for tensor in tensors.values())


def _write_gguf(folder: Path, kind: str, shape: Shape) -> tuple[Path, int]:
    path, generator = folder / "model.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    write_sizes(writer, json.loads((folder / "config.json").read_text()))
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    total = 0
    for name, (rows, columns) in _matrices(shape):
        if name == "model.embed_tokens":
            data = _plain(rows, columns).half().numpy()
            writer.add_tensor(_stored(name), data)
        else:
            data = random_blocks(kind, rows, columns // block, generator, scale=SCALE, empty=0)
            writer.add_tensor(_stored(name), data, raw_dtype=gguf.GGMLQuantizationType[kind])
        total += data.nbytes
    for name in _norms(shape):
        writer.add_tensor(_stored(name), np.ones(shape.hidden, dtype=np.float32))
        total += 4 * shape.hidden
    finish(writer)
    return path, total


def _matrices(shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    for name in ("model.embed_tokens", "lm_head"):
        yield name, (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, sizes in shape.projections.items():
            yield f"model.layers.{layer}.{name}", sizes


def _norms(shape: Shape) -> Iterator[str]:
    yield "model.norm"
    for layer in range(shape.layers):
        yield f"model.layers.{layer}.input_layernorm"
        yield f"model.layers.{layer}.post_attention_layernorm"


def _stored(name: str) -> str:
    if name in TOP:
        return f"{TOP[name]}.weight"
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{ {**LAYER, **NORMS}[part] }.weight"
