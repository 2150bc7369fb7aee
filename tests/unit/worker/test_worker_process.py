"""What the processes of all services do on signals, and how they serve their metrics."""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.errors import ConfigError
from baton.rpc.server import free_port
from baton.worker.process import serve_metrics, set_up_logging

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
        assert process.wait(30) == -number


def test_metrics_are_served_until_their_end_and_a_taken_port_is_named() -> None:
    registry, port = CollectorRegistry(), free_port()
    Counter("seen", "Things", registry=registry).inc()
    close = serve_metrics("127.0.0.1", port, registry)
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
        assert "seen_total 1.0" in page
        with pytest.raises(ConfigError, match=str(port)) as caught:
            serve_metrics("127.0.0.1", port, registry)
        assert caught.value.field == "metrics_port"
    finally:
        close()
    serve_metrics("127.0.0.1", port, registry)()


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
