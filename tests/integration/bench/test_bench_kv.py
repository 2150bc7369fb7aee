"""``baton bench kv`` as people run it: tables, JSON lines, exit statuses, and nothing left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.child_env import child_env

from baton.rpc.server import free_port
from baton_bench.kv import records

BATON = [sys.executable, "-m", "baton.cli.main", "bench", "kv"]
QUICK = ["--geometry", "baton-tiny", "--isl", "64", "--repeat", "2", "--no-reference"]
LIMIT_S = 240
FIELDS = {kind.record: {item.name for item in dataclasses.fields(kind)} for kind in records.RECORDS}
CORRUPT = """
import sys
from baton_bench.agents import serve_agent
from baton_bench.kv.agent import Agent
from baton_bench.kv.plan import SourceSpec

class Corrupting(Agent):
    def open_source(self, source: SourceSpec):
        facts = super().open_source(source)
        self._source.shards.primary.blocks[2, 100] ^= 1
        return facts

if __name__ == "__main__":
    sys.exit(serve_agent(lambda host, token, _: Corrupting(host, token)))
"""
LISTEN = """
import sys
from baton_bench.agents import Listener

listener = Listener("127.0.0.1", 0, None, "", sys.argv[1])
print(listener.address, flush=True)
try:
    listener.serve()
except KeyboardInterrupt:
    listener.close()
"""


def bench(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command, and see that no process of it is left."""
    process = subprocess.Popen(
        [*BATON, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_env(**(env or {}))
    )
    out, err = process.communicate(timeout=LIMIT_S)
    assert agents_of(process.pid) == []
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def agents_of(parent: int) -> list[int]:
    """Process ids of the agents that a process started, whether it still lives or not."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"--parent" in words and words[words.index(b"--parent") + 1] == str(parent).encode():
                    found.append(int(folder.name))
    return found


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def lines(text: str) -> list[dict[str, Any]]:
    """Parse JSON lines; every one has exactly the fields of its kind."""
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        assert set(line) - {"record"} == FIELDS[line["record"]]
    return found


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in found if line["record"] == kind]


@contextlib.contextmanager
def listener(*command: str) -> Iterator[str]:
    """Run something that says where it listens; yields the address."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split(";")[0].split()[-1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        until(lambda: agents_of(process.pid) == [], "the listener's agents stayed")


def test_json_lines_of_a_sweep():
    done = bench("--geometry", "baton-tiny", "--isl", "32:128", "--pipe", "shm,tcp", "--repeat", "2", "--no-reference",
                 "--prefill-tokens-per-s", "1", "--json")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = lines(done.stdout)
    assert [found[0]["record"], found[-1]["record"]] == ["run", "result"]
    assert found[0]["kv_bytes_per_token"] == 1536
    transfers = of(found, "transfer")
    wanted = {(pipe, n, t) for pipe, n in (("shm", 1), ("tcp", 1), ("tcp", 4)) for t in (32, 64, 128)}
    assert {(t["pipe"], t["streams"], t["tokens"]) for t in transfers} == wanted
    for transfer in transfers:
        assert transfer["verified"]
        assert transfer["bytes"] == 1536 * transfer["tokens"]
        assert transfer["runs"] == 2
        assert 0 < transfer["p50_ms"] <= transfer["p95_ms"] <= transfer["p99_ms"]
        assert transfer["limit_gb_per_s"] > 0
    assert {b["method"] for b in of(found, "baseline")} == {"memcpy", "memcpy-blocks", "socket"}
    assert all(v["carries"] for v in of(found, "verdict"))
    assert found[-1]["exit_code"] == 0


def test_the_standing_comparison_as_tables(tmp_path):
    plot = tmp_path / "kv.svg"
    done = bench("--bytes", "40000", "--descriptors", "10", "--pipe", "shm,tcp", "--repeat", "1", "--warmup", "0",
                 "--plot", str(plot))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("contiguous", "paged", "tcp-unchecked x4", "round trip", "shm / memcpy", "% of limit", "verified"):
        assert words in done.stdout
    assert "prefill tokens/s" not in done.stdout  # raw bytes have no kappa
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


def test_instances_of_different_shape_in_a_pattern():
    done = bench("--geometry", "baton-tiny", "--isl", "100", "--pipe", "shm,tcp", "--streams", "2", "--repeat", "1",
                 "--pattern", "NxM", "--n", "2", "--m", "2", "--src-tp", "2", "--dst-pp", "3", "--dst-block-size", "24",
                 "--json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for transfer in of(lines(done.stdout), "transfer"):
        assert transfer["verified"]
        assert transfer["bytes"] == 4 * 112 * 1536  # four flows of seven blocks of sixteen tokens


def test_overlap():
    done = bench("--geometry", "baton-tiny", "--isl", "256", "--pipe", "shm,tcp", "--streams", "1", "--repeat", "2",
                 "--no-reference", "--overlap", "--chunk", "64", "--prefill-tokens-per-s", "2000",
                 "--json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    studies = of(lines(done.stdout), "overlap")
    assert len(studies) == 6
    for study in studies:
        assert study["verified"]
        assert (study["steps"], study["chunk"]) == (4 * 6, 64)
        assert study["compute_ms"] == pytest.approx(128)
        assert study["exposed_ms"] > 0


def test_a_target_of_another_dtype():
    done = bench("--geometry", "baton-tiny", "--isl", "96", "--pipe", "shm,tcp,nixl,gloo", "--streams", "2",
                 "--repeat", "1", "--no-reference", "--kv-dtype", "float32", "--dst-kv-dtype", "bfloat16",
                 "--src-tp", "2", "--dst-block-size", "32", "--overlap", "--prefill-tokens-per-s", "2000",
                 "--json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines(done.stdout)
    assert (found[0]["kv_dtype"], found[0]["dst_kv_dtype"]) == ("float32", "bfloat16")
    assert {t["pipe"] for t in of(found, "transfer")} == {"shm", "tcp", "nixl", "gloo"}
    for transfer in of(found, "transfer"):
        assert transfer["verified"]
        assert transfer["bytes"] == 2 * 1536 * 96  # the source's
    assert all(study["verified"] for study in of(found, "overlap"))


def test_memory_that_stands_in_for_a_device_in_every_pair():
    done = bench("--memory", "interpret", "--geometry", "baton-tiny", "--isl", "48", "--pipe", "cuda_ipc,tcp",
                 "--streams", "1", "--repeat", "1", "--warmup", "0", "--no-reference", "--json")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = lines(done.stdout)
    assert found[0]["memory"] == "interpret"
    both, there, back = "interpret to interpret", "interpret to host", "host to interpret"
    transfers = of(found, "transfer")
    assert {(t["memory"], t["pipe"]) for t in transfers} == {
        (both, "cuda_ipc"), (both, "tcp"), (there, "tcp"), (back, "tcp"),
    }  # fmt: skip
    assert all(t["verified"] for t in transfers)
    assert {t["limit"] for t in transfers} == {"memcpy"}
    bare = {(b["memory"], b["method"]) for b in of(found, "baseline")}
    assert bare >= {(ends, name) for ends in (both, there, back) for name in ("memcpy", "memcpy-blocks")}
    assert {r["name"] for r in of(found, "ratio")} == {
        f"{t['pipe']} / memcpy, kv, {t['memory']}" for t in transfers
    }  # fmt: skip
    assert [(u["method"], u["memory"]) for u in of(found, "unavailable")] == [("cuda_ipc", there), ("cuda_ipc", back)]


def test_a_slow_link_is_not_good_enough():
    done = bench(*QUICK, "--pipe", "shm", "--require-gbps", "100000", "--json")
    assert done.returncode == 3
    assert lines(done.stdout)[-1]["exit_code"] == 3
    assert "required 100000" in lines(done.stdout)[-1]["failures"][0]


def test_a_pipe_that_was_asked_for_and_cannot_work(tmp_path):
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not on this machine')", encoding="utf-8")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{child_env()['PYTHONPATH']}"}
    done = bench(*QUICK, "--pipe", "shm,nixl", "--json", env=env)
    found = lines(done.stdout)
    assert done.returncode == found[-1]["exit_code"] == 2
    (missing,) = of(found, "unavailable")
    assert missing["asked"]
    assert "pip install" in missing["reason"]
    assert [t["pipe"] for t in of(found, "transfer")] == ["shm"]  # what works was measured all the same


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--geometry", "llama-9b"], "llama-8b"),
        (["--model", "/nonexistent"], "config.json"),
        (["--geometry", "llama-8b", "--src-tp", "3"], "tp=3"),
        (["--geometry", "llama-405b", "--isl", "1000000"], "GiB"),
        (["--pipe", "quic"], "--pipe"),
        (["--pipe", "cuda_ipc"], "--pipe"),
        (["--memory", "gpu"], "cuda:0,cuda:1"),
        (["--memory", "cuda:99"], "torch sees"),
        (["--streams", "x"], "--streams"),
        (["--plot", "out.gif"], "--plot"),
        (["--listen", "1.2.3.4"], "host:port"),
        (["--listen", "0.0.0.0:0"], "host:port"),
        (["--listen", "0.0.0.0:7999"], "token"),
        (["--listen", "127.0.0.1:7999", "--connect", "127.0.0.1:7999"], "--connect"),
        (["--token-file", "/nonexistent"], "token file"),
    ],
    ids=lambda value: value[0] + value[1] if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_told_in_one_line(arguments, why):
    done = bench(*arguments)
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_byte_is_found(tmp_path):
    (tmp_path / "corrupting_agent.py").write_text(CORRUPT, encoding="utf-8")
    (tmp_path / "listening.py").write_text(LISTEN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{child_env()['PYTHONPATH']}")
        with listener(str(tmp_path / "listening.py"), "corrupting_agent") as address:
            done = bench(*QUICK, "--connect", address, "--pipe", "shm,tcp", "--streams", "1", "--json")
            unseen = bench(*QUICK, "--connect", address, "--pipe", "shm", "--no-verify", "--json")
    found = lines(done.stdout)
    assert done.returncode == found[-1]["exit_code"] == 1
    assert [(t["verified"], t["wrong_blocks"]) for t in of(found, "transfer")] == [(False, 1)] * 2
    assert sorted(found[-1]["failures"]) == ["shm: 1 wrong blocks", "tcp: 1 wrong blocks"]
    assert unseen.returncode == 0
    assert [t["verified"] for t in of(lines(unseen.stdout), "transfer")] == [False]


def test_a_listener_and_its_token(tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(secrets.token_hex(), encoding="utf-8")  # weak ones are warned of
    wrong.write_text(secrets.token_hex(), encoding="utf-8")
    wanted = f"127.0.0.1:{free_port()}"
    command = ["-m", "baton.cli.main", "bench", "kv", "--listen", wanted, "--token-file", str(right)]
    with listener(*command) as address:
        assert address == wanted
        for _ in range(2):  # it serves one driver after the other
            done = bench(*QUICK, "--connect", address, "--pipe", "tcp", "--token-file", str(right), "--json")
            assert done.returncode == 0, done.stdout + done.stderr
            found = lines(done.stdout)
            assert found[0]["peer"]["cpus"] == os.cpu_count()
            assert all(t["verified"] for t in of(found, "transfer"))
        for arguments in (["--token-file", str(wrong)], []):
            refused = bench(*QUICK, "--connect", address, "--pipe", "tcp", *arguments)
            assert refused.returncode == 1
            assert "token" in refused.stderr
            assert len(refused.stderr.splitlines()) == 1
    gone = bench(*QUICK, "--connect", address, "--token-file", str(right))
    assert gone.returncode == 1
    assert "cannot connect" in gone.stderr


def running(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*BATON, *QUICK, "--pipe", "tcp", "--repeat", "10000", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(agents_of(process.pid)) == 2, "no agents")
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_no_process(number):
    process = running()
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT_S)
    until(lambda: agents_of(process.pid) == [], "agents stayed")
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in err


def test_a_reader_that_has_had_enough():
    process = running("--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["record"] == "run"
    process.stdout.close()
    os.kill(agents_of(process.pid)[0], signal.SIGKILL)  # so that it has something to say
    assert process.stderr is not None
    with process.stderr:
        assert "Traceback" not in process.stderr.read()
    assert process.wait(LIMIT_S) == 1
    until(lambda: agents_of(process.pid) == [], "agents stayed")


def test_an_agent_that_dies_is_named():
    process = running("--json")
    os.kill(agents_of(process.pid)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "is gone" in lines(out)[-1]["failures"][0]
    assert "is gone" in err
    assert len(err.splitlines()) == 1
    assert agents_of(process.pid) == []
