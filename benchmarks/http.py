"""What a request costs the router: CPU time of its process, beside a router in Rust in the same run.

Four workers without a model stand behind each router, 32 connections before it, prompts of 4 KB (Python source; half of
each is one of eight beginnings that requests share, the rest no other has). Measured are

    unary   one token, not streamed
    stream  100 tokens, streamed; one per step of the worker
    paced   the same, a step every 10 ms: how long a token is under way when no process is short of CPU time

    text    the prompt as text, as most clients send it
    ids     the same prompt as token ids: the difference to text is what tokenizing costs

The rival is sglang-router with its default policy (cache_aware) before workers that speak OpenAI's interface; it passes
texts on and tokenizes nothing. It is installed into an environment of its own on first use. CPU time is that of the
router's process, user and system, from the kernel's clock for it. Unary cases are measured several times, in turns; the
run with the least is reported (what else goes on on the machine can only add to it), beside the median and all of them.
A token's delay is the time from the step that made it to the arrival at the client.

    chrt -r 10 python benchmarks/http.py --write   with real-time priority, so that nothing else is in the figures
    python benchmarks/http.py --write    without; written beside the others, as "without_priority"
    python benchmarks/http.py --tls      the same with certificates: HTTPS before the router, mTLS behind it; no rival
    python benchmarks/http.py --kill     20,000 streams while one worker after the other is killed and started again;
                                         each answer is compared with the undisturbed one to the same prompt
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import json
import os
import platform
import random
import re
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from tests.support.servers.certificates import Authority, Certificate

from baton.rpc.server import free_port

HERE = Path(__file__).parent
RESULT = HERE / "results" / "http.json"
PARTS = HERE / "router" / "http_parts"
MODEL = HERE.parent / "models" / "baton-tiny"
RIVAL = "sglang-router==0.3.2"
RIVAL_HOME = Path.home() / ".cache" / "baton-bench" / "sglang-router"
SLOT_BYTES = 8 * 1024
PROMPT_BYTES = 4096
SHARED = 2048
BEGINNINGS = 8
WARM_UP = 1024
"""Requests before a measurement: what a router remembers of requests is full then, and it has seen most words."""
STREAM_TOKENS = 100
CONCURRENCY = 32
WORKERS = 4
KILL_TOKENS = 50
KILL_STEP_MS = 10.0
KILL_CONCURRENCY = 128
KILL_PROMPTS = 512
BAR_REQUEST_US = 250.0
BAR_TOKEN_US = 12.0


@dataclass(frozen=True)
class Case:
    """One measurement: which router, what is sent, and how fast the workers step."""

    router: str
    prompt: str
    mode: str
    requests: int
    tls: bool = False

    @property
    def name(self) -> str:
        """Its name in the results."""
        return f"{self.router}-{self.prompt}-{self.mode}{'-tls' if self.tls else ''}"

    @property
    def tokens(self) -> int:
        return 1 if self.mode == "unary" else STREAM_TOKENS

    @property
    def warm_up(self) -> int:
        """Requests before it is measured; paced ones take a second each."""
        return WARM_UP // 4 if self.mode == "paced" else WARM_UP

    @property
    def step_ms(self) -> float:
        """Pause between two steps of a worker."""
        return 10.0 if self.mode == "paced" else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="unary requests per case; a tenth is streamed")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each unary and paced case")
    parser.add_argument("--without-rival", action="store_true")
    parser.add_argument("--tls", action="store_true", help="with certificates, and without the rival")
    parser.add_argument("--only", default="", help="cases whose name has this, e.g. text-paced; --write keeps others")
    parser.add_argument("--kill", action="store_true", help="kill one worker after the other under load instead")
    parser.add_argument("--kill-requests", type=int, default=20_000)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    if args.kill:
        return kill(args.kill_requests, save=args.write)
    cases = [
        Case("baton", prompt, mode, args.requests // (1 if mode == "unary" else 10), args.tls)
        for prompt in ("text", "ids")
        for mode in ("unary", "stream", "paced")
    ]
    if not (args.without_rival or args.tls):
        install_rival()
        cases += [Case("sglang", "text", case.mode, case.requests) for case in cases[:3]]
    results: dict[str, Any] = {}
    for turn in range(args.repeats):
        for case in cases:
            name = case.name
            if args.only in name and (turn == 0 or case.mode != "stream"):
                result = measure(case)
                say(name, result)
                results[name] = least(results.get(name), result)
    mode = "tls" if args.tls else "" if _real_time() else "without_priority"
    if args.write and args.only:
        results = {**written(mode).get("cases", {}), **results}
    report = summary(results)
    print(json.dumps(report, indent=2))
    if args.write:
        write(report, mode)
    return 0


def _real_time() -> bool:
    return os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)


def measure(case: Case) -> dict[str, Any]:
    """Run one case and return what it took."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = Path(directory)
        certificate = Authority(folder / "certificates").issue("bench") if case.tls else None
        kind = "baton" if case.router == "baton" else "openai"
        workers = start_workers(stack, folder, kind, case.step_ms, certificate)
        ports = [worker.port for worker in workers]
        if case.router == "baton":
            router, port = start_baton(stack, ports, certificate)
        else:
            router, port = start_rival(stack, ports)
        bodies = write_bodies(
            folder, case.prompt, case.tokens, case.requests + case.warm_up, stream=case.mode != "unary"
        )
        sent = (port, folder, bodies, case.tokens, case.requests)
        with load(*sent, warm_up=case.warm_up, certificate=certificate) as generator:
            before = cpu_s(router.pid)
            result = generator.measure()
            seconds = cpu_s(router.pid) - before
    result["cpu_us_per_request"] = 1e6 * seconds / case.requests
    result["cpu_us_per_token"] = result["cpu_us_per_request"] / case.tokens
    return result


def least(before: dict[str, Any] | None, result: dict[str, Any]) -> dict[str, Any]:
    """Return which of two runs took less CPU time, with the times of all so far."""
    runs = [*(before["runs_us"] if before else ()), result["cpu_us_per_request"]]
    best = before if before and before["cpu_us_per_request"] < result["cpu_us_per_request"] else result
    return {**best, "runs_us": runs, "median_us": statistics.median(runs)}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the figures that the bars are about."""
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "real_time_priority": _real_time(),
        "concurrency": CONCURRENCY,
        "workers": WORKERS,
        "prompt_bytes": PROMPT_BYTES,
        "cases": results,
    }
    report["paced_token_us"] = {
        name: round(result["median_us"] / STREAM_TOKENS, 1) for name, result in results.items() if "-paced" in name
    }
    tls = "-tls" if any(name.endswith("-tls") for name in results) else ""
    for router, prompt in (("baton", "text"), ("baton", "ids"), ("sglang", "text")):
        unary = results.get(f"{router}-{prompt}-unary{tls}")
        stream = results.get(f"{router}-{prompt}-stream{tls}")
        if unary and stream:
            more = stream["cpu_us_per_request"] - unary["cpu_us_per_request"]
            report[f"{router}-{prompt}"] = {
                "request_us": round(unary["cpu_us_per_request"], 1),
                "request_us_median": round(unary["median_us"], 1),
                "token_us": round(more / (STREAM_TOKENS - 1), 2),
                "token_us_with_its_request": round(stream["cpu_us_per_token"], 2),
            }
    text = report.get("baton-text")
    ids = report.get("baton-ids")
    if text and ids:
        report["tokenizing_us"] = round(text["request_us"] - ids["request_us"], 1)
        report["bars"] = {
            "request_us": {"at_most": BAR_REQUEST_US, "text": text["request_us"], "ids": ids["request_us"]},
            "token_us": {"at_most": BAR_TOKEN_US, "text": text["token_us"], "ids": ids["token_us"]},
        }
    return report


# --- the fault ---


def kill(requests: int, *, save: bool) -> int:
    """Kill one worker after the other with SIGKILL; every stream must get the tokens of an undisturbed one."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = Path(directory)
        workers = start_workers(stack, folder, "baton", KILL_STEP_MS)
        _, port = start_baton(stack, [worker.port for worker in workers])
        bodies = write_bodies(folder, "ids", KILL_TOKENS, KILL_PROMPTS, stream=True)
        with load(port, folder, bodies, KILL_TOKENS, requests, concurrency=KILL_CONCURRENCY) as generator:
            names = ("migrations", "retries", "retries_denied", "request_failures")
            before = {name: metric(port, f"baton_router_{name}_total") for name in names}
            done = threading.Event()
            kills = list[int]()
            killer = threading.Thread(target=kill_in_turns, args=(stack, folder, port, workers, done, kills))
            generator.begin()
            killer.start()
            try:
                result = generator.end()
            finally:
                done.set()
                killer.join()
        result["kills"] = len(kills)
        for name in names:
            result[name] = metric(port, f"baton_router_{name}_total") - before[name]
    print(json.dumps(result, indent=2))
    if not result["migrations"]:
        print("no stream was where a worker was killed: this shows nothing", file=sys.stderr)
        return 1
    if result["failed"] or result["wrong"] or result["requests"] != requests:
        return 1
    if save:
        write(result, "kill")
    return 0


def kill_in_turns(
    stack: contextlib.ExitStack, folder: Path, port: int, workers: list[Worker], done: threading.Event, kills: list[int]
) -> None:
    """Kill workers and start them again, until ``done``; each kill finds all of them healthy and streams under way.

    ``kills`` gets the index of each worker that was killed.
    """
    generated = metric(port, "baton_request_generated_tokens_total")
    while not done.wait(0.02):
        now = metric(port, "baton_request_generated_tokens_total")
        healthy = metric(port, "baton_router_instance_healthy")
        if healthy < len(workers) or now < generated + KILL_CONCURRENCY * KILL_TOKENS / 4:
            continue
        at = len(kills) % len(workers)
        workers[at].process.kill()
        workers[at].process.wait()
        kills.append(at)
        workers[at] = start_worker(stack, folder, "baton", at, KILL_STEP_MS, port=workers[at].port)
        generated = metric(port, "baton_request_generated_tokens_total")


def metric(port: int, name: str, certificate: Certificate | None = None) -> float:
    """Return the sum of a metric's series."""
    text = get(port, "/metrics", certificate)
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def get(port: int, path: str, certificate: Certificate | None = None) -> str:
    """Return what a router answers."""
    context = ssl.create_default_context(cafile=certificate.ca) if certificate else None
    with urllib.request.urlopen(f"http{'s' if context else ''}://127.0.0.1:{port}{path}", context=context) as answer:
        text: str = answer.read().decode()
        return text


# --- processes ---


@dataclass
class Worker:
    """A running worker."""

    process: subprocess.Popen[str]
    port: int


def start_workers(
    stack: contextlib.ExitStack, folder: Path, kind: str, step_ms: float, certificate: Certificate | None = None
) -> list[Worker]:
    """Start the workers; they end with the stack."""
    times = folder / "times"
    times.write_bytes(bytes(SLOT_BYTES * max(CONCURRENCY, KILL_CONCURRENCY)))
    return [start_worker(stack, folder, kind, at, step_ms, certificate) for at in range(WORKERS)]


def start_worker(
    stack: contextlib.ExitStack,
    folder: Path,
    kind: str,
    at: int,
    step_ms: float,
    certificate: Certificate | None = None,
    *,
    port: int = 0,
) -> Worker:
    """Start one worker; ``port`` 0: one that is free."""
    command = [sys.executable, str(PARTS / "worker.py"), kind, "--name", f"w{at}", "--model", str(MODEL)]
    command += ["--times", str(folder / "times"), "--step-ms", str(step_ms), "--port", str(port)]
    command += ["--tls", certificate.cert, certificate.key, certificate.ca] if certificate else []
    process = spawn(stack, command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return Worker(process, int(process.stdout.readline()))


def start_baton(
    stack: contextlib.ExitStack, ports: list[int], certificate: Certificate | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Start Baton's router and wait until all workers are ready."""
    port = free_port()
    command = [sys.executable, "-m", "baton_router.main", "--port", str(port), "--grpc-port", "0"]
    command += ["--decode", ",".join(f"127.0.0.1:{item}" for item in ports), "--log-level", "error"]
    router = spawn(stack, [*command, *(certificate.flags if certificate else ())])
    wait_for(port, "/readyz", certificate)
    while metric(port, "baton_router_instance_healthy", certificate) < len(ports):
        time.sleep(0.05)
    return router, port


def start_rival(stack: contextlib.ExitStack, ports: list[int]) -> tuple[subprocess.Popen[str], int]:
    """Start sglang-router and wait until it serves."""
    port = free_port()
    command = [str(RIVAL_HOME / "bin" / "python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "error", "--worker-urls"]
    router = spawn(stack, [*command, *(f"http://127.0.0.1:{item}" for item in ports)], stdout=subprocess.DEVNULL)
    wait_for(port, "/readiness")
    return router, port


def install_rival() -> None:
    """Make the rival's environment, unless it is there."""
    name, version = RIVAL.replace("-", "_").split("==")
    if any(RIVAL_HOME.glob(f"lib/*/site-packages/{name}-{version}.dist-info")):
        return
    subprocess.run([sys.executable, "-m", "venv", str(RIVAL_HOME)], check=True)
    subprocess.run([str(RIVAL_HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", RIVAL], check=True)


def spawn(stack: contextlib.ExitStack, command: list[str], *, stdout: int | None = None) -> subprocess.Popen[str]:
    """Start a process that is killed with the stack."""
    process = stack.enter_context(subprocess.Popen(command, stdout=stdout, text=True))
    stack.callback(process.kill)
    return process


def wait_for(port: int, path: str, certificate: Certificate | None = None, limit_s: float = 60.0) -> None:
    """Wait until a router answers with 200."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            get(port, path, certificate)
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} does not answer")


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used: the clock that ``clock_getcpuclockid(3)`` names."""
    return time.clock_gettime((~pid << 3) | 2)


# --- load ---


class Generator:
    """The load generator, warmed up."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input: IO[str] = process.stdin
        self._output: IO[str] = process.stdout
        self.wait_for("warm")

    def wait_for(self, word: str) -> None:
        """Wait until it says a word."""
        said = self._output.readline().strip()
        if said != word:
            raise RuntimeError(f"the load generator failed: {said!r}")

    def begin(self) -> None:
        self._input.write("go\n")
        self._input.flush()

    def end(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self._output.readline())
        return result

    def measure(self) -> dict[str, Any]:
        """Measure, and return the result."""
        self.begin()
        return self.end()


@contextlib.contextmanager
def load(
    port: int,
    folder: Path,
    bodies: Path,
    tokens: int,
    requests: int,
    *,
    concurrency: int = CONCURRENCY,
    warm_up: int = WARM_UP,
    certificate: Certificate | None = None,
) -> Iterator[Generator]:
    """Start the load generator and warm up."""
    command = [sys.executable, str(PARTS / "load.py"), "--port", str(port), "--bodies", str(bodies)]
    command += ["--times", str(folder / "times"), "--concurrency", str(concurrency), "--warm-up", str(warm_up)]
    command += ["--tokens", str(tokens), "--requests", str(requests)]
    command += ["--ca", certificate.ca] if certificate else []
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        yield Generator(process)


def write_bodies(folder: Path, prompt: str, tokens: int, count: int, *, stream: bool) -> Path:
    """Write the requests' bodies to a file."""
    prompts: list[Any] = list(make_prompts(count))
    if prompt == "ids":
        from baton.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(MODEL)
        prompts = [tokenizer.encode(text) for text in prompts]
    common = {"model": "canned", "max_tokens": tokens, "temperature": 0, "stream": stream}
    bodies = [
        json.dumps({**common, "prompt": item, "user": "c0000", "request_id": "c0000"}, separators=(",", ":"))
        for item in prompts
    ]
    path = folder / "bodies.json"
    path.write_text(json.dumps(bodies), encoding="utf-8")
    return path


def make_prompts(count: int) -> Iterator[str]:
    """Yield prompts of 4 KB: pieces of the standard library's source, the same ones in every run."""
    source = "".join(Path(module.__file__ or "").read_text(encoding="ascii") for module in (argparse, contextlib))
    rng = random.Random(7)

    def piece(length: int) -> str:
        at = rng.randrange(len(source) - length)
        return source[at : at + length]

    beginnings = [piece(SHARED) for _ in range(BEGINNINGS)]
    for at in range(count):
        yield beginnings[at % BEGINNINGS] + piece(PROMPT_BYTES - SHARED)


def say(name: str, result: dict[str, Any]) -> None:
    """Print one line per case as it ends."""
    print(
        f"{name:20} {result['cpu_us_per_request']:8.1f} us/request {result['cpu_us_per_token']:7.2f} us/token"
        f"   delay p50 {result['chunk_delay_ms']['p50']:6.2f} p99 {result['chunk_delay_ms']['p99']:6.2f} ms"
        f"   {result['requests'] / result['seconds']:6.0f} requests/s   failed {result['failed']}",
        flush=True,
    )
    for failure in result["failures"]:
        print("   ", failure)


def written(mode: str) -> dict[str, Any]:
    """Return the results of a mode that were written before; "": of all modes."""
    known: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    return known.get(mode, {}) if mode else known


def write(report: dict[str, Any], mode: str) -> None:
    """Write the results, and keep those of the other modes."""
    known = written("")
    kept = {name: known[name] for name in ("kill", "tls", "without_priority") if name in known}
    RESULT.write_text(
        json.dumps({**known, mode: report} if mode else {**report, **kept}, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
