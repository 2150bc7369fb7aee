"""``baton bench quality``: its figures against transformers' own, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.support.models.checkpoints import TRAINING_TEXT, make_checkpoint
from transformers import AutoModelForCausalLM

from baton.cli.main import main
from baton.tokenizer import Tokenizer
from baton_bench.quality import QualityRecord, QualityRunRecord, draw, print_tables


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quality") / "model", "llama", initializer_range=0.1)


def bench(capsys: pytest.CaptureFixture[str], *args: object) -> list[dict[str, Any]]:
    assert main(["bench", "quality", "--json", "--dtype", "float32", *map(str, args)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_figures_are_those_of_transformers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TRAINING_TEXT)
    records = bench(
        capsys, "--model", model, "--text", text, "--tokens", 200, "--window", 64, "--isl", 24, "--batch-size", 2,
        "--steps", 3, "--prefill-chunk", 24, "--config", "quantization=int4",
    )  # fmt: skip
    run, reference, int4, result = records
    assert (run["tokens"], run["window"], result["exit_code"]) == (192, 64, 0)
    tokens = torch.tensor(Tokenizer.load(model).encode(TRAINING_TEXT)[:192]).view(3, 64)
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = plain(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert reference["config"] == "reference"
    assert reference["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-3)
    assert reference["kl"] < 1e-6
    assert reference["top1"] == 1.0
    assert 0 < int4["kl"] <= int4["kl_p99"]
    assert 0.2 < int4["top1"] < 1.0  # of weights drawn at random, whose tokens are close calls
    for record in (reference, int4):
        assert len(record["decode_tokens_per_s"]) == 2
        assert min(record["prefill_tokens_per_s"], *record["decode_tokens_per_s"]) > 0
        assert record["kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, float32
        assert record["weight_bytes"] > 0
    assert "against exact arithmetic" in int4["operators"]
    assert "against exact arithmetic" not in reference["operators"]


def test_tables_and_pictures_show_every_configuration(tmp_path: Path) -> None:
    machine = {"host": "here", "load": 0.0, "cpus": 2}
    speeds = {"prefill_tokens_per_s": 100.0, "decode_tokens_per_s": (10.0, 60.0)}
    sizes = {"weight_bytes": 3 << 20, "kv_bytes_per_token": 512}
    run = QualityRunRecord("tiny", "a.txt", 192, 64, 24, 8, "cpu", machine)
    plain = QualityRecord("reference", "modules", 12.5, 0.0, 0.0, 1.0, **speeds, **sizes)
    int8 = QualityRecord("quantization=int8", "fused", 12.625, 0.0042, 0.01, 0.975, None, (), **sizes)
    console = Console(width=150, record=True)
    print_tables([run, plain, int8], console)
    shown = console.export_text()
    assert "tiny: 192 tokens of a.txt text in windows of 64" in shown
    assert "decode 8" in shown
    (row,) = [line for line in shown.splitlines() if "int8" in line and "12.625" in line]
    assert "0.0042" in row
    assert "0.9750" in row
    assert "3 MiB" in row
    assert "quantization=int8: fused" in shown
    draw([run, plain, int8], tmp_path / "quality.svg")
    assert (tmp_path / "quality.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--config", "quantization"], "--config 'quantization' is no field of the engine and its value"),
        (["--config", "quantisation=int8"], "--config 'quantisation=int8' is no field of the engine"),
        (["--config", "quantization=int3"], "must be one of none, int8, int4, fp8, nf4, got 'int3'"),
        (["--text", "/none"], "--text /none cannot be read"),
        (["--tokens", "3"], "--tokens must be between 16 and"),
        (["--config", "model=/none"], "model=/none: /none is neither a directory"),
    ],
)
def test_mistakes(model: Path, capsys: pytest.CaptureFixture[str], args: list[str], why: str) -> None:
    assert main(["bench", "quality", "--model", str(model), "--steps", "0", *args]) == 2
    assert why in capsys.readouterr().err
