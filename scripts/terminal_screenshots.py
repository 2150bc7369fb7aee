"""Takes the pictures of commands in the documents: they run in a terminal of their own beside ``baton up``.

What a command writes to its terminal, colours included, becomes an SVG: ``baton status --watch`` under load, a
conversation with ``baton chat``, the report of ``baton bench serve``.

    python scripts/terminal_screenshots.py
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from baton.rpc.server import free_ports

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BATON = (sys.executable, "-m", "baton.cli.main")
READY = b"Ctrl-C ends everything"
TALK = ("Write a function `main` that prints its arguments.", "And one that reads a file.")
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts that would be fetched from elsewhere."""
_BUSY = re.compile(rb"[1-9][0-9]* running")


class Terminal:
    """A command in a pseudo-terminal.

    Args:
        words: The command.
        columns: Width.
        rows: Height.
    """

    def __init__(self, words: Sequence[str], columns: int, rows: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True, start_new_session=True
        )
        os.close(slave)
        self.output = b""

    def read(self, until: Callable[[bytes], bool], seconds: float) -> None:
        """Read until the output is as wanted, the command ends, or the time is up.

        Raises:
            TimeoutError: The time is up.
        """
        ends = time.monotonic() + seconds
        while not until(self.output):
            if time.monotonic() > ends:
                raise TimeoutError(f"{self.process.args!r}: {self.output[-2000:].decode(errors='replace')}")
            if not select.select([self._master], [], [], 0.1)[0]:
                continue
            try:
                chunk = os.read(self._master, 1 << 16)
            except OSError:  # the other end is closed: it has ended
                return
            if not chunk:
                return
            self.output += chunk

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._master, line.encode() + b"\n")

    def end(self) -> None:
        """Interrupt it and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._master)


def picture(output: bytes, title: str, columns: int) -> str:
    """Return what a terminal shows of an output, as SVG without foreign fonts."""
    text = output.decode(errors="replace").replace("\r\n", "\n")
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True, color_system="256")
    console.print(Text.from_ansi(text.strip("\n")), soft_wrap=False)
    return _FONTS.sub("", console.export_svg(title=title, unique_id=re.sub(r"\W", "", title)))


def status(url: str, seconds: float) -> str:
    """Watch until requests run, and for some seconds more; return the last whole frame with some."""
    columns = 132
    watching = Terminal((*BATON, "status", "--watch", "--interval-s", "0.5", "--url", url), columns, 24)
    try:
        watching.read(lambda output: _BUSY.search(output) is not None, 60)
        ends = time.monotonic() + seconds
        watching.read(lambda output: time.monotonic() > ends, seconds + 30)
    finally:
        watching.end()
    frames = [frame for frame in watching.output.split(b"\x1b[H")[:-1] if _BUSY.search(frame)]  # the last may be cut
    return picture(frames[-1], "baton status --watch", columns)


def chat(grpc: str) -> str:
    """Say some things and return the conversation."""
    columns = 100
    words = (*BATON, "chat", "--address", grpc, "--stats", "--max-tokens", "56", "--temperature", "0")
    talking = Terminal(words, columns, 60)
    try:
        for turn, line in enumerate(TALK):
            talking.read(lambda output, turn=turn: output.count(b"> ") > turn, 60)  # type: ignore[misc]
            talking.type(line)
            talking.read(lambda output, turn=turn: output.count(b"TTFT") > turn, 60)  # type: ignore[misc]
        talking.type("/quit")
        talking.read(lambda output: False, 20)
    except TimeoutError:
        if talking.process.poll() is None:
            raise
    finally:
        talking.end()
    return picture(talking.output, "baton chat --stats", columns)


def serve(url: str) -> str:
    """Measure and return the report."""
    columns = 100
    words = (*BATON, "bench", "serve", "--url", url, "--requests", "60", "--request-rate", "6", "--isl", "200")
    words = (*words, "--osl", "24", "--slo", "ttft:500ms", "--slo", "itl:50ms")
    measuring = Terminal(words, columns, 60)
    try:
        measuring.read(lambda output: False, 120)
    finally:
        measuring.end()
    report = measuring.output[measuring.output.index(b"=====") :]
    return picture(report, "baton bench serve", columns)


def main() -> int:
    """Start, load, look, end; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    parser.add_argument("--seconds", type=float, default=15.0, help="of load before baton status is looked at")
    args = parser.parse_args()
    http, grpc = free_ports(2)
    url, address = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
    words = (*BATON, "up", "--ratio", "2P2D", "--port", str(http), "--grpc-port", str(grpc), "--kv-blocks", "1500")
    up = Terminal((*words, "--router-args", "--remote-prefill-threshold 64"), 120, 40)
    try:
        up.read(lambda output: READY in output, 180)
        (args.out / "chat.svg").write_text(chat(address), encoding="utf-8")
        (args.out / "bench-serve.svg").write_text(serve(url), encoding="utf-8")
        load = (*BATON, "bench", "serve", "--url", url, "--requests", "100000", "--max-concurrency", "8", "--seed", "7")
        load = (*load, "--dataset", "shared-prefix", "--num-prefixes", "4", "--prefix-len", "200", "--osl", "40")
        loading = subprocess.Popen(load, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            (args.out / "status.svg").write_text(status(url, args.seconds), encoding="utf-8")
        finally:
            loading.kill()
            loading.wait(60)
    finally:
        up.end()
    print(f"wrote chat.svg, bench-serve.svg and status.svg into {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
