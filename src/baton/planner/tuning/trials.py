"""A trial: a whole deployment, started by ``baton up``, under the load of ``baton bench serve``."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.bench.core.report import Record
from baton.bench.serve.options import ServeOptions
from baton.bench.serve.records import KneeRecord, ServeRecord
from baton.bench.serve.run import Benchmark
from baton.config.flags import AccessConfig
from baton.errors import UnavailableError
from baton.planner.tuning.settings import Settings, with_settings
from baton.rpc.server import free_ports

UP_MODULE = "baton.cli.main"
READY = "Ctrl-C ends everything"
READY_S, END_S = 600.0, 60.0
_KEPT_LINES = 20


@contextlib.contextmanager
def deployment(file: Path, *flags: str) -> Iterator[str]:
    """Run ``baton up -f`` with more flags; yields its URL, and ends it.

    Raises:
        UnavailableError: It ended before it was ready, or was not ready in time.
    """
    http, grpc = free_ports(2)
    words = [sys.executable, "-P", "-m", UP_MODULE, "up", "-f", str(file)]
    words += ["--port", str(http), "--grpc-port", str(grpc), *flags]
    lines: list[str] = []
    ready = threading.Event()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        reader = threading.Thread(target=_read, args=(process, lines, ready), daemon=True)
        reader.start()
        try:
            if not ready.wait(READY_S) or process.poll() is not None or not any(READY in line for line in lines):
                said = " ".join(lines[-3:]).strip()
                raise UnavailableError(f"baton up was not ready: {said or 'no word'}")
            yield f"http://127.0.0.1:{http}"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join(END_S)


def _read(process: subprocess.Popen[str], lines: list[str], ready: threading.Event) -> None:
    if process.stdout is not None:
        for line in process.stdout:
            lines.append(line)
            if READY in line:
                ready.set()
            elif not ready.is_set():
                del lines[:-_KEPT_LINES]
            else:
                lines[:] = [each for each in lines if READY in each]
    ready.set()


def measure_with(
    document: Mapping[str, Any], options: ServeOptions, access: AccessConfig, slos: Mapping[str, float]
) -> Callable[[Settings], float]:
    """Return what measures a deployment with other settings: its goodput, in requests per second."""

    def measure(settings: Settings) -> float:
        with tempfile.TemporaryDirectory(prefix="baton-tune-") as folder:
            file = Path(folder, "cluster.yaml")
            file.write_text(with_settings(document, settings), encoding="utf-8")
            with deployment(file) as url:
                records: list[Record] = []
                load = dataclasses.replace(options, url=url)
                Benchmark(load, access, slos).run(records.append, lambda what, left: None)
        for record in records:
            if isinstance(record, KneeRecord):
                return record.goodput or 0.0
        return max((each.goodput or 0.0 for each in records if isinstance(each, ServeRecord)), default=0.0)

    return measure
