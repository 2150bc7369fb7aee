"""Whether ``baton bench serve`` and an independent client see the same of the same service.

Both send the same loads to one router in turns: closed loops of 1, 4 and 12 requests, prompts of 64 random tokens, 32
output tokens. Behind the router is an instance without a model whose tokens come at known times (60 to 100 ms, then
every 20 ms), or with ``--server up`` the demo model of ``baton up``. The other client is ``sglang.bench_serving``,
unmodified, from an environment of its own (``tests/clients``). Reported is the median, over the rounds, of the quotient
of both figures of a round: what drifts with the machine's other work hits both alike. Times of a run are its medians.
It fails if a median of quotients is further from 1 than ``--within``.

    python benchmarks/serve/clients.py --rounds 5 --write
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.clients.environment import Program, python
from tests.clients.test_benchmarks import LIGHT
from tests.support.servers.up import running_up

from baton.rpc.server import free_port

MODEL = ROOT / "models" / "baton-tiny"
RESULT = ROOT / "benchmarks" / "results" / "serve-clients.json"
ISL = 64
OSL = 32
LOADS = (1, 4, 12)
FIGURES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s", "requests_per_s")
CHECKED = ("ttft_ms", "itl_ms", "output_tokens_per_s")


def measure_baton(url: str, concurrency: int, requests: int, seed: int) -> dict[str, float]:
    """Return what ``baton bench serve`` reports: medians of times, and rates."""
    command = [sys.executable, "-m", "baton.cli.main", "bench", "serve", "--url", url, "--tokenizer", str(MODEL)]
    command += [
        "--isl",
        str(ISL),
        "--osl",
        str(OSL),
        "--requests",
        str(requests),
        "--max-concurrency",
        str(concurrency),
    ]
    done = subprocess.run([*command, "--seed", str(seed), "--warmup", "1", "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr + done.stdout)
    (load,) = (row for row in map(json.loads, done.stdout.splitlines()) if row["record"] == "serve")
    return {name: load[name]["median"] if name.endswith("_ms") else load[name] for name in FIGURES}


def measure_rival(client: Program, url: str, concurrency: int, requests: int, seed: int) -> dict[str, float]:
    """Return what the other client reports: medians of times, and rates."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out.jsonl")
        client.run(
            "python", "-m", "sglang.bench_serving", "--backend", "vllm", "--base-url", url, "--model", model,
            "--tokenizer", str(MODEL), "--dataset-name", "random-ids", "--num-prompts", str(requests), "--seed",
            str(seed), "--random-input-len", str(ISL), "--random-output-len", str(OSL), "--random-range-ratio", "1",
            "--max-concurrency", str(concurrency), "--output-file", str(path),
        )  # fmt: skip
        result = json.loads(path.read_text())
    if result["completed"] != requests or result["total_output_tokens"] != requests * OSL:
        raise SystemExit(f"the other client lost something: {result}")
    names = ("median_ttft_ms", "median_itl_ms", "median_tpot_ms", "median_e2e_latency_ms", "output_throughput",
             "request_throughput")  # fmt: skip
    return {figure: result[name] for figure, name in zip(FIGURES, names, strict=True)}


@contextlib.contextmanager
def paced() -> Iterator[str]:
    """Run a router in front of an instance whose tokens come at known times; yields its URL."""
    worker = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "serve" / "paced_worker.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdout is not None
    assert worker.stdin is not None
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "baton_router.main",
        "--port",
        str(port),
        "--grpc-port",
        "0",
        "--log-level",
        "error",
    ]
    router = subprocess.Popen([*command, "--decode", worker.stdout.readline().strip()])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while not _serves(url):
            if time.monotonic() > deadline or router.poll() is not None or worker.poll() is not None:
                raise SystemExit("the router or the worker did not start")
            time.sleep(0.1)
        yield url
    finally:
        router.kill()
        router.wait()
        worker.stdin.close()
        worker.wait(30)


def _serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def up() -> Iterator[str]:
    """Run ``baton up`` with the demo model; yields its URL."""
    with running_up("--ratio", "1P1D", "--dtype", "float32", "--model", str(MODEL)) as server:
        yield server.url


def measure(url: str, client: Program, rounds: int, requests: int) -> list[dict[str, Any]]:
    """Measure every load, both clients in turns; returns a row per load."""
    rows = []
    for concurrency in LOADS:
        count = max(16, requests if concurrency > 1 else requests // 3)
        pairs = []
        for number in range(rounds):
            seed = 1000 * concurrency + 10 * number
            calls = [lambda s: measure_baton(url, concurrency, count, s),  # noqa: B023
                     lambda s: measure_rival(client, url, concurrency, count, s + 1)]  # noqa: B023  # fmt: skip
            order = (0, 1) if number % 2 == 0 else (1, 0)
            result = {which: calls[which](seed) for which in order}
            pairs.append((result[0], result[1]))
        row: dict[str, Any] = {"concurrency": concurrency, "requests": count}
        for name in FIGURES:
            row[name] = {
                "ours": round(statistics.median(a[name] for a, _ in pairs), 3),
                "theirs": round(statistics.median(b[name] for _, b in pairs), 3),
                "ratio": round(statistics.median(a[name] / b[name] for a, b in pairs), 4),
                "ratios": [round(a[name] / b[name], 3) for a, b in pairs],
            }
        rows.append(row)
        print(f"concurrency {concurrency}: " + "; ".join(f"{n} {row[n]['ratios']}" for n in CHECKED), flush=True)
    return rows


def main() -> int:
    """Measure; returns 1 if the two disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs per load (default: 5)")
    parser.add_argument("--requests", type=int, default=60, help="requests per run (default: 60)")
    parser.add_argument("--server", choices=("paced", "up"), default="paced", help="what is measured (default: paced)")
    parser.add_argument("--within", type=float, default=0.05, help="how far ratios may be from 1 (default: 0.05)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    client = python("sglang", *LIGHT, bare=("sglang==0.4.6.post5",))
    with {"paced": paced, "up": up}[args.server]() as url:
        rows = measure(url, client, args.rounds, args.requests)
    print(f"\n{'':>12}" + "".join(f"{name:>32}" for name in FIGURES))
    for row in rows:
        cells = (f"{row[n]['ours']:.2f} / {row[n]['theirs']:.2f} = {row[n]['ratio']:.3f}" for n in FIGURES)
        print(f"{row['concurrency']:>12}" + "".join(f"{cell:>32}" for cell in cells))
    if args.write:
        RESULT.write_text(
            json.dumps({"server": args.server, "isl": ISL, "osl": OSL, "cpus": os.cpu_count(), "loads": rows}, indent=1)
            + "\n"
        )
    bad = [
        f"{r['concurrency']}: {n} {r[n]['ratio']}"
        for r in rows
        for n in CHECKED
        if abs(r[n]["ratio"] - 1) > args.within
    ]
    print("outside: " + ", ".join(bad) if bad else f"all within {args.within:.0%}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
