"""Counts what one chat answer runs through: files and functions of Baton, in router, prefill and decode instance.

Starts 1P1D with the demo model, sends a chat request to warm it up, then records every function that is called while
the same kind of request (eight tokens, streamed, prefilled remotely) is answered::

    python scripts/trace_request.py            # the numbers
    python scripts/trace_request.py --list     # and the functions, by process and file

Another checkout is measured with its own Python: ``OTHER/.venv/bin/python scripts/trace_request.py --root OTHER``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HOOK = """
import json, os, signal, sys, threading

ROOTS = tuple(os.environ["BATON_TRACE_ROOT"] + part for part in ("/src/", "/services/", "/kernels/"))
called, active = set(), False

def profile(frame, event, argument):
    if active and event == "call" and frame.f_code.co_filename.startswith(ROOTS):
        called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

def start(*_):
    global active
    called.clear()
    active = True

def stop(*_):
    global active
    active = False
    path = os.path.join(os.environ["BATON_TRACE_OUT"], f"{os.getpid()}.json")
    with open(path + ".part", "w") as file:
        json.dump([" ".join(sys.orig_argv), sorted(called)], file)
    os.replace(path + ".part", path)

if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGRTMIN, start)
    signal.signal(signal.SIGRTMIN + 1, stop)
    threading.setprofile(profile)
    sys.setprofile(profile)
"""
"""A ``sitecustomize`` module: every Python process records its calls between two signals."""


def ask(port: int, text: str) -> bytes:
    """Send a streamed chat request; returns the whole answer."""
    messages = [{"role": "user", "content": f"Write a function `{text}` that reads a file, line by line. " * 12}]
    body = {"model": "baton-tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        if answer.headers["x-baton-path"] not in (None, "remote"):
            raise SystemExit(f"the prompt was prefilled {answer.headers['x-baton-path']}")
        return bytes(answer.read())


def trace(root: Path, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Run the deployment and return the functions that one request called, by role."""
    (folder / "sitecustomize.py").write_text(HOOK)
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "BATON_TRACE_ROOT": str(root),
        "BATON_TRACE_OUT": str(folder),
    }
    command = [
        sys.executable,
        "-m",
        "baton.cli.main",
        "up",
        "--json",
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--ratio",
        "1P1D",
    ]
    up = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert up.stdout is not None
        ready = next(event for event in map(json.loads, up.stdout) if event["event"] == "up")
        pids = {process["role"]: int(process["pid"]) for process in ready["processes"].values()}
        port = int(ready["processes"]["router"]["http"].rsplit(":", 1)[1])
        ask(port, "warm")
        for pid in pids.values():
            os.kill(pid, signal.SIGRTMIN)
        ask(port, "measured")
        for pid in pids.values():
            os.kill(pid, signal.SIGRTMIN + 1)
        outputs = {role: folder / f"{pid}.json" for role, pid in pids.items()}
        deadline = time.monotonic() + 30
        while not all(path.exists() for path in outputs.values()):
            if time.monotonic() > deadline:
                raise SystemExit("a process did not write what it called")
            time.sleep(0.1)
        time.sleep(0.5)
        return {
            role: [(call[0], call[1]) for call in json.loads(path.read_text())[1]] for role, path in outputs.items()
        }
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(60)


def main() -> int:
    """Print how many files and functions took part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="checkout to measure")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = trace(args.root.resolve(), Path(folder))
    for role, functions in calls.items():
        print(f"{role}: {len({file for file, _ in functions})} files, {len(functions)} functions")
        if args.list:
            print("\n".join(f"  {Path(file).relative_to(args.root.resolve())}: {name}" for file, name in functions))
    together = {call for functions in calls.values() for call in functions}
    files = {file for file, _ in together}
    lines = sum(len(Path(file).read_text().splitlines()) for file in files)
    print(f"together: {len(files)} files ({lines} lines), {len(together)} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
