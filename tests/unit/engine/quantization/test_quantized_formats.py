"""Quantized formats without a model: weights that are read are those that were packed; what is wrong is refused.

Every refusal is one line that names the file and the tensor, or the field of ``quantization_config``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.models.quantized import FORMS, make
from tests.support.models.quantized_checkpoints import (
    FORMATS,
    INT8_TENSOR,
    Tensors,
    bnb_4bit,
    ct,
    ct_integers,
    ct_weights,
    gptq,
    into_mxfp4,
)

from baton.engine.models.checkpoint import TensorFiles
from baton.engine.quantization.base import StoredWeight
from baton.engine.quantization.checkpoint import quantization_config, stored_weights
from baton.engine.quantization.modules import ReloadableWeight
from baton.errors import ConfigError
from baton.tokenizer.weight_files import read_header
from baton_kernels.quantization import QuantizedWeight

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 48, 64
Change = Callable[[Tensors], None]


def written(folder: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> TensorFiles:
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return TensorFiles([read_header(path)])


def packed(name: str, seed: int = 0) -> tuple[Tensors, torch.Tensor, dict[str, str]]:
    generator = torch.Generator().manual_seed(seed)
    form = FORMATS[name]
    tensors, plain = form.pack(torch.randn(ROWS, COLUMNS, generator=generator), generator)
    metadata = {} if form.metadata is None else {f"{MODULE}.weight": json.dumps(form.metadata)}
    return {f"{MODULE}.{part}": tensor for part, tensor in tensors.items()}, plain, metadata


def found(folder: Path, name: str, change: Change | None = None, **config: Any) -> StoredWeight:
    tensors, _, metadata = packed(name)
    if change is not None:
        change(tensors)
    (weight,) = stored_weights({**FORMATS[name].config, **config}, written(folder, tensors, metadata))
    return weight


def refusal(folder: Path, name: str, change: Change | None = None, **config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        found(folder, name, change, **config).read(0)
    assert "\n" not in caught.value.message
    assert caught.value.field == "model"
    return caught.value.message


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_weight_is_read_as_it_was_packed(tmp_path: Path, name: str) -> None:
    tensors, plain, metadata = packed(name)
    (weight,) = stored_weights(FORMATS[name].config, written(tmp_path, tensors, metadata))
    assert (weight.parameter, weight.shape, weight.experts) == (f"{MODULE}.weight", (ROWS, COLUMNS), 0)
    assert set(weight.tensors) == set(tensors)
    torch.testing.assert_close(weight.read(0).dequantize(torch.float32), plain, atol=1e-6, rtol=1e-5)


def test_mxfp4_experts_are_read_one_by_one(tmp_path: Path) -> None:
    codes, exponents, plain = into_mxfp4(torch.randn(3, ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)))
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": exponents}
    (weight,) = stored_weights({"quant_method": "mxfp4"}, written(tmp_path, tensors))
    assert (weight.parameter, weight.shape, weight.experts) == (name, (ROWS, COLUMNS), 3)
    for expert in range(3):
        torch.testing.assert_close(weight.read(expert).dequantize(torch.float32), plain[expert])


def test_exponents_of_mxfp4_go_down_to_the_smallest(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    exponents = torch.tensor([0, 1, 127, 254], dtype=torch.uint8).view(1, 2, 2)
    codes = torch.full((1, 2, 2, 16), 0x22, dtype=torch.uint8)
    source = written(tmp_path, {f"{name}_blocks": codes, f"{name}_scales": exponents})
    (weight,) = stored_weights({"quant_method": "mxfp4"}, source)
    assert weight.read(0).dequantize(torch.float32)[:, ::32].flatten().tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.booleans(), st.booleans(), st.sampled_from([1, 2]))
def test_gptq_is_read_whatever_its_order_and_zeros(
    tmp_path_factory: pytest.TempPathFactory, seed: int, bits: int, symmetric: bool, ordered: bool, version: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 64, generator=generator)
    tensors, plain = gptq(bits, 16, version=version, symmetric=symmetric, ordered=ordered)(weight, generator)
    folder = tmp_path_factory.mktemp("gptq")
    source = written(folder, {f"{MODULE}.{part}": tensor for part, tensor in tensors.items()})
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    (stored,) = stored_weights(config, source)
    torch.testing.assert_close(stored.read(0).dequantize(torch.float32), plain, atol=1e-6, rtol=1e-5)


def test_blocks_of_bitsandbytes_may_go_on_from_row_to_row(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors, plain = bnb_4bit("nf4", nested=True)(torch.randn(6, 96, generator=generator), generator)
    source = written(tmp_path, {f"{MODULE}.{part}": tensor for part, tensor in tensors.items()})
    (weight,) = stored_weights(FORMATS["bnb-nf4"].config, source)
    torch.testing.assert_close(weight.read(0).dequantize(torch.float32), plain, atol=1e-6, rtol=1e-5)


def test_rules_of_gptqmodel_change_modules(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors, plain = gptq(8, 16, version=1, symmetric=True, ordered=False)(torch.randn(16, 64), generator)
    source = written(tmp_path, {f"{MODULE}.{part}": tensor for part, tensor in tensors.items()})
    rules = {r"-:.*lm_head": {}, r"+:.*up_proj": {"bits": 8, "group_size": 16}}
    (weight,) = stored_weights({**FORMATS["gptq-v2"].config, "checkpoint_format": "gptq", "dynamic": rules}, source)
    torch.testing.assert_close(weight.read(0).dequantize(torch.float32), plain, atol=1e-6, rtol=1e-5)


def setting(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors) -> None:
        name = f"{MODULE}.{part}"
        tensors[name] = make(tensors[name].clone())

    return change


def without(part: str) -> Change:
    def change(tensors: Tensors) -> None:
        del tensors[f"{MODULE}.{part}"]

    return change


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first element becomes another one."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float().flatten()
        wide[0] = value
        return wide.view(tensor.shape).to(tensor.dtype)

    return make


SCALES = {
    "ct-w8a16": "weight_scale",
    "ct-w4a16": "weight_scale",
    "ct-fp8": "weight_scale",
    "ct-nvfp4": "weight_global_scale",
    "fp8-block": "weight_scale_inv",
    "gptq-v2": "scales",
    "awq": "scales",
    "torchao-int8": "_weight_scale",
}


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", SCALES)
def test_scales_that_cannot_be_such(tmp_path: Path, name: str, value: float) -> None:
    text = refusal(tmp_path, name, setting(SCALES[name], first(value)))
    assert text.startswith(f"model.safetensors: {MODULE}.{SCALES[name]}: a scale is ")


BAD_TENSORS: dict[str, tuple[str, Change, str]] = {
    "no scales, int8": ("ct-w8a8", without("weight_scale"), "weight: is int8, but has no scales"),
    "no scales, int4": ("ct-w4a16", without("weight_scale"), "weight_packed: weight_scale is missing"),
    "no scales, fp8": ("fp8-tensor", without("weight_scale"), "weight: weight_scale is missing"),
    "no scales, gptq": ("gptq-v2", without("scales"), "qweight: scales is missing"),
    "no zeros, gptq": ("gptq-v2", without("qzeros"), "qweight: qzeros is missing"),
    "no scales, awq": ("awq", without("scales"), "qweight: scales is missing"),
    "no scales, nf4": ("bnb-nf4", without("weight.absmax"), "weight: absmax is missing"),
    "no state, nf4": ("bnb-nf4", without("weight.quant_state.bitsandbytes__nf4"), "__nf4 of its weight is missing"),
    "no table, nf4": ("bnb-nf4", without("weight.quant_map"), "weight: quant_map is missing"),
    "no nested scales": ("bnb-nf4-nested", without("weight.nested_absmax"), "weight: nested_absmax is missing"),
    "no scales, int8 of bitsandbytes": ("bnb-int8", without("SCB"), "weight: SCB is missing"),
    "no scales, torchao": ("torchao-int8", without("_weight_scale"), "_weight_qdata: _weight_scale is missing"),
    "no static scale": ("fp8-static", without("input_scale"), "weight: input_scale is missing"),
    "no zeros": ("ct-w4a16-ordered", without("weight_zero_point"), "weight_packed: weight_zero_point is missing"),
    "no global scale": ("ct-nvfp4", without("weight_global_scale"), "weight_packed: weight_global_scale is missing"),
    "scales of fewer rows": ("ct-w8a16", setting("weight_scale", lambda x: x[1:]), r"weight_scale: must be \[48\] or"),
    "scales of other groups": (
        "ct-w4a16",
        setting("weight_scale", lambda x: x[:, :1]),
        r"weight_scale: must be \[48, 2\]",
    ),
    "blocks of another size": ("fp8-block", setting("weight_scale_inv", lambda x: x[1:]), r"must be \[3, 2\]"),
    "zeros of other groups": ("gptq-v2", setting("qzeros", lambda x: x[1:]), r"qzeros: must be \[2, 6\]"),
    "fewer packed columns": ("ct-w4a16", setting("weight_packed", lambda x: x[:, 1:]), "weight_shape says"),
    "values as floats": ("ct-w8a16", setting("weight", torch.Tensor.float), "weight: must be int8, is float32"),
    "an index beyond": ("gptq-v1-ordered", setting("g_idx", first(2)), "g_idx: an index is out of range"),
    "an index below": ("gptq-v1-ordered", setting("g_idx", first(-1)), "g_idx: an index is out of range"),
    "a group of more": ("gptq-v1-ordered", setting("g_idx", lambda x: x * 0), "g_idx: a group has 64 columns, not 32"),
    "another order": ("ct-w4a16-ordered", setting("weight_g_idx", first(7)), "weight_g_idx: an index is out of range"),
    "no number of fp8": ("ct-fp8", setting("weight", first(float("nan"))), "weight: a value is no number"),
    "a negative static scale": ("fp8-static", setting("input_scale", torch.neg), "input_scale: a scale of inputs is -"),
    "another layout of rows": ("bnb-int8", setting("weight_format", lambda x: x + 1), "weight_format: must be 0"),
    "a state of no JSON": (
        "bnb-nf4",
        setting("weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1]),
        "bitsandbytes__nf4: is no state",
    ),
    "a state of another shape": ("bnb-nf4", setting("weight", lambda x: x[1:]), "but the shape in quant_state"),
    "values beyond 4 bits": ("ct-w4a8", setting("weight", first(8)), "weight: a value is beyond 4 bits"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_are_wrong(tmp_path: Path, case: str) -> None:
    name, change, pattern = BAD_TENSORS[case]
    text = refusal(tmp_path, name, change)
    assert re.search(pattern, text), text
    assert MODULE in text or "quant_method" in text


NEW_GROUP = ct_weights(4, "int", "group", group_size=24)
BAD_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown method": ("awq", {"quant_method": "eetq"}, "quant_method: 'eetq' is not supported"),
    "HQQ": ("awq", {"quant_method": "hqq"}, "quant_method: 'hqq' is not supported"),
    "quanto": ("awq", {"quant_method": "quanto"}, "quant_method: 'quanto' is not supported"),
    "no method": ("awq", {"quant_method": None}, "quant_method: None is not supported"),
    "GPTQ with 3 bits": ("gptq-v2", {"bits": 3}, "bits: GPTQ with 3 bits is not supported"),
    "GPTQ with 2 bits": ("gptq-v2", {"bits": 2}, "bits: GPTQ with 2 bits is not supported"),
    "bits that are no number": ("gptq-v2", {"bits": "4"}, "bits: must be int, got '4'"),
    "a group that does not divide": (
        "gptq-v2",
        {"group_size": 24},
        "qweight: quantization_config.group_size 24 does not",
    ),
    "a group of nothing": ("gptq-v2", {"group_size": 0}, "group_size: must be positive or -1, got 0"),
    "another version of GPTQ": ("gptq-v2", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
    "a rule that is no pattern": ("gptq-v2", {"dynamic": {"(": {}}}, "dynamic: '\\(' is no regular expression"),
    "a rule with 3 bits": ("gptq-v2", {"dynamic": {".*": {"bits": 3}}}, r"dynamic\.\.\*\.bits: GPTQ with 3 bits"),
    "a rule that skips what is quantized": ("gptq-v2", {"dynamic": {"-:.*": {}}}, "dynamic leaves this module out"),
    "AWQ with 3 bits": ("awq", {"bits": 3}, "bits: AWQ with 3 bits is not supported"),
    "AWQ in another layout": ("awq", {"version": "gemv"}, "version: AWQ's layout 'gemv' is not supported"),
    "AWQ with another group": ("awq", {"group_size": 24}, "group_size 24 does not divide its 64 columns"),
    "neither 4 nor 8 bits": ("bnb-nf4", {"load_in_4bit": False}, "load_in_4bit: either it or load_in_8bit"),
    "both 4 and 8 bits": ("bnb-nf4", {"load_in_8bit": True}, "load_in_4bit: either it or load_in_8bit"),
    "another table": ("bnb-nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'"),
    "an unknown table": ("bnb-nf4", {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type: must be nf4 or fp4"),
    "static inputs by blocks": ("fp8-block", {"activation_scheme": "static"}, "activation_scheme: blocks have dynamic"),
    "unknown inputs": ("fp8-block", {"activation_scheme": "none"}, "activation_scheme: must be dynamic or static"),
    "a block of one side": ("fp8-block", {"weight_block_size": [16]}, "weight_block_size: must be two sizes"),
    "2:4 sparsity": (
        "ct-w8a16",
        {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
        "sparsity_config: 2:4 sparsity",
    ),
    "2:4 sparsity of Marlin": ("ct-w8a16", {"format": "marlin-24"}, "2:4 sparsity"),
    "rotations": ("ct-w8a16", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config: transforms"),
    "no groups": ("ct-w8a16", {"config_groups": {}}, "config_groups: is empty"),
    "an unfinished checkpoint": ("ct-w8a16", {"quantization_status": "frozen"}, "quantization_status: must be 'comp"),
    "an unknown format": ("ct-w8a16", {"format": "mxfp6-pack-quantized"}, "format: 'mxfp6-pack-quantized' is not"),
    "3 bits": ("ct-w4a16", ct("pack-quantized", ct_weights(3, "int", "channel")), "3-bit int weights by channel"),
    "floats of a format of integers": (
        "ct-w8a16",
        ct("int-quantized", ct_weights(8, "float", "channel")),
        "8-bit float weights by channel are not supported in format 'int-quantized'",
    ),
    "a group without a size": (
        "ct-w4a16",
        ct("pack-quantized", ct_weights(4, "int", "group")),
        "group_size: must be pos",
    ),
    "an unknown strategy": ("ct-w4a16", ct("pack-quantized", ct_weights(4, "int", "row")), "strategy: must be one of"),
    "a group of 24 columns": ("ct-w4a16", ct("pack-quantized", NEW_GROUP), r"weights\.group_size 24 does not divide"),
    "quantized outputs": (
        "ct-w8a16",
        ct("int-quantized", ct_weights(8, "int", "channel"), output_activations=INT8_TENSOR),
        "output_activations: quantized outputs",
    ),
    "inputs with zeros": (
        "ct-w8a8",
        ct("int-quantized", ct_weights(8, "int", "channel"), {**INT8_TENSOR, "symmetric": False}),
        "input_activations.symmetric: inputs with zeros",
    ),
    "inputs of 6 bits": (
        "ct-w8a8",
        ct("int-quantized", ct_weights(8, "int", "channel"), {**INT8_TENSOR, "num_bits": 6}),
        "input_activations: 6-bit int inputs",
    ),
    "a target that is no pattern": (
        "ct-w8a16",
        ct("int-quantized", ct_weights(8, "int", "channel"), targets=["re:("]),
        "target 're:\\(' is no regular expression",
    ),
    "no target": (
        "ct-w8a16",
        ct("int-quantized", ct_weights(8, "int", "channel"), targets=["re:.*down_proj"]),
        "is quantized, but no target of quantization_config.config_groups names it",
    ),
    "packed, but of another format": (
        "ct-w4a16",
        ct("int-quantized", ct_weights(4, "int", "channel")),
        "weight_packed: .*: 'int-quantized' has it as",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configurations_that_are_wrong(tmp_path: Path, case: str) -> None:
    name, changes, pattern = BAD_CONFIGS[case]
    text = refusal(tmp_path, name, **changes)
    assert re.search(pattern, text), text
    assert "quantization_config" in text


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 130),
    st.sampled_from(["int", "float", "group", "channel", "tensor", "gptq", "Linear", "re:(", "pack-quantized", ""]),
    st.floats(allow_nan=True),
    st.lists(st.integers(-1, 64), max_size=3),
    st.dictionaries(st.sampled_from(["bits", "targets", "weights", "-:.*"]), st.integers(0, 9), max_size=2),
)


@given(st.data())
def test_any_configuration_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """One field, at any depth, becomes anything."""
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    config = json.loads(json.dumps(FORMATS[name].config))
    holder = config
    while True:
        key = data.draw(st.sampled_from(sorted(holder)))
        if not isinstance(holder[key], dict) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(VALUES)
    tensors, _, metadata = packed(name)
    source = written(tmp_path_factory.mktemp("any"), tensors, metadata)
    refusals = []
    try:
        for weight in stored_weights(config, source):
            weight.read(0)
    except ConfigError as error:
        refusals.append(error.message)
    assert not any("\n" in text for text in refusals)


def test_a_named_target_without_scales_is_refused(tmp_path: Path) -> None:
    config = ct("int-quantized", ct_weights(8, "int", "channel"), targets=["re:.*up_proj"])
    text = refusal(tmp_path, "ct-w8a16", without("weight_scale"), **config)
    assert text == f"model.safetensors: {MODULE}.weight: weight_scale is missing: no tensor {MODULE}.weight_scale"


def test_targets_by_path_come_before_those_by_class(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors, plain = ct_integers(8, None, packed=False)(torch.randn(16, 32), generator)
    config = ct("pack-quantized", ct_weights(4, "int", "group", group_size=32))
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*mlp\.up_proj$"],
        "weights": ct_weights(8, "int", "channel"),
        "format": "int-quantized",
    }
    source = written(tmp_path, {f"{MODULE}.{part}": tensor for part, tensor in tensors.items()})
    (weight,) = stored_weights(config, source)
    torch.testing.assert_close(weight.read(0).dequantize(torch.float32), plain)


def test_what_is_ignored_but_quantized_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, "ct-w8a16", ignore=[MODULE])
    assert "is quantized, but no target" in text


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{MODULE}.weight"] = torch.zeros(ROWS, COLUMNS)

    assert "is there twice, plain and as" in refusal(tmp_path, "gptq-v2", change)


def test_a_checkpoint_without_any_quantized_tensor(tmp_path: Path) -> None:
    source = written(tmp_path, {"model.norm.weight": torch.ones(4)})
    with pytest.raises(ConfigError, match="no tensor of the checkpoint is quantized so"):
        stored_weights({"quant_method": "gptq"}, source)


@pytest.mark.parametrize("config", [{"quantization_config": 3}, {"quantization_config": [1]}])
def test_a_configuration_that_is_none(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quantization_config must be a dict"):
        quantization_config(config)


def test_two_configurations() -> None:
    one, other = {"quant_method": "awq"}, {"quant_method": "gptq"}
    assert quantization_config({"text_config": {"quantization_config": one}}) == one
    assert quantization_config({"quantization_config": one, "text_config": {"quantization_config": one}}) == one
    with pytest.raises(ConfigError, match="which differ"):
        quantization_config({"quantization_config": one, "text_config": {"quantization_config": other}})
    assert quantization_config({}) is None


def test_values_are_read_from_stacks_of_every_type(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(24, dtype=torch.int32).view(2, 3, 4),
        "b": torch.randn(3, 2).bfloat16(),
        "c": torch.tensor(3, dtype=torch.uint8),
        "d": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "e": torch.zeros(0, 3),
    }
    source = written(tmp_path, tensors)
    for name, tensor in tensors.items():
        assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(source.read(name).view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(source.read("a", 1), tensors["a"][1])


def test_a_tensor_of_another_size_than_its_shape(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ConfigError, match=r"model\.safetensors: x: \[3\] of F32 takes 12 bytes"):
        TensorFiles([read_header(path)])


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_lies_on_its_device_whenever_it_is_read(form: str) -> None:
    held, meta = ReloadableWeight(lambda: make(form, 24, 64, 32)), torch.device("meta")
    held.device = meta

    def devices(weight: QuantizedWeight) -> set[torch.device]:
        values = [getattr(weight, field.name) for field in dataclasses.fields(weight)]
        return {value.device for value in values if isinstance(value, torch.Tensor)}

    assert devices(held.get()) == {meta}
    held.load()
    assert held.nbytes == make(form, 24, 64, 32).nbytes
    held.apply(lambda weight: weight.cut_rows(0, 8))
    assert devices(held.get()) == {meta}
    held.release()
    assert held.nbytes == 0
    assert devices(held.get()) == {meta}
    assert held.get().rows == 8
