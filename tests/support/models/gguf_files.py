"""GGUF files of checkpoints, written by the gguf package as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {"post_attention_layernorm": "ffn_norm"}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"gemma3_text": "gemma3"}
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where in a block of each type its float16s are."""
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""What the package quantizes to; K-quants it reads alone."""
CONTROL, NORMAL = 3, 1


def random_blocks(
    kind: str, rows: int, blocks: int, generator: np.random.Generator, *, scale: float = 0.02, empty: float = 0.1
) -> np.ndarray:
    """Return a matrix of blocks of random bytes, with scales of a size; uint8 [rows, bytes of a row]."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = generator.normal(0, scale, (rows, blocks, 1)).astype(np.float16)
        halves[generator.random(halves.shape) < empty] = 0
        data[..., at : at + 2] = halves.view(np.uint8)
    return data.reshape(rows, -1)


def write_gguf(folder: Path, path: Path, kind: str = "F32", *, pre: str = "gpt-2") -> dict[str, torch.Tensor]:
    """Write a checkpoint as a GGUF file.

    Args:
        folder: Of the checkpoint, with a byte-level tokenizer.
        path: To write to.
        kind: Tensor type of matrices; K-quants get random blocks in place of the checkpoint's values.
        pre: How the tokenizer splits words.

    Returns:
        The parameters in the file, dequantized by the package, float32 by their names in the checkpoint.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    write_sizes(writer, config)
    write_tokenizer(writer, folder, pre)
    found, generator = {}, np.random.default_rng(5)
    for name, tensor in load_file(folder / "model.safetensors").items():
        value = tensor.float().numpy()
        stored = _stored_name(name, architecture)
        is_matrix = value.ndim == 2 and kind != "F32" and stored != "token_embd.weight"
        data = _permuted(value, name, config) if architecture == "llama" else value
        if architecture.startswith("gemma") and stored.endswith("norm.weight"):
            data = data + 1
        if is_matrix and kind in HALVES and kind not in WRITTEN:
            blocks = random_blocks(kind, len(value), value.shape[1] // 256, generator, scale=5e-4)
            writer.add_tensor(stored, blocks, raw_dtype=GGMLQuantizationType[kind])
            read = gguf.dequantize(blocks, GGMLQuantizationType[kind])
            value = _permuted(read, name, config, back=True) if architecture == "llama" else read
        elif is_matrix:
            quantized = gguf.quantize(data, GGMLQuantizationType[kind])
            writer.add_tensor(stored, quantized, raw_dtype=GGMLQuantizationType[kind])
            value = gguf.dequantize(gguf.quantize(value, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
        else:
            writer.add_tensor(stored, np.ascontiguousarray(data))
        found[name] = torch.from_numpy(np.ascontiguousarray(value))
    finish(writer)
    return found


def rewrite_gguf(
    path: Path, into: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray | None] | None = None
) -> Path:
    """Copy a file with other metadata and tensors, the latter in float32; ``None``: without it."""
    reader, others = gguf.GGUFReader(path), tensors or {}
    architecture = changes.get("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(into, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in changes:
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), kind, sub)
    for key, value in changes.items():
        if value is not None and key != "general.architecture":
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, gguf.GGUFValueType.BOOL if isinstance(value, bool) else kind)
    for tensor in reader.tensors:
        if tensor.name not in others:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, data in others.items():
        if data is not None:
            writer.add_tensor(name, data)
    finish(writer)
    return into


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantized_checkpoint(folder: Path, parameters: dict[str, torch.Tensor], into: Path) -> Path:
    """Write a checkpoint again, with other parameters, in float32; returns its folder."""
    shutil.copytree(folder, into)
    save_file(parameters, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}))
    return into


def write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write a configuration's sizes."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if "sliding_attention" in (config.get("layer_types") or ()):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """Write a byte-level tokenizer and the chat template."""
    parts = json.loads((folder / "tokenizer.json").read_text())
    named = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {**parts["model"]["vocab"], **{token["content"]: token["id"] for token in parts["added_tokens"]}}
    special = {token["id"] for token in parts["added_tokens"]}
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if index in special else NORMAL for index in range(len(tokens))])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parts["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ids[named["bos_token"]])
    writer.add_eos_token_id(ids[named["eos_token"]])
    writer.add_pad_token_id(ids[named["pad_token"]])
    writer.add_add_bos_token(parts["post_processor"] is not None)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _stored_name(name: str, architecture: str) -> str:
    path, _, what = name.rpartition(".")
    if path in TOP:
        return f"{TOP[path]}.{what}"
    layer, _, part = path.removeprefix("model.layers.").partition(".")
    names = {**LAYER, **(SANDWICH if architecture in {"gemma2", "gemma3"} else NORMS)}
    return f"blk.{layer}.{names[part]}.{what}"


def _permuted(value: np.ndarray, name: str, config: dict[str, Any], *, back: bool = False) -> np.ndarray:
    """Return queries' and keys' rows as pairs to be rotated instead of two halves, or the other way round."""
    kinds = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    heads = next((config[field] for part, field in kinds.items() if part in name), 0)
    if not heads:
        return value
    split = (heads, -1, 2) if back else (heads, 2, len(value) // heads // 2)
    return value.reshape(*split, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
