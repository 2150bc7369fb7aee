"""What busy instances cost a router that has no request: CPU time for their load reports, KV events and probes.

A real router process follows simulated instances (``router/control_parts/instances.py``: real gRPC servers that answer
with the code of real ones), a quarter of them prefill instances. All are busy: a decode instance has 8 running requests
and 30 steps a second. Told is the router's CPU time per second and per instance, and what that makes for 1,000 of them.
At the end all pause, and the index must hold exactly the blocks that the instances hold.

    python benchmarks/control_plane.py --write
    python benchmarks/control_plane.py --beside ../older --write     in turns with another checkout, which must be built
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its http.py would hide the standard library's

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIMULATION = ROOT / "benchmarks" / "router" / "control_parts" / "instances.py"
RESULT = ROOT / "benchmarks" / "results" / "control_plane.json"
PER_PROCESS = 128
SETTLE_S = 5.0
GIVE_UP_S = 60.0
BAR_CORES_PER_1000 = 1 / 3
LEAST_STEPS = 0.9
"""Share of their steps that simulated instances must have found the time for."""


def environment(tree: Path) -> dict[str, str]:
    """Return the environment in which a checkout's code runs."""
    paths = ("src", "services/prefill", "services/decode", "services/router", "services/kvstore", "kernels")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*(str(tree / x) for x in paths)])}


@contextmanager
def simulated(tree: Path, role: str, count: int) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run so many instances in one process; gives it and their addresses."""
    command = [sys.executable, str(SIMULATION), "--role", role, "--count", str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(tree))
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def ask(process: subprocess.Popen[str], line: str) -> Any:
    """Send simulated instances a line and return their answer; see ``instances.py``."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(line, file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


@contextmanager
def router(tree: Path, *flags: str) -> Iterator[tuple[int, str]]:
    """Run a router; gives its process id and where its HTTP is."""
    command = [sys.executable, "-m", "baton_router.main", "--port", "0", "--grpc-port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(tree))
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if result := re.search(r"serving http=(\S+)", line):
                break
        else:
            raise SystemExit(f"the router did not start:\n{''.join(lines)}")
        # Its log is not read: a full pipe would stop it.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield process.pid, f"http://{result[1]}"
        drain.kill()
        drain.wait()
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metric(url: str, name: str, label: str = "") -> list[float]:
    """Return the values of all series of a metric, or of those with a label."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=GIVE_UP_S).read().decode()
    return [float(x) for x in re.findall(rf"^{name}(?:{{[^\n]*{label}[^\n]*}})? (\S+)$", text, re.MULTILINE)]


def until(what: str, condition: Any) -> None:
    give_up = time.monotonic() + GIVE_UP_S
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit(f"gave up waiting for {what}")
        time.sleep(0.2)


def measure(tree: Path, decodes: int, prefills: int, seconds: float) -> dict[str, Any]:
    """Run one checkout's router and instances; returns what the router took."""
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        addresses: dict[str, list[str]] = {"decode": [], "prefill": []}
        for role, count in (("decode", decodes), ("prefill", prefills)):
            for begin in range(0, count, PER_PROCESS):
                process, result = stack.enter_context(simulated(tree, role, min(PER_PROCESS, count - begin)))
                processes.append(process)
                addresses[role] += result
        flags = [flag for role, result in addresses.items() if result for flag in (f"--{role}", ",".join(result))]
        pid, url = stack.enter_context(router(tree, *flags))
        instances = decodes + prefills
        until("all indexes", lambda: sum(metric(url, "baton_router_index_state", 'state="exact"')) == instances)
        time.sleep(SETTLE_S)
        events = sum(metric(url, "baton_router_index_events_total"))
        for process in processes:
            ask(process, "steps")
        began = time.monotonic()
        before = cpu_s(pid)
        time.sleep(seconds)
        spent = cpu_s(pid) - before
        took = time.monotonic() - began
        busy = min(ask(process, "steps") for process in processes)
        events = sum(metric(url, "baton_router_index_events_total")) - events
        held = sum(sum(ask(process, "pause")) for process in processes)
        until("the index to be exact", lambda: sum(metric(url, "baton_router_index_blocks")) == held)
        gaps = sum(metric(url, "baton_router_index_sequence_gaps_total"))
    cores = spent / took
    return {
        "instances": instances,
        "cores": cores,
        "us_per_instance_and_s": cores / instances * 1e6,
        "cores_per_1000": 1000 * cores / instances,
        "events_per_instance_and_s": events / took / instances,
        "steps_taken_of_wanted": busy,
        "blocks_held": held,
        "gaps": gaps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured per run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--beside", type=Path, help="root of another checkout")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    trees = {"this": ROOT} if args.beside is None else {"beside": args.beside.resolve(), "this": ROOT}
    prefills = args.instances // 4
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(args.repeats):
        for name, tree in trees.items():
            runs[name].append(measure(tree, args.instances - prefills, prefills, args.seconds))
            x = runs[name][-1]
            print(
                f"{name:<8}{x['instances']} instances: {x['cores']:.3f} of a core, "
                f"{x['us_per_instance_and_s']:.0f} us per instance and second, {x['cores_per_1000']:.2f} cores for "
                f"1,000; {x['events_per_instance_and_s']:.1f} events each a second, {x['gaps']:.0f} gaps, "
                f"{x['steps_taken_of_wanted']:.2f} of the steps"
            )
    medians = {name: statistics.median(x["cores_per_1000"] for x in result) for name, result in runs.items()}
    if "beside" in medians:
        print(f"beside / this: {medians['beside'] / medians['this']:.2f}")
    fine = medians["this"] <= BAR_CORES_PER_1000
    if min(x["steps_taken_of_wanted"] for result in runs.values() for x in result) < LEAST_STEPS:
        raise SystemExit("the simulated instances were not as busy as they should be: the machine is too slow")
    print(f"1,000 instances: {medians['this']:.2f} cores (bar {BAR_CORES_PER_1000:.2f}): {'met' if fine else 'missed'}")
    if args.write:
        machine = {"cpus": os.cpu_count(), "processor": platform.machine()}
        RESULT.write_text(json.dumps({"cores_per_1000": medians, "runs": runs, "machine": machine}, indent=1) + "\n")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
