"""The search for settings, its notes, and the files of its trials."""

from __future__ import annotations

import json

import pytest

from baton.cli.main import main
from baton.config.cluster_file import ClusterFile
from baton.errors import ConfigError, UnavailableError
from baton_bench.tuning import Notes, neighbours, read_settings, tune, with_settings

DOCUMENT = {"ratio": "2P2D", "worker": {"flags": {"max-num-seqs": 16}}, "slo": {"ttft-ms": 500}}
NAMES = ("ratio", "max-num-seqs", "beta")


def goodput(settings) -> float:
    """Best at 1P3D with 64 sequences, whatever beta."""
    prefills = int(settings["ratio"][0])
    return 10 - 2 * abs(prefills - 1) - abs(settings["max-num-seqs"].bit_length() - 7)


def run(notes: Notes, measure=goodput, most=50):
    told = []
    best = tune(read_settings(DOCUMENT, NAMES), measure, notes, most_trials=most, on_trial=told.append)
    return best, told


def test_settings_are_read_changed_and_bounded(tmp_path):
    start = read_settings(DOCUMENT, NAMES)
    assert start == {"ratio": "2P2D", "max-num-seqs": 16, "beta": 0.5}
    assert set(neighbours("ratio", "2P2D")) == {"3P1D", "1P3D"}
    assert set(neighbours("ratio", "0P2D")) == {"1P1D"}
    assert set(neighbours("max-num-seqs", 1024)) == {512}
    path = tmp_path / "c.yaml"
    path.write_text(with_settings(DOCUMENT, {"ratio": "1P3D", "beta": 1.0, "max-num-seqs": 32}))
    from baton.cli.plan import service_configs

    file = ClusterFile(str(path), service_configs())
    assert file.setting("ratio").value == "1P3D"
    assert file.values("decode")["max_num_seqs"].value == 32
    assert file.values("router")["beta"].value == 1.0
    assert DOCUMENT["ratio"] == "2P2D"
    replicas = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}}
    assert read_settings(replicas, ("ratio",)) == {"ratio": "2P3D"}
    assert "replicas" not in with_settings(replicas, {"ratio": "3P2D"})
    with pytest.raises(ConfigError, match="takes ratio"):
        read_settings(DOCUMENT, ("colour",))
    with pytest.raises(ConfigError, match="would win"):
        read_settings({"decode": {"flags": {"max-num-seqs": 2}}}, ("max-num-seqs",))


def test_the_best_settings_are_found_and_nothing_is_tried_twice(tmp_path):
    notes = Notes(tmp_path / "n.jsonl", {"a": 1})
    best, told = run(notes)
    assert best.settings["ratio"] == "1P3D"
    assert best.settings["max-num-seqs"] == 64
    tried = [json.dumps(each.settings, sort_keys=True) for each in told]
    assert len(tried) == len(set(tried))


def test_what_was_interrupted_goes_on_where_it_stopped(tmp_path):
    path, measured = tmp_path / "n.jsonl", []

    def measure(settings):
        measured.append(settings)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return goodput(settings)

    with pytest.raises(KeyboardInterrupt):
        run(Notes(path, {"a": 1}), measure)
    whole, _ = run(Notes(tmp_path / "other.jsonl", {"a": 1}))
    again, told = run(Notes(path, {"a": 1}))
    assert again == whole
    assert not [each for each in told if each.settings in measured[:3]]
    with pytest.raises(ConfigError, match="another deployment"):
        Notes(path, {"a": 2})
    path.write_text("x")
    with pytest.raises(ConfigError, match="no notes"):
        Notes(path, {"a": 1})


def test_settings_that_do_not_start_are_noted_and_left(tmp_path):
    def measure(settings):
        if settings["max-num-seqs"] > 16:
            raise UnavailableError("it does\nnot start")
        return goodput(settings)

    notes = Notes(tmp_path / "n.jsonl", {})
    best, _ = run(notes, measure)
    assert best.settings == {"ratio": "1P3D", "max-num-seqs": 16, "beta": 0.5}
    assert {each.error for each in notes.trials} == {"", "it does not start"}

    def never(settings):
        raise UnavailableError("no")

    with pytest.raises(ConfigError, match="own settings"):
        run(Notes(tmp_path / "m.jsonl", {}), never)


def test_no_more_trials_than_asked_for(tmp_path):
    notes = Notes(tmp_path / "n.jsonl", {})
    best, told = run(notes, most=3)
    assert len(told) == len(notes.trials) == 3
    assert best.goodput == max(each.goodput for each in told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rate", "2"], "--slo is needed"),
        (["--slo", "ttft:1s"], "give --request-rate"),
        (["--slo", "ttft:1s", "--request-rate", "2", "--tune", "luck"], "--tune takes"),
        (["--slo", "ttft:1s", "--request-rate", "2", "--trials", "0"], "--trials must be between"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, message):
    path = tmp_path / "c.yaml"
    path.write_text("ratio: 1P1D\n")
    assert main(["tune", "-f", str(path), "--notes", str(tmp_path / "n"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("baton tune: error: ")
    assert message in error
