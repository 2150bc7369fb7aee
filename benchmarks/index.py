"""The prefix index and the whole decision, beside ai-dynamo-runtime's RadixTree in the same run.

A million blocks on 16 instances: look-ups of chains of 32, 256 and 2048 blocks, stores of 16 and 256 blocks per event.
Both are asked the same questions in turns, round after round, and their answers must agree; an event is taken as it
comes over the wire (protobuf here, JSON there). Then the whole decision of Baton's router: hash the prompt, look it up,
score 16 x 16 pairs, reserve.

All is done twice: at the usual priority, and with a real-time priority (``chrt -r 10``) on both sides,
where this user may have one. The rival hands every call over to a thread of its own and waits for it, which the
priority makes dearer; Baton's index runs in its caller's thread. So the first is what compares; the second keeps other
processes out.

The rival is installed into an environment of its own on first use (``--rival-python`` names another one, ``--no-rival``
goes without):

    python -m venv ~/.cache/baton-bench/ai-dynamo-runtime
    ~/.cache/baton-bench/ai-dynamo-runtime/bin/pip install ai-dynamo-runtime==1.6.1

    python benchmarks/index.py --write
    python benchmarks/index.py --fleets  decisions alone, also among 64 and 256 instances of a role, one of them full or
                                         none; with --write they take their place in the result
    python benchmarks/index.py --growth  the longest stop while 4.3 million blocks come, the table doubling on the way
    python benchmarks/index.py --cut     an instance's event stream is cut for ten seconds, see
    router/index_parts/cut.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not this file's folder: its http.py would hide the standard library's.
    sys.path[:1] = [
        str(Path(__file__).resolve().parents[1]),
        str(Path(__file__).resolve().parent / "router/index_parts"),
    ]

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from subprocess import DEVNULL
from typing import IO, Any

import numpy as np
from cut import measure_cuts
from decision import BLOCK, ROOT, measure_decisions, measure_fleets, prompt_tokens
from growth import measure_growth
from workload import CHAIN

from baton.hashing import hash_chain

HERE = Path(__file__).parent
PARTS = HERE / "router" / "index_parts"
RESULT = HERE / "results" / "index.json"
RIVAL = "ai-dynamo-runtime==1.6.1"
RIVAL_HOME = Path.home() / ".cache" / "baton-bench" / "ai-dynamo-runtime"
BARS = {32: 1.5, 256: 1.0, 2048: 1.0}
DECISION_BARS_US = {32: 150.0, 2048: 1400.0}
FLEET_BARS_US = {"match_minus_load": {16: 150.0, 64: 200.0, 256: 500.0}, "cost_ms": {16: 200.0, 64: 300.0, 256: 1000.0}}
"""Most that a decision may take on the processor, by prefill instances; there are as many decode instances."""
PER_EVENT = (16, 256)
PRIORITIES = {"ordinary": (), "realtime": ("chrt", "-r", "10")}
"""What is put before the command of either side."""
BAR_STALE_S = 1.0
BAR_STOP_US = 2000.0
GROWTH_BLOCKS = 4_300_000


class Remote:
    """A side in a process of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, **command: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(command: Sequence[str]) -> Iterator[Remote]:
    remote = Remote(command)
    try:
        yield remote
    finally:
        remote.process.kill()
        remote.process.wait()


def rival_python(given: str | None) -> str:
    """Return an interpreter that can import the rival; makes one on first use."""
    if given:
        return given
    python = RIVAL_HOME / "bin" / "python"
    if not python.exists():
        print(f"installing {RIVAL} into {RIVAL_HOME}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(RIVAL_HOME)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", RIVAL], check=True)
    return str(python)


def write_chains(number: int, file: IO[bytes]) -> None:
    for at in range(number):
        file.write(hash_chain(prompt_tokens(at), BLOCK, ROOT).data)
    file.flush()


def median_of(rounds: list[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in rounds)


def may_have_priority() -> bool:
    """Return whether this user's processes may have a real-time priority."""
    chrt = shutil.which(PRIORITIES["realtime"][0])
    return chrt is not None and not subprocess.run([*PRIORITIES["realtime"], "true"], stderr=DEVNULL).returncode


def measure_index(
    pythons: dict[str, str], priority: Sequence[str], chains: str, rounds: int, questions: int
) -> dict[str, Any]:
    """Fill and ask all sides in turns; returns values per side and case, medians over the rounds."""
    out: dict[str, Any] = {name: {} for name in pythons}
    for per_event in PER_EVENT:
        with ExitStack() as stack:
            commands = {x: (*priority, python, str(PARTS / f"{x}_side.py"), chains) for x, python in pythons.items()}
            sides = {name: stack.enter_context(running(command)) for name, command in commands.items()}
            for name, side in sides.items():
                out[name][f"stored, {per_event} per event"] = side(do="store", per_event=per_event)
            for blocks in BARS:
                asked: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
                for seed in range(rounds):
                    for name, side in sides.items():
                        asked[name].append(side(do="find", blocks=blocks, count=questions, seed=seed))
                    if len({asked[name][-1]["answers"] for name in sides}) > 1:
                        raise SystemExit(f"the answers for {blocks} blocks differ")
                for name in sides:
                    case = {key: median_of(asked[name], key) for key in ("p50_us", "p99_us")}
                    out[name][f"find {blocks}, stored by {per_event}"] = case
    return out


def print_index(priority: str, result: dict[str, Any]) -> bool:
    """Print the table and return whether the bars were met."""
    fine = True
    rival = result.get("dynamo")
    print(f"\n{f'p50 in us, {priority}':<28}{'baton':>10}" + (f"{'dynamo':>10}{'ratio':>8}{'bar':>8}" if rival else ""))
    for case, figures in result["baton"].items():
        line = f"{case:<28}{figures['p50_us']:>10.1f}"
        if rival:
            ratio = figures["p50_us"] / rival[case]["p50_us"]
            bar = BARS[int(case.split()[1].rstrip(","))] if case.startswith("find") else 1.0
            fine = fine and ratio <= bar
            line += f"{rival[case]['p50_us']:>10.1f}{ratio:>8.2f}{bar:>8.1f}"
        print(line)
    for case in (f"stored, {n} per event" for n in PER_EVENT):
        for name, text in (("blocks_per_s", "million blocks/s"), ("bytes_per_block", "bytes per block")):
            scale = 1e6 if name == "blocks_per_s" else 1.0
            values = [side[case][name] / scale for side in result.values()]
            print(f"{text + ', ' + case[8:]:<42}" + "".join(f"{value:>10.2f}" for value in values))
    return fine


def print_decisions(result: dict[str, Any]) -> bool:
    print(f"\n{'decision, p50 in us':<24}{'whole':>9}{'hash':>9}{'find':>9}{'rest':>9}{'release':>9}{'bar':>9}")
    fine = True
    for blocks, bar in DECISION_BARS_US.items():
        x = result[str(blocks)]
        fine = fine and x["p50_us"] <= bar
        parts = (x["p50_us"], x["hash_us"], x["find_us"], x["rest_us"], x["release_us"], bar)
        print(f"{f'{blocks} blocks':<24}" + "".join(f"{part:>9.0f}" for part in parts) + f"   p99 {x['p99_us']:.0f}")
    return fine


def print_fleets(result: dict[str, Any]) -> bool:
    print(f"\n{'decision, us of processor':<44}{'p50':>9}{'p99':>9}{'bar':>9}")
    fine = True
    for case, x in result.items():
        policy, _, rest = case.partition(", ")
        bar = FLEET_BARS_US[policy][int(rest.split()[0])]
        fine = fine and x["p50_us"] <= bar
        print(f"{case:<44}{x['p50_us']:>9.0f}{x['p99_us']:>9.0f}{bar:>9.0f}")
    return fine


def measure_placement(blocks: int, questions: int) -> dict[str, Any]:
    """Time whole decisions: by the length of prompts, and by the number of instances."""
    return {
        "decision": measure_decisions(max(1, blocks // CHAIN), questions, DECISION_BARS_US),
        "fleets": measure_fleets(FLEET_BARS_US["cost_ms"], FLEET_BARS_US, questions),
    }


def print_placement(result: dict[str, Any]) -> bool:
    return all([print_decisions(result["decision"]), print_fleets(result["fleets"])])


def print_growth(result: dict[str, float]) -> bool:
    x = result
    print(f"\n{x['blocks'] / 1e6:.1f} million blocks, {x['per_event']} per event, us of processor per event:")
    print(f"p50 {x['p50_us']:.0f}, p99 {x['p99_us']:.0f}, worst {x['worst_us']:.0f} (bar {BAR_STOP_US:.0f}); ", end="")
    print(f"{x['sum_s']:.2f} s in all")
    return result["worst_us"] <= BAR_STOP_US


def print_cuts(result: dict[str, Any]) -> bool:
    for how, x in result.items():
        print(
            f"{how}: stale in /metrics after {x['stale_after_s']:.2f} s (bar {BAR_STALE_S:.0f}); exact again, "
            f"with the instance's own {x['blocks']} blocks, {x['exact_after_s']:.2f} s after the end of the cut"
        )
    return all(x["stale_after_s"] <= BAR_STALE_S for x in result.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="distinct blocks, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=1000, help="look-ups per round and length")
    parser.add_argument("--rival-python", help="interpreter of an environment with ai-dynamo-runtime")
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(HERE.parent)}")
    parser.add_argument("--cut", action="store_true", help="measure only what a cut of the event stream does")
    parser.add_argument("--fleets", action="store_true", help="measure only decisions")
    parser.add_argument("--growth", action="store_true", help="measure only the stops while the table grows")
    args = parser.parse_args()
    if args.growth:
        sys.exit(0 if print_growth(measure_growth(GROWTH_BLOCKS, 256, 3)) else 1)
    if args.fleets:
        value = measure_placement(args.blocks, 300)
        if args.write:
            RESULT.write_text(json.dumps({**json.loads(RESULT.read_text()), **value}, indent=1) + "\n")
        sys.exit(0 if print_placement(value) else 1)
    if args.cut:
        sys.exit(0 if print_cuts(asyncio.run(measure_cuts())) else 1)
    result: dict[str, Any] = {"rival": None if args.no_rival else RIVAL, "blocks": args.blocks}
    pythons = {"baton": sys.executable}
    if not args.no_rival:
        pythons["dynamo"] = rival_python(args.rival_python)
    with tempfile.NamedTemporaryFile(suffix=".hashes") as file:
        write_chains(max(1, args.blocks // CHAIN), file)  # type: ignore[arg-type]
        result["index"] = {
            name: measure_index(pythons, priority, file.name, args.rounds, args.questions)
            for name, priority in PRIORITIES.items()
            if not priority or may_have_priority()
        }
    met = [print_index(name, measured) for name, measured in result["index"].items()]
    if len(result["index"]) < len(PRIORITIES):
        print("\nwith a real-time priority: not measured, this user may not have one (chrt -r 10)")
    result |= measure_placement(args.blocks, min(300, args.questions))
    fine = all([*met, print_placement(result)])
    result["growth"] = measure_growth(GROWTH_BLOCKS, 256, 3)
    fine = print_growth(result["growth"]) and fine
    result["machine"] = {"cpus": os.cpu_count(), "processor": platform.machine(), "numpy": np.__version__}
    print("\nall bars met" if fine else "\na bar was missed")
    if args.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
