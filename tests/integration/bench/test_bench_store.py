"""``baton bench store`` as people run it: real stores, real clients, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.child_env import child_env
from tests.support.servers.redis_server import missing_redis

from baton_bench.report import Record
from baton_bench.store import driver, records
from baton_bench.store.plan import Options
from baton_bench.traces import TraceRequest, write_trace

BATON = [sys.executable, "-m", "baton.cli.main", "bench", "store"]
SMALL = ["--geometry", "baton-tiny", "--request-bytes", "196608", "--total-bytes", "8388608"]
QUICK = [*SMALL, "--repeat", "2", "--warmup", "1", "--seconds", "0.03"]
LIMIT_S = 240
FIELDS = {kind.record: {item.name for item in dataclasses.fields(kind)} for kind in records.RECORDS}
CORRUPT = """
import sys
from baton_bench.agents import serve_agent
from baton_bench.store.client import Client
from baton_bench.store.plan import Pattern

fill = Pattern.fill

def fill_wrong(self, names, out):
    fill(self, names, out)
    out[1, 100] ^= 1

Pattern.fill = fill_wrong

if __name__ == "__main__":
    sys.exit(serve_agent(lambda host, token, line: Client()))
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BATON, *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=child_env(), check=False
    )


def test_every_tier_and_operation_is_measured_and_every_byte_is_right(tmp_path: Path) -> None:
    picture = tmp_path / "store.svg"
    done = bench(*QUICK, "--clients", "1,2", "--dir", str(tmp_path), "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(line) == {"record", *FIELDS[line["record"]]} for line in lines)
    found: dict[tuple[str, str, int, int], dict[str, Any]] = {
        (line["method"], line["op"], line["clients"], line["hit_percent"]): line
        for line in lines
        if line["record"] == "measure"
    }
    for clients in (1, 2):
        for tier in ("shm", "tcp", "disk"):
            assert found[tier, "put", clients, 100]["gb_per_s"] > 0
            assert found[tier, "get", clients, 100]["came_percent"] == 100
            assert found[tier, "get", clients, 50]["came_percent"] == 100
        for tier in ("shm", "disk"):
            assert found[tier, "contains", clients, 100]["blocks_per_s"] > 0
    assert found["disk", "get", 1, 100]["disk_percent"] > 75  # the first chains of a turn may be in memory
    assert {"memcpy", "plain", "dd"} < {method for method, *_ in found}
    checks = {(line["method"], line["op"]): line for line in lines if line["record"] == "verify"}
    assert all(line["wrong"] == 0 and line["blocks"] > 0 for line in checks.values())
    assert {(tier, op) for tier in ("shm", "tcp", "disk") for op in ("put", "get")} <= set(checks)
    ratios = {line["name"] for line in lines if line["record"] == "ratio"}
    assert {"get, memory over shm / memcpy", "get, disk / plain reads", "get, disk / dd"} <= ratios
    if missing_redis() is None:
        assert found["redis", "get", 2, 100]["came_percent"] == 100
        assert checks["redis-bare", "get"]["blocks"] > 0
    assert lines[-1]["record"] == "result"
    assert picture.read_text().lstrip().startswith("<?xml")
    assert list(tmp_path.iterdir()) == [picture]


def test_a_share_that_is_not_reached_is_exit_status_3_and_the_table_names_it() -> None:
    some = ["--clients", "1", "--op", "get", "--hits", "100", "--tier", "shm", "--no-redis"]
    done = bench(*QUICK, *some, "--require-dram", "1000")
    assert done.returncode == 3, done.stderr
    assert "memory over shm / memcpy is" in done.stdout
    assert "0 wrong" in done.stdout


def test_a_wrong_byte_is_exit_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corrupting.py").write_text(CORRUPT)
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"] + os.pathsep + str(tmp_path))
    monkeypatch.setattr(driver, "CLIENT_MODULE", "corrupting")
    options = Options(
        geometries=("baton-tiny",),
        request_bytes=196608,
        total_bytes=1 << 20,
        clients=(1,),
        tiers=("shm",),
        ops=("get",),
        hits=(100,),
        redis=False,
        repeat=1,
        warmup=0,
        seconds=0.02,
    )
    out: list[Record] = []
    assert driver.Driver(options, out.append, lambda *_: None).run() == 1
    assert isinstance(out[-1], records.ResultRecord)
    assert "blocks were wrong" in out[-1].failures[0]


def test_a_trace_gives_a_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    blocks = ((0, 1, 2 + i % 5, 100 + i) for i in range(50))
    write_trace(path, [TraceRequest(1000.0 * i, 2048, 1, chain) for i, chain in enumerate(blocks)])
    flags = ["--trace", str(path), "--blocks", "8,1000,10%", "--policy", "lru,s3fifo,pool,session,belady"]
    found = json.loads(bench(*flags, "--json").stdout)["traces"][0]
    rates = {(run["policy"], run["blocks"]): run["hit_rate"] for run in found["runs"]}
    assert found["blocks"] == 200
    assert rates["lru", 1000] == rates["s3fifo", 1000] == rates["belady", 8] == found["best_hit_rate"]
    assert rates["pool", 8] == rates["session", 8] < rates["belady", 8]
    assert rates["belady", 5] <= rates["belady", 8]  # a tenth of 57
    table = bench(*flags)
    assert table.returncode == 0
    assert "belady" in table.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tier", "ram"], "tier"),
        (["--clients", "x"], "clients"),
        (["--geometry", "nothing"], "geometry"),
        (["--trace", "/nowhere"], "/nowhere"),
        (["--trace", "servegen", "--blocks", "101%"], "blocks"),
        (["--trace", "/nowhere", "--policy", "magic"], "policy"),
    ],
)
def test_what_cannot_run_is_exit_status_2_and_says_why(flags: list[str], named: str) -> None:
    done = bench(*flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
