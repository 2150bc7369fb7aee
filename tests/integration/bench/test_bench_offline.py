"""``baton bench offline``: a real engine, a table and JSON lines, and what it cannot do in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.main import main

TINY = str(Path(__file__).parents[3] / "models" / "baton-tiny")
SMALL = ["--isl", "24", "--osl", "6", "--batch-size", "2", "--repeats", "2", "--requests", "5", "--kv-blocks", "64"]


def test_latency_and_throughput(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "batches.svg"
    assert main(["bench", "offline", "--model", TINY, *SMALL, "--json", "--plot", str(plot)]) == 0
    records = {each["record"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(records) == ["run", "latency", "throughput", "result"]
    run, latency, throughput = records["run"], records["latency"], records["throughput"]
    assert (run["model"], run["isl"], run["osl"]) == (TINY, 24, 6)
    assert len(latency["batches_ms"]) == 2
    assert 0 < latency["ttft_ms"]["p50"] <= latency["batch_ms"]["p99"]
    assert latency["tpot_ms"] > 0
    assert throughput["output_tokens_per_s"] == pytest.approx(5 * 6 / throughput["seconds"], rel=0.01)
    assert throughput["total_tokens_per_s"] == pytest.approx(5 * 30 / throughput["seconds"], rel=0.01)
    assert records["result"]["exit_code"] == 0
    assert plot.read_text().startswith("<?xml")
    assert main(["bench", "offline", "--model", TINY, *SMALL, "--mode", "throughput"]) == 0
    out = capsys.readouterr().out
    assert "Throughput, 5 prompts at once" in out
    assert "Latency" not in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--isl", "0"], "--isl"),
        (["--isl", "4000", "--osl", "4000"], "--isl and --osl together are more than the model's"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--plot", "picture.gif"], ".svg"),
    ],
)
def test_what_it_cannot_do_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--model", TINY, *SMALL, *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("baton")]
    assert len(lines) == 1
    assert told in lines[0]
