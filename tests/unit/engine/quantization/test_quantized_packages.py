"""Weights that formats' own packages have written are read as these packages read them themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.models.quantized_checkpoints import ct, ct_weights

from baton.engine.models.checkpoint import TensorFiles
from baton.engine.quantization.checkpoint import stored_weights
from baton.tokenizer.weight_files import read_header
from baton_kernels.quantization import EXACT, INT8_PER_TOKEN, ActivationScheme

MODULE = "model.layers.0.self_attn.q_proj"
ROWS, COLUMNS = 64, 256


def weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def read(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> tuple[torch.Tensor, ActivationScheme]:
    """Write tensors and read the one weight that they make."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    (stored,) = stored_weights(config, TensorFiles([read_header(path)]))
    assert (stored.parameter, stored.shape) == (f"{MODULE}.weight", (ROWS, COLUMNS))
    return stored.read(0).dequantize(torch.float32), stored.activations


COMPRESSED = {
    "int8 per channel": ("int-quantized", ct_weights(8, "int", "channel")),
    "int8 per tensor": ("int-quantized", ct_weights(8, "int", "tensor")),
    "int8 with zeros": ("int-quantized", ct_weights(8, "int", "channel", symmetric=False)),
    "int8 packed": ("pack-quantized", ct_weights(8, "int", "group", group_size=64)),
    "int4": ("pack-quantized", ct_weights(4, "int", "group", group_size=64)),
    "int4 per channel": ("pack-quantized", ct_weights(4, "int", "channel")),
    "int4 with zeros": ("pack-quantized", ct_weights(4, "int", "group", group_size=64, symmetric=False)),
    "fp8 per channel": ("float-quantized", ct_weights(8, "float", "channel")),
    "fp8 per tensor": ("float-quantized", ct_weights(8, "float", "tensor")),
    "fp8 blocks": ("float-quantized", ct_weights(8, "float", "block", block_structure=[32, 128])),
    "nvfp4": ("nvfp4-pack-quantized", ct_weights(4, "float", "tensor_group", group_size=16)),
    "mxfp4": ("mxfp4-pack-quantized", ct_weights(4, "float", "group", group_size=32)),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    """Scales are of largest magnitudes, or of ranges where there are zeros."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    form, weights = COMPRESSED[name]
    args = quantization.QuantizationArgs(**{key: value for key, value in weights.items() if key != "dynamic"})
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, format=form)
    plain = weight()
    group = weights.get("group_size") or COLUMNS
    height, width = weights.get("block_structure") or ((ROWS, COLUMNS) if args.strategy == "tensor" else (1, group))
    tiles = plain.view(ROWS // height, height, COLUMNS // width, width)
    low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    whole = None
    if form.startswith("nvfp4"):
        whole = helpers.generate_gparam(plain.amin().view(1), plain.amax().view(1))
    scale, zero = helpers.calculate_qparams(low, high, args, global_scale=whole)
    if args.strategy == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    state = {"weight": plain, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        state["weight_global_scale"] = whole
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    if args.symmetric:
        packed.pop("weight_zero_point", None)
    expected = compressor.decompress(dict(packed), scheme)["weight"].float()
    got, activations = read(tmp_path, ct(form, weights), {f"{MODULE}.{key}": value for key, value in packed.items()})
    assert activations == EXACT
    short = form.startswith(("nvfp4", "mxfp4"))  # which it computes in bfloat16
    torch.testing.assert_close(got, expected, atol=2e-2 if short else 1e-5, rtol=1e-2 if short else 1e-5)
    assert (got - plain).norm() < 0.4 * plain.norm()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(tmp_path: Path, kind: str, double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(weight(), blocksize=64, compress_statistics=double, quant_type=kind)
    expected = functional.dequantize_4bit(packed, state)
    tensors = {f"{MODULE}.weight": packed}
    tensors |= {f"{MODULE}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    got, _ = read(tmp_path, config, tensors)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


TORCHAO = {
    "Int8WeightOnlyConfig": EXACT,
    "Int8DynamicActivationInt8WeightConfig": INT8_PER_TOKEN,
    "Float8WeightOnlyConfig": EXACT,
}


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao(tmp_path: Path, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight())
    kind = getattr(quantization, name)
    versioned = {"version": 2} if "version" in kind.__dataclass_fields__ else {}
    quantization.quantize_(linear, kind(**versioned))
    tensors, metadata = support.flatten_tensor_state_dict({f"{MODULE}.weight": linear.weight.detach()})
    assert json.loads(metadata[f"{MODULE}.weight"])["_type"].endswith("Tensor")
    got, activations = read(tmp_path, {"quant_method": "torchao"}, tensors, metadata)
    assert activations == TORCHAO[name]
    torch.testing.assert_close(got, linear.weight.detach().dequantize().float(), atol=1e-5, rtol=1e-4)
