"""Profiles as files, the search, and the command line."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from baton.cli.main import main
from baton.config.cluster_file import ClusterFile
from baton.errors import ConfigError
from baton_bench.planner.plan import PlanOptions, make_plan
from baton_bench.planner.profiling import (
    fit_decode,
    fit_prefill,
    fit_transfer,
    known_shape,
    roofline_profile,
)
from baton_bench.planner.search import Goal, Search, candidates, describe, limit_of
from baton_bench.planner.workload import Workload, from_lengths
from baton_bench.simulator.profile import (
    DecodeCost,
    EngineProfile,
    FitQuality,
    Limits,
    Link,
    Memory,
    Overheads,
    PrefillCost,
    Profile,
)
from baton_bench.traces import write_trace

ENGINE = EngineProfile(
    1,
    1,
    PrefillCost(0.005, 1e-4, 1e-9),
    DecodeCost(0.01, 1e-7, 2e-4),
    100_000,
    0.5,
    {"prefill": FitQuality(9, 0.1, 0.2)},
)
PROFILE = Profile(
    model="models/some",
    source="a test",
    layers=16,
    kv_bytes_per_token=1000.0,
    engines=(ENGINE,),
    link=Link(1e-4, 1e9),
    limits=Limits(step_budget_ms=40.0),
    overheads=Overheads(0.001, 0.002, 0.0001),
    memory=Memory(80e9, 10e9),
)


def nothing(what: str, left: int) -> None: ...


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "p.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    plain = dataclasses.replace(PROFILE, memory=None, limits=Limits())
    plain.save(path)
    assert Profile.load(path) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=7), "no profile of version 1"),
        (lambda d: d.pop("layers"), "missing required field `layers`"),
        (lambda d: d["engines"][0]["decode"].update(per_row_s=1), r"\$.engines\[0\].decode.per_row_s is not known"),
        (lambda d: d.update(colour=1), r"\$.colour is not known"),
        (
            lambda d: d["engines"][0]["prefill"].update(fixed_s="x"),
            r"Expected `float`, got `str` - at `\$.engines\[0\].prefill.fixed_s`",
        ),
        (lambda d: d["engines"][0].update(tp=0), r"Expected `int` >= 1 - at `\$.engines\[0\].tp`"),
        (lambda d: d["engines"][0].update(overlap=2), r"Expected `float` <= 1.0 - at `\$.engines\[0\].overlap`"),
        (lambda d: d["link"].update(bytes_per_s=0), r"Expected `float` > 0.0 - at `\$.link.bytes_per_s`"),
        (lambda d: d["link"].update(layerwise=1), r"Expected `bool`, got `int` - at `\$.link.layerwise`"),
        (lambda d: d.update(engines=[]), r"Expected `array` of length >= 1 - at `\$.engines`"),
        (lambda d: d.update(limits=3), r"Expected `object`, got `int` - at `\$.limits`"),
    ],
)
def test_mistakes_in_a_profile_name_file_and_field(tmp_path, change, message):
    value = json.loads(PROFILE.to_json())
    change(value)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=message) as error:
        Profile.load(path)
    assert str(path) in error.value.message
    path.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        Profile.load(path)


def test_shapes_that_were_not_measured_follow_from_the_nearest():
    engine = PROFILE.engine(4, 1)
    assert engine is not None
    factor = (2 * 0.9) ** -2
    assert engine.prefill.per_token_s == pytest.approx(factor * ENGINE.prefill.per_token_s)
    assert engine.decode.fixed_s == pytest.approx(factor * ENGINE.decode.fixed_s)
    assert engine.kv_tokens == int((4 * 0.9 * 80e9 - 10e9) / 1000)
    staged = PROFILE.engine(1, 2)
    assert staged is not None
    assert (staged.prefill, staged.devices) == (ENGINE.prefill, 2)
    assert dataclasses.replace(PROFILE, memory=Memory(80e9, 100e9)).engine(2, 1) is not None
    assert dataclasses.replace(PROFILE, memory=Memory(80e9, 200e9)).engine(2, 1) is None


def test_fits_find_the_lines_that_points_were_made_of():
    rng = np.random.default_rng(0)
    sizes = [(float(n), 0.5 * n * n) for n in (16, 32, 64, 128, 256, 512)]
    points = [((0.003 + 2e-4 * n + 3e-8 * p) * rng.uniform(0.98, 1.02), n, p) for n, p in sizes]
    cost, fit = fit_prefill(points)
    assert cost.per_token_s == pytest.approx(2e-4, rel=0.1)
    assert (fit.points, fit.median_error < 0.02, fit.worst_error < 0.04) == (6, True, True)
    cost, _ = fit_decode([(0.01 + 1e-6 * c + 1e-4 * b, c, b) for c, b in ((16, 1), (512, 1), (256, 16), (8192, 16))])
    assert dataclasses.astuple(cost) == pytest.approx((0.01, 1e-6, 1e-4), rel=1e-6)
    # What would be negative is left out.
    cost, _ = fit_decode([(0.01 - 1e-9 * c, c, 1.0) for c in (100.0, 1000.0, 10000.0)])
    assert cost.per_context_s == 0
    latency, rate, _ = fit_transfer([(0.001 + s / 1e9, s) for s in (1e5, 1e6, 1e7)])
    assert (latency, rate) == pytest.approx((0.001, 1e9))
    with pytest.raises(ConfigError, match="too few"):
        fit_prefill(points[:2])


def test_a_roofline_says_what_published_figures_allow():
    shape = known_shape("llama-70b", 70.6e9, 8192, 64)
    assert shape.kv_bytes_per_token == 327_680
    profile = roofline_profile("h100-sxm", shape, (1, 2, 4, 8))
    assert [engine.tp for engine in profile.engines] == [2, 4, 8]  # 141 GB of weights do not fit into one
    four = profile.engine(4, 1)
    assert four is not None
    # Weights once per step: 141.2 GB over four memories at three quarters of 3.35 TB/s.
    assert four.decode.fixed_s == pytest.approx(141.2e9 / (4 * 0.75 * 3.35e12), rel=0.4)
    assert four.decode.fixed_s > 141.2e9 / (4 * 0.75 * 3.35e12)
    assert 1 / four.prefill.per_token_s == pytest.approx(4 * 0.55 * 989e12 / (2 * 70.6e9), rel=0.2)
    with pytest.raises(ConfigError, match="fits into none"):
        roofline_profile("h100-sxm", shape, (1,))
    with pytest.raises(ConfigError, match="must be one of"):
        roofline_profile("abacus", shape, (1,))


def goal(**more) -> Goal:
    return Goal(**{"slos": {"ttft": 300.0, "itl": 20.0}, "attainment": 0.9, "gpus": 4, "precision": 0.1, **more})


def test_candidates_use_the_gpus_and_are_tried_once():
    found = list(candidates(PROFILE, goal(gpus=6, tps=(1, 2), pps=(1,))))
    names = [describe(each) for each in found]
    assert len(names) == len(set(names))
    assert {"0P6D", "0P3D (decode tp 2)", "3P3D", "3P3D strict", "2P2D (decode tp 2)", "2P2D (prefill tp 2)"} <= set(
        names
    )
    for each in found:
        assert each.devices <= 6
        assert each.devices > 6 - max(each.prefill.devices, each.decode.devices)
    with pytest.raises(ConfigError, match="no shape"):
        list(candidates(dataclasses.replace(PROFILE, memory=Memory(1e9, 1e12)), goal(tps=(2,))))
    assert list(candidates(PROFILE, goal(), 99_999))
    with pytest.raises(ConfigError, match="longest request"):
        list(candidates(PROFILE, goal(), 100_000))


def test_long_prompts_want_prefill_and_long_outputs_want_decode():
    ratios = {}
    for isl, osl in ((2000, 16), (200, 300)):
        workload = from_lengths(isl, osl, 60, seed=1)
        search = Search(workload, goal(slos={"ttft": 1500.0, "itl": 20.0}, gpus=3, precision=0.2))
        best = next(each for each in search.best(list(candidates(PROFILE, search.goal)), nothing)
                    if each.deployment.prefills)  # fmt: skip
        ratios[isl] = best.deployment.prefills / best.deployment.decodes
        assert best.rate is not None
        assert best.rate <= 1.1 * best.bounds.rate
    assert ratios[2000] > 1 > ratios[200]


def test_a_plan_names_a_winner_and_says_what_it_hangs_on(tmp_path):
    workload = from_lengths(1000, 50, 60, seed=2)
    plan = make_plan(PlanOptions(PROFILE, workload, goal(gpus=2, precision=0.3), rate=2.0), nothing)
    found = plan.document()
    rows = found["deployments"]
    assert [row["goodput_per_gpu"] for row in rows] == sorted((row["goodput_per_gpu"] for row in rows), reverse=True)
    assert any(row["prefill"] is None for row in rows)
    assert all(row["limit"] for row in rows)
    assert plan.succeeded
    assert found["at_rate"]["attainment"] >= 0.9
    slower = {row["what"]: row["goodput"] for row in found["sensitivity"]}
    assert slower["prompts a quarter longer"] <= rows[0]["goodput"] * 1.05
    assert len(found["checks"]) >= 2
    json.dumps(found, allow_nan=False)


def test_too_few_requests_are_repeated_until_the_targets_break():
    workload = from_lengths(200, 30, 150, seed=2)
    search = Search(workload, goal(slos={"ttft": 500.0, "itl": 50.0}, precision=0.1))
    deployment = next(each for each in candidates(PROFILE, search.goal) if not each.prefills)
    assert not search.goodput(deployment).reached
    (result,) = search.best([deployment], nothing)
    assert result.reached
    assert result.requests in (600, 2400)
    assert result.rate is not None
    assert result.rate < 1.05 * result.bounds.rate
    assert "breaks" in limit_of(result, search.goal)


def test_a_search_that_breaks_nothing_says_so():
    workload = from_lengths(200, 30, 50, seed=2)
    plan = make_plan(PlanOptions(PROFILE, workload, goal(slos={"ttft": 1e6}), ratio="0P1D", sensitivity=False), nothing)
    (row,) = plan.document()["deployments"]
    assert not row["reached"]
    assert row["requests"] == 800
    assert row["goodput"] <= row["bound"] + 1e-3
    assert row["limit"].startswith("not reached: 800 requests")
    assert any("expected: at least" in line for line in plan.headline())


def test_repeated_requests_share_nothing_and_keep_the_rate():
    workload = Workload.of("x", [dataclasses.replace(each, blocks=(0,)) for each in from_lengths(500, 10, 5).requests])
    longer = workload.repeated(3)
    assert [each.blocks for each in longer.requests[4:6]] == [(0,), (1,)]
    assert len(longer.requests) == 15
    assert longer.rate == pytest.approx(workload.rate, rel=0.1)
    assert [each.at_ms for each in longer.requests] == sorted(each.at_ms for each in longer.requests)


def test_a_profile_that_does_not_fit_warns(tmp_path, capsys):
    noisy = dataclasses.replace(ENGINE, residuals={"decode": FitQuality(9, 0.38, 0.71)})
    path = tmp_path / "p.json"
    dataclasses.replace(PROFILE, engines=(noisy,)).save(path)
    words = ["plan", "--profile", str(path), "--isl", "600", "--osl", "40", "--gpus", "1", "--slo", "ttft:1s"]
    assert main([*words, "--requests", "50", "--ratio", "0P1D", "--no-sensitivity", "--precision", "0.3"]) == 0
    assert "fit of decode (tp 1, pp 1) is off by 38% in the median and 71% at most" in " ".join(
        capsys.readouterr().out.split()
    )


def test_targets_that_nothing_keeps_have_no_winner():
    workload = from_lengths(1000, 100, 100, seed=2)
    plan = make_plan(PlanOptions(PROFILE, workload, goal(slos={"ttft": 1.0})), nothing)
    assert plan.winner is None
    assert not plan.succeeded


def test_longer_prompts_share_what_they_shared():
    workload = Workload.of("x", [dataclasses.replace(each, blocks=(0,)) for each in from_lengths(500, 10, 2).requests])
    longer = workload.longer(isl=2.0, osl=1.5)
    assert [each.input_tokens for each in longer.requests] == [1000, 1000]
    assert [each.blocks[0] for each in longer.requests] == [0, 0]
    assert longer.requests[0].blocks[1] != longer.requests[1].blocks[1]
    assert longer.osl == 15


# The command line


@pytest.fixture
def profile_file(tmp_path):
    path = tmp_path / "p.json"
    PROFILE.save(path)
    return str(path)


def test_plan_writes_a_deployment_that_up_can_read(tmp_path, profile_file, capsys):
    trace, output = tmp_path / "t.jsonl", tmp_path / "cluster.yaml"
    write_trace(trace, from_lengths(600, 40, 100, seed=3).requests)
    words = ["plan", "--profile", profile_file, "--trace", str(trace), "--gpus", "2", "--output", str(output)]
    words += ["--slo", "ttft:500ms", "--slo", "itl:25ms", "--precision", "0.2", "--tp-sizes", "1", "--no-sensitivity"]
    plot = tmp_path / "p.svg"
    assert main([*words, "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "what limits it" in shown
    assert "Beside closed forms" in shown
    assert plot.read_text().lstrip().startswith("<?xml")
    from baton.cli.plan import service_configs

    file = ClusterFile(str(output), service_configs())
    assert file.slos() == {"ttft": 500.0, "itl": 25.0}
    assert file.values("decode")["max_num_seqs"].value == 64
    assert file.values("decode")["itl_slo_ms"].value == 25
    assert f": {file.setting('ratio').value}" in shown.split("Prefill ")[1]


def test_plan_says_when_a_rate_is_too_much(profile_file, capsys):
    words = ["plan", "--profile", profile_file, "--isl", "600", "--osl", "40", "--gpus", "2", "--slo", "ttft:500ms"]
    words += ["--requests", "100", "--ratio", "1P1D", "--no-sensitivity", "--precision", "0.2"]
    assert main([*words, "--rate", "1000"]) == 3
    assert "GPUs would be enough" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--isl", "5"], "--isl and --osl go together"),
        ([], "give --trace FILE, or --isl and --osl"),
        (["--isl", "5", "--osl", "5", "--slo", "x"], "--slo must look like"),
        (["--isl", "5", "--osl", "5"], "--slo is needed"),
        (["--isl", "5", "--osl", "5", "--slo", "ttft:1s", "--ratio", "3"], "--ratio must look like"),
        (["--isl", "5", "--osl", "5", "--slo", "ttft:1s", "--ratio", "9P9D"], "takes more than 2 GPUs"),
        (["--isl", "5", "--osl", "5", "--slo", "ttft:1s", "--acceptance", "2"], "--acceptance must be between"),
        (["--isl", "5", "--osl", "5", "--slo", "ttft:1s", "--policy", "luck"], "luck"),
        (["--trace", "/nowhere", "--slo", "ttft:1s"], "cannot read /nowhere"),
    ],
)
def test_mistakes_are_one_line(profile_file, capsys, words, message):
    assert main(["plan", "--profile", profile_file, "--gpus", "2", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("baton plan: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_profile_derives_from_published_figures(tmp_path, capsys):
    output = tmp_path / "p.json"
    words = ["profile", "--roofline", "h100-sxm", "--geometry", "llama-8b", "--output", str(output)]
    assert main(words) == 2
    assert "--params" in capsys.readouterr().err
    assert main([*words, "--params", "8.03e9", "--width", "4096", "--heads", "32", "--tp-sizes", "1,2"]) == 0
    profile = Profile.load(output)
    assert "derived, not measured" in profile.source
    assert profile.device == "cuda:0"
    plan = ["plan", "--profile", str(output), "--isl", "500", "--osl", "20", "--gpus", "2", "--slo", "ttft:5s"]
    plan += ["--requests", "50", "--no-sensitivity", "--precision", "0.3", "--output", str(tmp_path / "c.yaml")]
    assert main(plan) == 2
    assert "llama-8b is a shape, no checkpoint: --output needs --model" in capsys.readouterr().err
    assert main([*plan, "--model", "meta-llama/Llama-3.1-8B"]) == 0
    written = (tmp_path / "c.yaml").read_text()
    assert 'model: "meta-llama/Llama-3.1-8B"' in written
    assert "    device: cuda:0\n" in written
