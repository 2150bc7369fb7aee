"""``baton profile`` with a real engine, a plan from what it wrote, and ``baton tune`` with real deployments."""

from __future__ import annotations

import json

import pytest

from baton.cli.main import main
from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton_bench.planner.profiling import _DECODE_STEPS, _WARM_UP, _Meter
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


def test_decodes_of_long_prompts_are_measured_in_whole_batches():
    """While the last prompt is computed chunk by chunk, the first sequence generates: it must not have ended then."""
    config = EngineConfig(dtype="float32", kv_blocks=200, max_num_batched_tokens=24, prefix_caching=False)
    core = build_engine(config)
    batches: list[int] = []
    step = core.step

    def counted():
        outputs = step()
        batches.append(sum(len(output.token_ids) for output in outputs))
        return outputs

    core.step = counted
    try:
        _, context, batch = _Meter(core, config, 128, 1)._decode(4, 128)
    finally:
        core.executor.close()
        core.shards.close()
    measured = [tokens for tokens in batches[batches.index(4) :] if tokens]  # without the word that it was aborted
    assert measured == [4] * len(measured)
    assert len(measured) == 1 + _WARM_UP + _DECODE_STEPS - 1
    tokens_before = sum(batches) - 4 * (_DECODE_STEPS - 1)
    assert (context, batch) == (4 * 128 + tokens_before + 4 * (_DECODE_STEPS - 1) / 2, 4.0)


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
