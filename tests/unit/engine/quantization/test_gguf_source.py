"""The parameters of a GGUF file under their names in transformers' modules."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import HALVES, finish, write_gguf, write_sizes

from baton.engine.models.checkpoint import model_digest
from baton.engine.quantization.formats.gguf import GgufSource
from baton.errors import ConfigError
from baton.tokenizer.weight_files import weight_files
from baton_kernels.quantization import Int4Weight, Int8Weight

KINDS = {"llama": "Q8_0", "qwen2": "Q4_0", "qwen3": "Q4_1", "gemma2": "Q5_0", "gemma3": "Q5_1"}


@pytest.mark.parametrize(("architecture", "kind"), KINDS.items())
def test_all_parameters_are_those_that_were_written(tmp_path: Path, architecture: str, kind: str) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    expected = write_gguf(folder, tmp_path / "m.gguf", kind)
    source = GgufSource(tmp_path / "m.gguf", torch.float32)
    packed = {each.parameter for each in source.stored_weights()}
    found = {name: source.read(name) for name in source.names() if name not in packed}
    for stored in source.stored_weights():
        weight = stored.read(0)
        assert isinstance(weight, Int8Weight | Int4Weight)
        assert (weight.rows, weight.columns) == stored.shape
        found[stored.parameter] = weight.dequantize()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert len(source.stored_weights()) == 4 * 7 + 1  # of four layers, and the head; the embedding is plain


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"])
def test_other_types(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    expected = write_gguf(folder, tmp_path / "m.gguf", kind)
    source = GgufSource(tmp_path / "m.gguf", torch.float32)
    assert bool(source.stored_weights()) == (kind in HALVES)
    found = {each.parameter: each.read(0).dequantize() for each in source.stored_weights()}
    found |= {name: source.read(name) for name in source.names() if name not in found}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_digests_tell_files_apart(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    path = tmp_path / "m.gguf"
    write_gguf(folder, path, "Q8_0")
    (file,) = weight_files(path)
    assert json.loads(file.header)["blk.0.attn_q.weight"]["dtype"] == "Q8_0"
    first = model_digest(path, [file])
    assert model_digest(path, weight_files(path)) == first
    norm = GgufSource(path, torch.float32).file.tensors["blk.2.attn_norm.weight"]
    with path.open("r+b") as opened:
        opened.seek(norm.offset + norm.nbytes - 1)
        opened.write(b"\x41")
    assert model_digest(path, weight_files(path)) != first


def test_a_scale_that_is_no_number_is_refused_with_its_tensor(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    path = tmp_path / "m.gguf"
    write_gguf(folder, path, "Q8_0")
    info = GgufSource(path, torch.float32).file.tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset + 34)
        file.write(b"\x00\x7c")
    stored = {each.parameter: each for each in GgufSource(path, torch.float32).stored_weights()}
    with pytest.raises(ConfigError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight: a scale is infinite"):
        stored["model.layers.1.mlp.up_proj.weight"].read(0)


def test_tables_of_blocks_have_two_dimensions(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    write_gguf(folder, tmp_path / "m.gguf")
    kind = gguf.GGMLQuantizationType.Q8_0
    norm = gguf.quantize(np.ones(64, np.float32), kind)
    reader, writer = gguf.GGUFReader(tmp_path / "m.gguf"), gguf.GGUFWriter(tmp_path / "n.gguf", "llama")
    write_sizes(writer, json.loads((folder / "config.json").read_text()))
    for tensor in reader.tensors:
        if tensor.name == "output_norm.weight":
            writer.add_tensor(tensor.name, norm, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    with pytest.raises(ConfigError, match=r"tensor output_norm\.weight: Q8_0 with 1 dimensions"):
        GgufSource(tmp_path / "n.gguf", torch.float32)
