"""Statistics, verdicts, ratios, options, the control line's objects, and the documented schema."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import typing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.errors import ConfigError
from baton.kv_transfer.wire import BadFrameError
from baton_bench import commands
from baton_bench.agents import parse
from baton_bench.kv import records
from baton_bench.kv.agent import Study
from baton_bench.kv.driver import Driver, Sample, Standing, compute_ratios, stage_records, verdict, verdict_records
from baton_bench.kv.plan import (
    Case,
    MethodKey,
    Options,
    OverlapSpec,
    RunSpec,
    Shape,
    SourceSpec,
    Stage,
    model_stage,
    parse_sweep,
    pipe_methods,
)
from baton_bench.kv.records import MessagesRecord, OverlapRecord, draw
from baton_bench.report import Spread, check_plot, paired_ratio

DOC = Path(__file__).resolve().parents[3] / "docs" / "bench/kv.md"


class Known:
    """A contestant that is only its name."""

    def __init__(self, key: MethodKey, *, is_pipe: bool = True) -> None:
        self.key, self.is_pipe = key, is_pipe


def standing(key: MethodKey, samples: dict[Case, list[Sample]], *, is_pipe: bool = True) -> Standing:
    return Standing(typing.cast(typing.Any, Known(key, is_pipe=is_pipe)), samples)


# Statistics


def test_percentiles_lie_between_samples():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of(range(101)) == Spread(50.0, 95.0, 99.0)
    assert Spread.of([1.0, 0.0]).p50 == 0.5


def test_paired_ratios_ignore_a_machine_that_becomes_slower():
    base = [10.0, 5.0, 1.0, 2.0, 8.0]
    assert paired_ratio([0.9 * x for x in base], base) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="paired"):
        paired_ratio([1.0], [1.0, 2.0])


# Verdicts and ratios


@pytest.mark.parametrize(("wanted", "carries"), [(None, None), (76_293.0, True), (76_294.0, False)])
def test_the_verdict_is_kappa_times_speed_against_rate(wanted, carries):
    record = verdict(MethodKey("tcp", 4), 4096, 128 << 10, 10.0, wanted)
    assert record.max_prefill_tokens_per_s == pytest.approx(10e9 / 131072, rel=1e-4)
    assert record.carries is carries


def test_replicated_heads_count_once_in_the_verdict():
    options = Options(geometry="deepseek-v3", isl="1000", dst_tp=4)
    stage = model_stage(options)
    (case,) = stage.cases
    moved = 4 * case.flow_bytes  # every rank of the target holds the latent
    (record,) = verdict_records(stage, [standing(MethodKey("shm"), {case: [Sample(0.5, moved, 0.1)]})], options)
    assert record.max_prefill_tokens_per_s == pytest.approx(1008 / 0.5)


CASE = Case("kv", 16, 4, True, 4 << 20)
CONTIGUOUS, PAGED = Case("contiguous", 0, 8, False, 8), Case("paged", 0, 4, True, 4)


def test_a_pipe_is_measured_against_its_own_limit():
    stage = Stage("kv", Shape.raw(1 << 20), Shape.raw(1 << 20), 4, 4, (CASE,))
    gb = 1_000_000_000
    done = [
        standing(MethodKey("memcpy"), {CASE: [Sample(0.1, gb, 0.1)]}, is_pipe=False),
        standing(MethodKey("socket", 4), {CASE: [Sample(0.5, gb, 1.0)]}, is_pipe=False),
        standing(MethodKey("shm"), {CASE: [Sample(0.2, gb, 0.2, 0)]}),
        standing(MethodKey("tcp", 4), {CASE: [Sample(1.0, gb, 3.0), Sample(0.8, gb, 1.0, 2), Sample(2.0, gb, 2.0)]}),
        standing(MethodKey("nixl"), {}),
    ]
    found = {r.pipe: r for r in stage_records(stage, done, Options()) if isinstance(r, records.TransferRecord)}
    assert set(found) == {"shm", "tcp"}
    assert (found["shm"].limit, found["shm"].percent_of_limit, found["shm"].verified) == ("memcpy", 50.0, True)
    tcp = found["tcp"]
    assert (tcp.limit, tcp.percent_of_limit, tcp.p50_ms, tcp.cpu_s_per_gb) == ("socket x4", 50.0, 1000.0, 2.0)
    assert (tcp.verified, tcp.wrong_blocks) == (False, 2)


def test_ratios_and_aims():
    def at(gb_per_s: float) -> list[Sample]:
        return [Sample(1 / gb_per_s, 10**9, 0.0)] * 3

    done = [
        standing(MethodKey("memcpy"), {CONTIGUOUS: at(10)}, is_pipe=False),
        standing(MethodKey("nixl-bare"), {CONTIGUOUS: at(9), PAGED: at(4)}, is_pipe=False),
        standing(MethodKey("shm"), {CONTIGUOUS: at(8.9), PAGED: at(7)}),
        standing(MethodKey("tcp"), {CONTIGUOUS: at(2), PAGED: at(1.7)}),
        standing(MethodKey("tcp", 4), {CONTIGUOUS: at(3), PAGED: at(2.9)}),
        standing(MethodKey("tcp-unchecked"), {CONTIGUOUS: at(2.5)}, is_pipe=False),
        standing(MethodKey("tcp-unchecked", 4), {CONTIGUOUS: at(3.75)}, is_pipe=False),
    ]
    message = MessagesRecord("shm", "read", 4096, 10, 14.0, 15.0, 16.0, 70_000.0)
    overlap = OverlapRecord("shm", 1, "layer-wise", 64, 16, 4, 1.0, 1.0, 1.0, 16.0, True)
    found = {r.name: (r.value, r.met) for r in compute_ratios(done, [message, overlap])}
    assert found["shm / memcpy, contiguous"] == (0.89, False)
    assert found["shm / bare NIXL, paged"] == (1.75, True)
    assert found["tcp-unchecked x4 / tcp-unchecked, contiguous"] == (1.5, True)
    assert found["tcp / tcp-unchecked, contiguous"] == (0.8, None)
    assert found["tcp paged / contiguous"] == (0.85, True)
    assert found["shm 4 KiB read, p50"] == (14.0, True)
    assert found["shm exposed, layer-wise / serial"] == (0.16, False)
    assert "tcp / socket, contiguous" not in found


# Options


def test_sweeps():
    assert parse_sweep("4096") == (4096,)
    assert parse_sweep("128:1024") == (128, 256, 512, 1024)
    assert parse_sweep("100:350,4096") == (100, 200, 4096)
    for text in ("", "0", "8:4", "1:", "-1", "a", "99999999999"):
        with pytest.raises(ConfigError, match="--isl"):
            parse_sweep(text)


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": "llama-8b", "bytes": 5},
        {"pipes": ("shm", "quic")},
        {"pipes": ()},
        {"pipes": ("shm", "shm")},
        {"streams": (0,)},
        {"pattern": "2-2"},
        {"kv_dtype": "int3"},
        {"dst_kv_dtype": "int3"},
        {"dst_kv_dtype": "float32", "bytes": 4096},
        {"overlap": True, "bytes": 4096},
        {"overlap": True, "pattern": "N-1"},
        {"repeat": 0},
        {"block_size": 0},
        {"descriptors": 1 << 40},
        {"require_gbps": float("nan")},
        {"prefill_tokens_per_s": -1.0},
        {"seed": -1},
    ],
)
def test_options_that_cannot_work_are_refused(change):
    with pytest.raises(ConfigError) as caught:
        Options(**change)
    assert caught.value.field in {*change, "pipe"}


def test_stages():
    stage = model_stage(Options(geometry="llama-8b", isl="4096", block_size=16))
    assert (stage.cases[0].flow_bytes, stage.source_blocks, stage.target_blocks) == (512 << 20, 256, 256)
    stage = model_stage(Options(geometry="llama-8b", isl="100", dst_block_size=32))
    assert (stage.source_blocks, stage.target_blocks) == (7, 4)
    stage = model_stage(Options(geometry="llama-8b", isl="32,100", dst_block_size=4))
    assert (stage.source_blocks, stage.target_blocks) == (7, 28)  # room for all that the source's blocks hold
    stage = model_stage(Options(bytes=1000, descriptors=3))
    assert (stage.cases[0].flow_bytes, stage.cases[0].blocks, stage.cases[0].shuffled) == (3 * 384, 3, True)
    for change in ({"src_tp": 3}, {"dst_pp": 64}):
        with pytest.raises(ConfigError, match=r"tp=3|pp=64"):
            model_stage(Options(geometry="llama-8b", **change))
    keys = pipe_methods(Options(pipes=("shm", "tcp"), streams=(1, 4)))
    assert [key.label for key in keys] == ["shm", "tcp", "tcp x4"]


def test_what_does_not_fit_is_refused_before_anything_starts():
    driver = Driver(Options(geometry="llama-405b", isl="1000000"), lambda _: None, lambda *_: None)
    with pytest.raises(ConfigError, match="GiB"):
        driver.run()


def test_every_option_has_a_flag():
    parser = argparse.ArgumentParser()
    commands.add_kv_parser(parser.add_subparsers())
    options = Options.from_args(parser.parse_args(["kv", "--pipe", "tcp", "--streams", "2,2,3"]))
    assert (options.pipes, options.streams) == (("tcp",), (2, 3))
    assert options == Options(pipes=("tcp",), streams=(2, 3))


# Overlap


def test_a_schedule_covers_the_compute_and_every_layer_of_every_chunk():
    spec = OverlapSpec(RunSpec("shm", 1, 10, True), "chunked", 4, 2.0)
    study = Study(spec, 8, 10, 100)
    rows = study.schedule()
    assert study.steps == 24
    assert rows[:, 1].tolist() == list(range(100, 125))
    assert (np.diff(rows[:, 0]) > 0).all()
    assert rows[-1].tolist() == [2_000_000_000, 124, 1]
    assert rows[rows[:, 2] == 1][:, 0].tolist() == [0, 800_000_000, 1_600_000_000, 2_000_000_000]


# The control line


def test_objects_come_back_as_they_were():
    spec = SourceSpec(1, 2, Shape.of(model_stage(Options()).source.geometry, 16, 2, 2), 7, ("shm", "tcp"))
    assert parse(SourceSpec, json.loads(msgspec.json.encode(spec))) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"index": "1"},
        {"index": True},
        {"index": -1},
        {"num_blocks": 1 << 40},
        {"kinds": "shm"},
        {"kinds": [1]},
        {"extra": 1},
        {"shape": None},
        {"shape": {"layers": []}},
    ],
)
def test_other_objects_are_refused(change):
    fields = msgspec.to_builtins(SourceSpec(1, 2, Shape.raw(64), 7, ("shm",)))
    with pytest.raises((BadFrameError, ConfigError)):
        parse(SourceSpec, fields | change)
    with pytest.raises(BadFrameError):
        parse(SourceSpec, {k: v for k, v in fields.items() if k != "seed"})


# Records


def test_the_document_names_every_field_of_every_record():
    text = DOC.read_text(encoding="utf-8")
    section = text.split("## JSON lines")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", fields) for name, fields in rows}
    real = {kind.record: [item.name for item in dataclasses.fields(kind)] for kind in records.RECORDS}
    assert documented == real
    own = {"baton_bench.report", records.__name__}
    assert set(records.RECORDS) == {kind for kind in records.Record.__subclasses__() if kind.__module__ in own}


def test_a_record_is_one_line_of_json():
    record = MessagesRecord("shm", "read", 4096, 10, 14.0, 15.0, 16.0, 70_000.0)
    line = record.to_json()
    assert "\n" not in line
    assert json.loads(line) == {"record": "messages", **dataclasses.asdict(record)}


# Plots


def test_plots(tmp_path):
    stage = Stage("kv", Shape.raw(1 << 20), Shape.raw(1 << 20), 4, 4, (CASE,))
    done = [
        standing(MethodKey("memcpy"), {CASE: [Sample(0.1, 4 << 20, 0.1)]}, is_pipe=False),
        standing(MethodKey("shm"), {CASE: [Sample(0.2, 4 << 20, 0.2, 0)]}),
    ]
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"out{suffix}"
        check_plot(path)
        draw(stage_records(stage, done, Options()), path)
        assert path.read_bytes().startswith(magic)
    with pytest.raises(ConfigError, match="png"):
        check_plot(tmp_path / "out.gif")
    with pytest.raises(ConfigError, match="folder"):
        check_plot(tmp_path / "none" / "out.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[plot\]'"):
        check_plot(tmp_path / "out.png")
