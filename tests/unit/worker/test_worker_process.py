"""What the processes of all services do on signals, and how they serve their metrics."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.config.kvstore import KVStoreConfig
from baton.errors import ConfigError
from baton.logs import set_up_logging
from baton.rpc.server import free_port
from baton.worker import process
from baton.worker.process import raise_descriptor_limit, run_service, serve_metrics

WAITS = """
import asyncio
from baton.worker.process import StopRequest

async def main():
    stop = StopRequest()
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_for_an_end_and_the_second_one_ends(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(number)
        assert process.wait(240) == -number


def test_metrics_are_served_until_their_end_and_a_taken_port_is_named() -> None:
    registry, port = CollectorRegistry(), free_port()
    Counter("seen", "Things", registry=registry).inc()
    close = serve_metrics("127.0.0.1", port, registry)
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240).read().decode()
        assert "seen_total 1.0" in page
        with pytest.raises(ConfigError, match=str(port)) as caught:
            serve_metrics("127.0.0.1", port, registry)
        assert caught.value.field == "metrics_port"
    finally:
        close()
    serve_metrics("127.0.0.1", port, registry)()


def test_a_page_whose_name_was_made_to_lead_here_reads_no_metrics() -> None:
    registry, port = CollectorRegistry(), free_port()
    Counter("seen", "Things", registry=registry).inc()
    close = serve_metrics("127.0.0.1", port, registry)

    def ask(host: str) -> tuple[int, bytes]:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=240)) as connection:
            connection.request("GET", "/metrics", headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read()

    try:
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example"):
            status, body = ask(host)
            assert status == 403
            assert b"seen_total" not in body
        for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}", "10.0.0.4:9400", "host.docker.internal"):
            status, body = ask(host)
            assert status == 200
            assert b"seen_total 1.0" in body
    finally:
        close()


def test_what_clients_send_makes_no_lines_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    written, forged = io.StringIO(), "2026-01-01T00:00:00.000 INFO router app: all is well"
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", written)
    try:
        root.handlers.clear()
        set_up_logging("info", "router")
        logging.warning("request %s failed", f"x\r\n{forged}\x1b[2K\u2028\u202e")
        try:
            raise ValueError(f"x\n{forged}\x1b[1A")
        except ValueError:
            logging.exception("request %s failed", "y")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = written.getvalue().splitlines()
    assert lines[0].endswith(f"request x\\r\\n{forged}\\x1b[2K\\u2028\\u202e failed")
    assert lines[1].endswith("request y failed")
    assert all(line.startswith("  ") for line in lines[2:])
    assert "\x1b" not in written.getvalue()


@pytest.mark.parametrize(("most", "timeout_s"), [(16, 600.0), (10**6, 2.0)], ids=["bound", "timeout"])
def test_connections_that_say_nothing_keep_neither_threads_nor_scrapes(
    monkeypatch: pytest.MonkeyPatch, most: int, timeout_s: float
) -> None:
    monkeypatch.setattr(process, "_MAX_SCRAPES", most)
    monkeypatch.setattr(process._MetricsHandler, "timeout", timeout_s)
    registry, port, threads = CollectorRegistry(), free_port(), threading.active_count()
    Counter("seen", "Things", registry=registry).inc()
    close = serve_metrics("127.0.0.1", port, registry)
    try:
        with ExitStack() as stack:
            for number in range(200):
                silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
                if number % 2:
                    silent.sendall(b"GET /metrics HTTP/1.1\r\nhost:")
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240).read().decode()
            assert "seen_total 1.0" in page
            deadline = time.monotonic() + 240
            while threading.active_count() > threads + 20:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        close()


def test_a_process_may_open_what_the_hard_limit_allows(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        with caplog.at_level(logging.INFO):
            most = raise_descriptor_limit()
        assert most == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
        assert f"at most {most} (the limit was 512)" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_may_open_nearly_nothing_says_so() -> None:
    script = "import sys; from baton_kvstore.main import main; sys.argv[1:] = ['--port', '0']; main()"
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))  # noqa: E731
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, preexec_fn=limit, timeout=240, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(
        "baton-kvstore: error: at most 16 files and connections may be open"
    )


SERVES = """
import sys
from dataclasses import dataclass
from baton.config.flags import option
from baton.worker.process import run_service

@dataclass(frozen=True)
class Config:
    redis: str = option("", "where Redis is", secret=True)
    core_dumps: bool = option(False, "let a crash write memory to disk")
    audit_log: str = ""
    log_level: str = option("info", "log level")
    log_format: str = option("text", "form")

async def serve(config):
    print(open("/proc/self/coredump_filter").read().strip(), flush=True)
    sys.stdin.read()
    return 0

run_service("kvstore", "A service.", (Config,), serve, None)
"""


@pytest.mark.parametrize(("flags", "dumps"), [((), False), (("--core-dumps",), True)])
def test_a_crash_leaves_no_memory_on_disk(tmp_path: Path, flags: tuple[str, ...], dumps: bool) -> None:
    command = ("bash", "-c", 'ulimit -c unlimited; exec "$@"', "bash", sys.executable, "-c", SERVES, *flags)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        assert process.stdout is not None
        seen = int(process.stdout.readline(), 16)
        process.send_signal(signal.SIGABRT)
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        assert (end.si_code, bool(seen)) == (os.CLD_DUMPED if dumps else os.CLD_KILLED, dumps)


def test_an_interrupt_before_a_service_serves_ends_it_quietly() -> None:
    script = SERVES.replace("sys.stdin.read()", "await asyncio.Event().wait()").replace("import sys", "import asyncio")
    with subprocess.Popen(
        (sys.executable, "-c", script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in said


@pytest.mark.parametrize("service", ["baton_kvstore", "baton_router", "baton_decode", "baton_prefill"])
def test_an_interrupt_while_a_service_is_imported_ends_it_quietly(service: str) -> None:
    script = (
        "import os, signal, sys, threading\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'baton.worker':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        f"from {service}.main import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_service_in_a_callers_process_leaves_its_limits() -> None:
    def limits() -> tuple[str, tuple[int, int], tuple[int, int]]:
        kept = Path("/proc/self/coredump_filter").read_text(encoding="ascii")
        return kept, resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)

    before = limits()
    assert run_service("kvstore", "A service.", (KVStoreConfig,), _ends_at_once, []) == 0
    assert limits() == before


async def _ends_at_once(config: KVStoreConfig) -> int:
    return 0


def test_a_password_on_the_command_line_is_warned_of_and_not_repeated() -> None:
    for words, warned in ((["--redis", "redis://:s3cr3t@host"], True), (["--redis", "redis://host"], False)):
        done = subprocess.run(
            [sys.executable, "-c", SERVES, *words], input="", capture_output=True, text=True, timeout=240, check=True
        )
        assert ("password in --redis" in done.stderr) is warned
        assert "s3cr3t" not in done.stderr


THREAD_WITHOUT_MEMORY = """
import os
import resource
import threading
from baton.logs import set_up_logging
from baton.worker.process import watch_thread_starts

def start_one():
    begin.wait()
    threading.Thread(target=print, name="baton-lost").start()

set_up_logging("info", "decode-0")
watch_thread_starts(0.1)
begin = threading.Event()
starter = threading.Thread(target=start_one)
starter.start()
ended = threading.Thread(target=print)  # its stack is kept for the next thread, so that the kernel gives it one
ended.start()
ended.join()
while os.path.exists(f"/proc/self/task/{ended.native_id}"):  # join returns before the kernel's thread has ended
    pass
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
begin.set()
starter.join()
"""


def test_a_process_ends_when_a_thread_finds_no_memory_to_start():
    """``Thread.start`` never returns then: whoever accepts connections would accept none any more."""
    command = [sys.executable, "-c", THREAD_WITHOUT_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done
    assert "no memory to start baton-lost" in done.stderr
