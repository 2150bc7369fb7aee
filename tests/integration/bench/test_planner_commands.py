"""``baton profile`` with a real engine, a plan from what it wrote, and ``baton tune`` with real deployments."""

from __future__ import annotations

import json

import pytest

from baton.cli.main import main
from baton_bench.simulator.profile import Profile


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "p.json"
    words = ["profile", "--dtype", "float32", "--isl", "64", "--repeats", "2", "--kv-blocks", "200"]
    assert main([*words, "--max-num-seqs", "8", "--output", str(path)]) == 0
    return path


def test_a_measured_profile_has_lines_that_fit(profile):
    found = Profile.load(profile)
    (engine,) = found.engines
    assert engine.kv_tokens == 3200
    assert found.layers == 6
    assert found.kv_bytes_per_token == 6 * 2 * 32 * 2 * 4
    assert found.limits.max_num_seqs == 8
    assert {"prefill", "decode", "mixed", "transfer"} == engine.residuals.keys()
    assert engine.prefill.prompt(64) > 0
    assert engine.decode.seconds(4, 400) > 0
    assert found.link.bytes_per_s > 1e6


def test_it_can_be_planned_with(profile, capsys):
    words = ["plan", "--profile", str(profile), "--isl", "48", "--osl", "8", "--gpus", "2", "--slo", "e2e:60s"]
    assert main([*words, "--requests", "60", "--no-sensitivity", "--precision", "0.5", "--json", "--cores", "2"]) == 0
    ratios = {row["ratio"] for row in json.loads(capsys.readouterr().out)["deployments"]}
    assert ratios == {"1P1D", "0P2D"}


@pytest.mark.slow
def test_tune_measures_deployments_and_writes_the_best(tmp_path, capsys):
    file, notes, output = tmp_path / "c.yaml", tmp_path / "n.jsonl", tmp_path / "t.yaml"
    file.write_text("ratio: 1P1D\nworker: {flags: {dtype: float32, kv-blocks: 200}}\nslo: {e2e-ms: 60000}\n")
    words = ["tune", "-f", str(file), "--tune", "ratio", "--request-rate", "8", "--requests", "8", "--isl", "16"]
    words += ["--osl", "4", "--notes", str(notes), "--output", str(output)]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "goodput: " in first.out
    trials = [json.loads(line) for line in notes.read_text().splitlines()][1:]
    assert {each["settings"]["ratio"] for each in trials} == {"1P1D", "0P2D"}
    assert all(each["goodput"] > 0 and not each["error"] for each in trials)
    assert json.loads(output.read_text())["ratio"] in {"1P1D", "0P2D"}
    # Everything is known now: nothing is started again.
    assert main(words) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert "going on after 2 trials" in second.err
