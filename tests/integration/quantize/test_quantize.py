"""``baton quantize``: what it writes is read alike by Baton, transformers and the formats' own packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from safetensors.torch import load_file
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import TRAINING_TEXT, make_checkpoint
from transformers import AutoModelForCausalLM

from baton.cli.main import main
from baton.config import EngineConfig
from baton.config.demo_model import default_model
from baton.engine.executor.self_check import compare
from baton.engine.llm import LLM
from baton.engine.models.loader import load_model
from baton.quantize.calibration import LayeredModel, observe, run_layer
from baton.quantize.schemes import SCHEMES, quantize
from baton.types import SamplingParams

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MOST_ERROR = {"int8": 0.01, "fp8": 0.05, "int4": 0.15, "nf4": 0.13}
"""Of weights, |difference| / |weights|."""
CALIBRATION = TRAINING_TEXT * 4


def run(*args: object) -> int:
    return main(["quantize", *map(str, args)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "llama", dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a scheme's checkpoint, once."""
    root = tmp_path_factory.mktemp("quantized")
    text = root / "text.txt"
    text.write_text(CALIBRATION)

    def make(scheme: str, *, calibrated: bool = False) -> Path:
        out = root / f"{scheme}-{calibrated}"
        if not out.exists():
            more = ["--calibration", text, "--calibration-tokens", 512] if calibrated else []
            assert run(plain, out, "--scheme", scheme, *more) == 0
        return out

    return make


def logits(path: Path, tokens: torch.Tensor, **changes: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = (
            load_model(EngineConfig(model=str(path), dtype="float32", **changes)).module(tokens).logits
        )
    return found[0]


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("scheme", MOST_ERROR)
def test_transformers_reads_the_same_numbers(written: Callable[..., Path], scheme: str, calibrated: bool) -> None:
    if scheme == "nf4":
        pytest.importorskip("bitsandbytes")
        pytest.importorskip("accelerate")
    path, tokens = written(scheme, calibrated=calibrated), torch.arange(6, 60)[None]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(tokens).logits[0]
    found = logits(path, tokens)
    tolerance = 1e-2 if scheme == "nf4" else 1e-4  # bitsandbytes computes in the type it was written for
    assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("scheme", MOST_ERROR)
def test_weights_are_close_and_all_else_is_as_it_was(plain: Path, written: Callable[..., Path], scheme: str) -> None:
    before, after = load_file(plain / "model.safetensors"), load_file(written(scheme) / "model.safetensors")
    loaded = load_model(EngineConfig(model=str(written(scheme)), dtype="float32")).module
    for name, tensor in before.items():
        if "layers" in name and tensor.ndim == 2:
            weight = loaded.get_submodule(name.removesuffix(".weight")).reloadable.get().dequantize()
            assert float((weight - tensor.float()).norm() / tensor.float().norm()) < MOST_ERROR[scheme]
        else:
            assert torch.equal(after[name], tensor)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (written(scheme) / name).read_bytes() == (plain / name).read_bytes()
    config = json.loads((written(scheme) / "config.json").read_text())
    kind = "llm_int8_skip_modules" if scheme == "nf4" else "ignore"
    assert config["quantization_config"][kind] == ["lm_head"]


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_compressed_tensors_decompresses_the_same_weights(written: Callable[..., Path], scheme: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    path = written(scheme)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.down_proj"
    state = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    found = compressor.decompress(state, parsed.config_groups["group_0"])["weight"]
    loaded = load_model(EngineConfig(model=str(path), dtype="float32")).module
    expected = loaded.get_submodule(name).reloadable.get().dequantize()
    torch.testing.assert_close(found.float(), expected.to(found.dtype).float(), rtol=1e-2, atol=1e-3)


def test_bitsandbytes_dequantizes_the_same_weights(written: Callable[..., Path]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    path, name = written("nf4"), "model.layers.1.mlp.down_proj"
    tensors = load_file(path / "model.safetensors")
    parts = {key: value for key, value in tensors.items() if key.startswith(f"{name}.weight.")}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    found = functional.dequantize_4bit(tensors[f"{name}.weight"], quant_state=state)
    loaded = load_model(EngineConfig(model=str(path), dtype="float32")).module
    expected = loaded.get_submodule(name).reloadable.get().dequantize(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("scheme", MOST_ERROR)
def test_tokens_are_those_of_the_dequantized_model(written: Callable[..., Path], tmp_path: Path, scheme: str) -> None:
    path = written(scheme)
    loaded = load_model(EngineConfig(model=str(path), dtype="float32"))
    plain = make_checkpoint(tmp_path / "plain", "llama", **SIZES)
    model: Any = AutoModelForCausalLM.from_pretrained(plain)
    state = {name: tensor for name, tensor in loaded.module.state_dict().items() if name in model.state_dict()}
    for name, module in loaded.module.named_modules():
        if hasattr(module, "reloadable"):
            state[f"{name}.weight"] = module.reloadable.get().dequantize()
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    model.save_pretrained(plain)
    prompts = mixed_prompts(4, 512, count=3, longest=40)
    with LLM(EngineConfig(model=str(path), dtype="float32", kv_blocks=64, max_model_len=256)) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
    assert [output.token_ids for output in outputs] == hf_greedy(plain, prompts, 12)


def test_calibration_loses_less(tmp_path: Path) -> None:
    """On the demo model and eight texts that calibration has not seen, of a pinned package: they stay the same."""
    model, text = Path(default_model()), tmp_path / "text.py"
    sources = [
        path.read_text() for path in sorted(Path(jinja2.__file__).parent.glob("*.py")) if path.stat().st_size > 6000
    ]
    text.write_text("\n".join(sources[:3]))
    held_out = torch.cat([load_tokens(model, source) for source in sources[-8:]])
    for name, more in (("rtn", []), ("aware", ["--calibration", text, "--calibration-tokens", 2048])):
        assert run(model, tmp_path / name, "--scheme", "int4", *more) == 0
    expected = logits(model, held_out)
    rtn, aware = (compare(logits(tmp_path / name, held_out), expected) for name in ("rtn", "aware"))
    assert aware.kl < 0.92 * rtn.kl
    assert aware.top1 >= rtn.top1 - 0.01


def load_tokens(model: Path, text: str) -> torch.Tensor:
    from baton.tokenizer import Tokenizer

    return torch.tensor([Tokenizer.load(model).encode(text)[:512]])


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "starcoder2"])
def test_layers_run_one_by_one_as_the_whole_model_does(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    layered = LayeredModel(model.config, tensors.get)
    tokens = [list(range(6, 70)), list(range(300, 364))]
    hidden, calls = layered.hidden_states(tokens)
    for index, call in enumerate(calls):
        hidden = run_layer(layered.fill(index), hidden, call)
        layered.empty(index)
        assert all(parameter.is_meta for parameter in layered._layers[index].parameters())
    with torch.inference_mode():
        normed = model.model(torch.tensor(tokens)).last_hidden_state
    norm = model.model.norm if hasattr(model.model, "norm") else model.model.final_layernorm
    with torch.inference_mode():
        torch.testing.assert_close(norm(torch.cat(hidden)), normed, rtol=1e-4, atol=1e-4)


def test_statistics_are_those_of_all_inputs(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layered = LayeredModel(model.config, load_file(folder / "model.safetensors").get)
    hidden, calls = layered.hidden_states([list(range(6, 70)), list(range(100, 164))])
    found = observe(layered.fill(0), hidden, calls[0])
    with torch.inference_mode():
        normed = model.model.layers[0].input_layernorm(torch.cat(hidden))
    torch.testing.assert_close(found["self_attn.q_proj"].energy, normed.square().mean((0, 1)), rtol=1e-4, atol=1e-6)
    assert found["self_attn.q_proj"].source == "input_layernorm"
    assert found["mlp.up_proj"].source == "post_attention_layernorm"
    assert found["mlp.down_proj"].source == ""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_calibrated_scales_lose_no_more_than_plain_ones(scheme: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 128, generator=generator) * torch.randn(1, 128, generator=generator).exp()
    energy = torch.randn(128, generator=generator).exp()
    plain = quantize(weight, SCHEMES[scheme], 32, torch.float32)
    aware = quantize(weight, SCHEMES[scheme], 32, torch.float32, energy)
    errors = [float(((each.dequantize() - weight).square() * energy).sum()) for each in (plain, aware)]
    assert errors[1] <= errors[0]
    zeros = quantize(torch.zeros(4, 32), SCHEMES[scheme], 32, torch.bfloat16, torch.ones(32))
    assert torch.equal(zeros.dequantize(), torch.zeros(4, 32))


def test_large_checkpoints_are_written_in_several_files(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.quantize.run.MAX_FILE_BYTES", 50_000)
    assert run(plain, tmp_path / "out", "--scheme", "int8") == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert not list((tmp_path / "out").glob("*.partial"))
    tokens = torch.arange(6, 30)[None]
    assert logits(tmp_path / "out", tokens).isfinite().all()


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", moe_intermediate_size=64, initializer_range=0.1)
    assert run(folder, tmp_path / "out", "--scheme", "int8") == 0
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert "model.layers.0.mlp.experts.3.down_proj.weight_packed" in names
    assert "model.layers.0.mlp.gate.weight" in names
    tokens = torch.arange(6, 30)[None]
    found, expected = logits(tmp_path / "out", tokens), logits(folder, tokens)
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert run(folder, tmp_path / "no", "--scheme", "int8", "--calibration", __file__) == 2


# What is refused


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--scheme", "int4", "--group", "48"], "--group 48 does not divide the"),
        (["--scheme", "int8", "--group", "64"], "--group is for int4 and nf4, got 64 with int8"),
        (["--scheme", "int4", "--group", "4"], "--group is between 8 and 4096, got 4"),
        (["--scheme", "int8", "--ignore", "("], "--ignore '(' is no regular expression"),
        (["--scheme", "int8", "--ignore", ".*"], "has no weight of a linear layer to quantize"),
        (["--scheme", "int8", "--calibration", "/none"], "--calibration /none cannot be read"),
        (["--scheme", "int8", "--calibration-tokens", "8"], "--calibration-tokens must be at least 64"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], why: str
) -> None:
    assert run(plain, tmp_path / "out", *args) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_used(
    plain: Path, written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    assert run(plain, tmp_path / "there", "--scheme", "int8") == 2
    assert "exists already" in capsys.readouterr().err
    assert run(written("int8"), tmp_path / "out", "--scheme", "int8") == 2
    assert "is quantized already" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert run(plain, tmp_path / "out", "--scheme", "int8", "--calibration", short) == 2
    assert "at least 64 are needed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_weights_that_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", **SIZES)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(folder)
    assert run(folder, tmp_path / "out", "--scheme", "fp8") == 2
    message = capsys.readouterr().err
    assert "model.safetensors: model.layers.1.mlp.up_proj.weight: a value is infinite or no number" in message
    assert not (tmp_path / "out.partial").exists()
