"""Packers of every format of quantized checkpoints, written from the formats' descriptions and without Baton's code.

Each turns a plain weight into the tensors that a checkpoint has for it and into the plain weight that they stand for.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
"""Takes a weight [rows, columns]; returns tensors by what follows the module's name, and the dequantized weight."""
Round = Callable[[torch.Tensor], torch.Tensor]

PROJECTIONS = re.compile(r"_proj\.weight$|experts\.\d+\.w[123]\.weight$")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
FP4 = torch.tensor([0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25])


def integers(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return unsigned values [rows, columns], scales and zeros [rows, groups], and what they stand for."""
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // group, group)
    top = 2**bits - 1
    if symmetric:
        scales = grouped.abs().amax(-1) / (top / 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    values = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    plain = (values - zeros[..., None]) * scales[..., None]
    return values.view(rows, columns).long(), scales, zeros, plain.view(rows, columns)


def into_int32(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack values [..., n] as int32 [..., n * bits / 32], from the lowest bits on, in an order within each int32."""
    each = 32 // bits
    parts = values.long().unflatten(-1, (-1, each))
    packed = sum(parts[..., value] << (bits * place) for place, value in enumerate(order or range(each)))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def act_order(columns: int, group: int, generator: torch.Generator) -> torch.Tensor:
    """Return each column's group, in no order."""
    return (torch.arange(columns) // group)[torch.randperm(columns, generator=generator)]


def by_group(weight: torch.Tensor, index: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Any, ...]:
    """As :func:`integers`, of groups that ``index`` names for each column."""
    order = torch.argsort(index, stable=True)
    values, scales, zeros, plain = integers(weight[:, order], bits, group, symmetric=symmetric)
    back = torch.argsort(order)
    return values[:, back], scales, zeros, plain[:, back]


# compressed-tensors


def ct_integers(bits: int, group: int | None, *, packed: bool, symmetric: bool = True, ordered: bool = False) -> Pack:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        size = group or columns
        index = act_order(columns, size, generator) if ordered else torch.arange(columns) // size
        values, scales, zeros, plain = by_group(weight, index, bits, size, symmetric=symmetric)
        middle = 2 ** (bits - 1)
        tensors = {"weight_scale": scales}
        if packed:
            tensors |= {"weight_packed": into_int32(values, bits), "weight_shape": torch.tensor([rows, columns])}
        else:
            tensors["weight"] = (values - middle).to(torch.int8)
        if not symmetric and packed:
            tensors["weight_zero_point"] = into_int32(zeros.T, bits).T.contiguous()
        elif not symmetric:
            tensors["weight_zero_point"] = (zeros - middle).to(torch.int8)
        if ordered:
            tensors["weight_g_idx"] = index.int()
        return tensors, plain

    return pack


def ct_nvfp4(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    whole = 448 * 6 / weight.abs().max()
    grouped = weight.view(len(weight), -1, 16)
    scales = (grouped.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    factor = (scales.float() / whole)[..., None]
    codes, plain = into_e2m1(grouped / factor)
    tensors = {"weight_packed": codes.view(len(weight), -1), "weight_scale": scales, "weight_global_scale": whole[None]}
    return tensors, (plain * factor).view(weight.shape)


def into_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed codes [..., columns / 2], exponents uint8 [..., columns / 32], and the plain weight."""
    grouped = weight.unflatten(-1, (-1, 32))
    exponents = grouped.abs().amax(-1).log2().floor() - 2
    factor = (2.0**exponents)[..., None]
    codes, plain = into_e2m1(grouped / factor)
    return codes.flatten(-2), (exponents + 127).to(torch.uint8), (plain * factor).flatten(-2)


def ct_mxfp4(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, exponents, plain = into_mxfp4(weight)
    return {"weight_packed": codes, "weight_scale": exponents}, plain


def into_e2m1(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to 4-bit floats: two codes a byte, the first in the low bits, and the values."""
    codes = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    plain = E2M1[codes] * values.sign()
    codes = (codes + 8 * (values < 0)).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), plain


# fp8


def fp8(block: tuple[int, int] | None, scale_name: str, *, channel: bool = False, static: bool = False) -> Pack:
    """Scales per block, output channel, or tensor."""

    def pack(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        height, width = block or ((1, columns) if channel else (rows, columns))
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        tiles = padded.view(len(padded) // height, height, -1, width)
        scales = tiles.abs().amax((1, 3)) / 448
        values = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        plain = (values.float() * scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
        raw = values.view(torch.uint8).view(padded.shape)[:rows, :columns].contiguous().view(torch.float8_e4m3fn)
        tensors = {"weight": raw, scale_name: scales if block or channel else scales.view(())}
        if static:
            tensors["input_scale"] = torch.tensor([FP8_INPUT_SCALE])
        return tensors, plain.contiguous()

    return pack


# GPTQ and AWQ


def gptq(bits: int, group: int, *, version: int, symmetric: bool, ordered: bool) -> Pack:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        index = act_order(columns, group, generator) if ordered else torch.arange(columns) // group
        values, scales, zeros, plain = by_group(weight, index, bits, group, symmetric=symmetric)
        stored = (zeros - 1) % 2**bits if version == 1 else zeros
        tensors = {
            "qweight": into_int32(values, bits).T.contiguous(),
            "qzeros": into_int32(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": index.int(),
        }
        return tensors, plain

    return pack


def awq(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    values, scales, zeros, plain = integers(weight, 4, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": into_int32(values.T, 4, order),
        "qzeros": into_int32(zeros.T, 4, order),
        "scales": scales.T.contiguous(),
    }
    return tensors, plain


# bitsandbytes


def bnb_4bit(kind: str, *, nested: bool, block: int = 64) -> Pack:
    table = NF4 if kind == "nf4" else torch.cat([FP4, -FP4])

    def pack(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.flatten().view(-1, block)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [*weight.shape]}
        tensors: Tensors = {}
        if nested:
            offset = absmax.mean()
            steps = torch.linspace(-1, 1, 256)
            parts = (absmax - offset).split(256)
            largest = torch.stack([part.abs().max() for part in parts])
            codes = [
                ((part / most)[:, None] - steps).abs().argmin(1) for part, most in zip(parts, largest, strict=True)
            ]
            pairs = zip(codes, largest, strict=True)
            absmax = torch.cat([steps[code] * most for code, most in pairs]) + offset
            tensors |= {"weight.absmax": torch.cat(codes).to(torch.uint8), "weight.nested_absmax": largest}
            tensors["weight.nested_quant_map"] = steps
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        else:
            tensors["weight.absmax"] = absmax
        codes_of = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
        plain = (table[codes_of] * absmax[:, None]).view(weight.shape)
        flat = codes_of.flatten().to(torch.uint8)
        tensors["weight"] = ((flat[::2] << 4) | flat[1::2])[:, None]
        tensors["weight.quant_map"] = table.float().clone()  # files have no tensors that share memory
        raw = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(raw), dtype=torch.uint8)
        return tensors, plain

    return pack


def bnb_int8(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * largest[:, None] / 127


# torchao


def torchao(values: torch.dtype) -> Pack:
    """int8 or float8 per row; names and metadata are added by :func:`quantize_checkpoint`."""

    def pack(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        limit = 127.5 if values is torch.int8 else 448.0
        scales = weight.abs().amax(1, keepdim=True) / limit
        scaled = weight / scales
        data = (scaled.round().clamp(-128, 127) if values is torch.int8 else scaled).to(values)
        return {"_weight_qdata": data, "_weight_scale": scales}, data.float() * scales

    return pack


# What inputs become, written anew


INT8_INPUT_SCALE = 0.05
FP8_INPUT_SCALE = 0.02


def int8_per_token(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def fp8_per_token(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fp8_static(x: torch.Tensor) -> torch.Tensor:
    return (x / FP8_INPUT_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * FP8_INPUT_SCALE


def int8_static(x: torch.Tensor) -> torch.Tensor:
    return (x / INT8_INPUT_SCALE).round().clamp(-127, 127) * INT8_INPUT_SCALE


def fp8_per_group(size: int) -> Round:
    def round_inputs(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % size:
            return fp8_per_token(x)
        return fp8_per_token(x.unflatten(-1, (-1, size))).flatten(-2)

    return round_inputs


def with_input_scale(pack: Pack, scale: float) -> Pack:
    def packed(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        tensors, plain = pack(weight, generator)
        return {**tensors, "input_scale": torch.tensor([scale])}, plain

    return packed


# All of them


@dataclass(frozen=True)
class Format:
    """A format: its configuration, packer, what inputs become, and its form."""

    config: dict[str, Any]
    pack: Pack
    inputs: Round | None = None
    metadata: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def ct(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **group: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, **group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": one},
        "ignore": ["lm_head", "re:.*\\.gate$", "re:.*\\.router$"],
    }


def ct_weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8_TENSOR = {**INT8_TOKEN, "strategy": "tensor", "dynamic": False}
FP8_TOKEN = {**INT8_TOKEN, "type": "float"}
FP8_TENSOR = {**FP8_TOKEN, "strategy": "tensor", "dynamic": False}
NVFP4_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
W4 = ct_weights(4, "int", "group", group_size=32)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
BNB_4BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
TORCHAO_INT8 = {"_type": "Int8Tensor", "_data": {"block_size": [1, 64], "act_quant_kwargs": None}}
TORCHAO_INPUTS = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"granularity": {"_type": "PerRow", "_data": {}}}}

FORMATS = {
    "ct-w8a16": Format(ct("int-quantized", ct_weights(8, "int", "channel")), ct_integers(8, None, packed=False)),
    "ct-w8a16-packed": Format(
        ct("pack-quantized", ct_weights(8, "int", "group", group_size=32, symmetric=False)),
        ct_integers(8, 32, packed=True, symmetric=False),
    ),
    "ct-w8a8": Format(
        ct("int-quantized", ct_weights(8, "int", "channel"), INT8_TOKEN),
        ct_integers(8, None, packed=False),
        int8_per_token,
    ),
    "ct-w8a8-static": Format(
        ct("int-quantized", ct_weights(8, "int", "channel", symmetric=False), INT8_TENSOR),
        with_input_scale(ct_integers(8, None, packed=False, symmetric=False), INT8_INPUT_SCALE),
        int8_static,
    ),
    "ct-w4a16": Format(ct("pack-quantized", W4), ct_integers(4, 32, packed=True)),
    "ct-w4a16-channel": Format(
        ct("pack-quantized", ct_weights(4, "int", "channel")), ct_integers(4, None, packed=True)
    ),
    "ct-w4a16-ordered": Format(
        ct("pack-quantized", {**W4, "symmetric": False, "actorder": "group"}),
        ct_integers(4, 32, packed=True, symmetric=False, ordered=True),
    ),
    "ct-w4a8": Format(ct("int-quantized", W4, INT8_TOKEN), ct_integers(4, 32, packed=False), int8_per_token),
    "ct-fp8": Format(
        ct("float-quantized", ct_weights(8, "float", "channel"), FP8_TOKEN),
        fp8(None, "weight_scale", channel=True),
        fp8_per_token,
    ),
    "ct-fp8-static": Format(
        ct("float-quantized", ct_weights(8, "float", "tensor"), FP8_TENSOR),
        fp8(None, "weight_scale", static=True),
        fp8_static,
    ),
    "ct-fp8-block": Format(
        ct("naive-quantized", ct_weights(8, "float", "block", block_structure=[16, 32])), fp8((16, 32), "weight_scale")
    ),
    "ct-nvfp4": Format(
        ct("nvfp4-pack-quantized", ct_weights(4, "float", "tensor_group", group_size=16), NVFP4_INPUTS), ct_nvfp4
    ),
    "ct-mxfp4": Format(ct("mxfp4-pack-quantized", ct_weights(4, "float", "group", group_size=32)), ct_mxfp4),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8(None, "weight_scale"), fp8_per_token
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8(None, "weight_scale", static=True), fp8_static
    ),
    "fp8-channel": Format({"quant_method": "fbgemm_fp8"}, fp8(None, "weight_scale", channel=True), fp8_per_token),
    "fp8-block": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        fp8((16, 32), "weight_scale_inv"),
        fp8_per_group(32),
    ),
    "gptq-v1-ordered": Format(GPTQ, gptq(4, 32, version=1, symmetric=False, ordered=True)),
    "gptq-v2": Format(
        {**GPTQ, "desc_act": False, "sym": True, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, version=2, symmetric=True, ordered=False),
    ),
    "gptq-8bit-ordered": Format({**GPTQ, "bits": 8}, gptq(8, 32, version=1, symmetric=False, ordered=True)),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "bnb-nf4": Format({**BNB_4BIT, "bnb_4bit_quant_type": "nf4"}, bnb_4bit("nf4", nested=False)),
    "bnb-nf4-nested": Format(
        {**BNB_4BIT, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, bnb_4bit("nf4", nested=True)
    ),
    "bnb-fp4": Format({**BNB_4BIT, "bnb_4bit_quant_type": "fp4"}, bnb_4bit("fp4", nested=False)),
    "bnb-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, bnb_int8),
    "torchao-int8": Format({"quant_method": "torchao"}, torchao(torch.int8), metadata=TORCHAO_INT8),
    "torchao-int8-dynamic": Format(
        {"quant_method": "torchao"},
        torchao(torch.int8),
        int8_per_token,
        metadata={**TORCHAO_INT8, "_data": {"act_quant_kwargs": TORCHAO_INPUTS}},
    ),
    "torchao-fp8": Format(
        {"quant_method": "torchao"}, torchao(torch.float8_e4m3fn), metadata={"_type": "Float8Tensor"}
    ),
}


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A quantized checkpoint, the plain one that it stands for, and the names of the modules that are quantized."""

    folder: Path
    plain: Path
    modules: frozenset[str]


def quantize_checkpoint(
    source: Path, folder: Path, name: str | Format, *, skip: str = "", change: Callable[[Tensors], None] | None = None
) -> QuantizedCheckpoint:
    """Write a plain checkpoint anew in a format, and as what that stands for.

    Args:
        source: A plain one, float32.
        folder: To write two folders below.
        name: Of the format, or itself: a key of :data:`FORMATS`, or ``mxfp4`` for experts of GPT-OSS.
        skip: A pattern of names that stay plain.
        change: Called with the quantized checkpoint's tensors before they are written.
    """
    tensors = read_tensors(source)
    plain, metadata = dict(tensors), {"format": "pt"}
    modules = set()
    generator = torch.Generator().manual_seed(0)
    form = name if isinstance(name, Format) else FORMATS.get(name)
    for key, weight in list(tensors.items()):
        if skip and re.search(skip, key):
            continue
        if form is None and "experts" in key and key.endswith("_proj"):
            codes, exponents, values = into_mxfp4(weight.mT.contiguous())
            del tensors[key]
            tensors[f"{key}_blocks"] = codes.unflatten(-1, (-1, 16))
            tensors[f"{key}_scales"] = exponents
            plain[key] = values.mT.contiguous()
        elif form is not None and PROJECTIONS.search(key) and weight.dim() == 2:
            module = key.removesuffix(".weight")
            packed, plain[key] = form.pack(weight.float(), generator)
            del tensors[key]
            tensors |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
            modules.add(module)
            if form.metadata is not None:
                metadata[key] = json.dumps(form.metadata)
    if change is not None:
        change(tensors)
    config = {"quant_method": "mxfp4"} if form is None else form.config
    quantized = write_checkpoint(source, folder / "quantized", tensors, metadata, config)
    return QuantizedCheckpoint(quantized, write_checkpoint(source, folder / "plain", plain, {}), frozenset(modules))


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    return found


def write_checkpoint(
    source: Path, folder: Path, tensors: Tensors, metadata: dict[str, str], config: dict[str, Any] | None = None
) -> Path:
    """Write tensors beside what else a checkpoint has."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", metadata)
    if config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return folder
