"""The Triton operators on this machine's GPU: checked, timed, compared; in less than eight minutes.

Every operator is compared with its definition at small shapes. Then each is timed at shapes of Llama 3.1 8B (experts of
Qwen3 30B-A3B, latents of DeepSeek-V3): achieved GB/s, as a share of the bandwidth of a copy that was measured in the
same run, and TFLOP/s, as a share of the rate of a bfloat16 product of 8192 x 8192; beside torch's operators, and
FlashInfer where it is installed. Medians of up to 20 runs with cold caches, as CUDA graphs where the operator takes
nothing from the host, so without the time that launches take. Bytes are those that have to move, each once.

``--tune`` tries configurations instead and writes the fastest ones to this machine's table, which engines use from then
on (baton_kernels/gpu/tuning.py says which table wins). ``--interpret`` checks on a CPU by Triton's interpreter, and
times nothing. Without a CUDA device it ends with status 2.

    python benchmarks/kernels.py --write
    python benchmarks/kernels.py --tune
    python benchmarks/kernels.py --interpret
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The root, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

RESULT = Path(__file__).parent / "results" / "kernels.json"
SECONDS = 470.0
"""After so many no further case is begun."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="check on the CPU, time nothing")
    parser.add_argument("--tune", action="store_true", help="find configurations and write this machine's table")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

    import torch

    if not args.interpret and not torch.cuda.is_available():
        print("kernels.py: no CUDA device here; --interpret checks the operators on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cpu" if args.interpret else "cuda:0")
    begin = time.monotonic()
    if wrong := check(device, args.only):
        print(f"{wrong} of the operators differ from their definitions", file=sys.stderr)
        return 1
    if args.interpret:
        return 0
    result = tune(device, args.only) if args.tune else measure(device, args.only, begin)
    if args.write and not args.tune:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def check(device: Any, only: str) -> int:
    """Compare the operators with their definitions; returns how many differ."""
    from benchmarks.kernel_parts import attention, operators

    wrong = 0
    for each in itertools.chain(attention.checks(device), operators.checks(device)):
        if each.name.startswith(only):
            error = each.run()
            wrong += not error <= 1
            print(f"{each.name:<40}{'right' if error <= 1 else 'WRONG':>7}  {error:.2g} of the tolerance", flush=True)
    return wrong


def measure(device: Any, only: str, begin: float) -> dict[str, Any]:
    """Time the operators and those beside them."""
    import torch
    import triton
    from benchmarks.kernel_parts import attention, operators
    from benchmarks.kernel_parts.measure import Clock, error

    clock = Clock(device)
    ceilings = clock.ceilings()
    copy = ceilings["copy_bytes_per_s"]
    matrix = ceilings["matrix_flops_per_s"]
    print(f"\n{torch.cuda.get_device_name(device)}: copy {copy / 1e9:.0f} GB/s, product {matrix / 1e12:.0f} TFLOP/s\n")
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    for case in itertools.chain(attention.timed(device), operators.timed(device)):
        if not case.name.startswith(only):
            continue
        if time.monotonic() - begin > SECONDS:
            left.append(case.name)
            continue
        seconds = clock.seconds(case.run, captured=case.captured)
        row: dict[str, Any] = {"case": case.name, "us": 1e6 * seconds, "captured": case.captured, "beside": {}}
        row |= {"gb_per_s": case.nbytes / seconds / 1e9, "of_copy": case.nbytes / seconds / copy}
        row |= {"tflop_per_s": case.flops / seconds / 1e12, "of_matrix": case.flops / seconds / matrix}
        print(
            f"{case.name:<52}{row['us']:10.1f} us{row['gb_per_s']:8.0f} GB/s ({row['of_copy']:4.0%})"
            f"{row['tflop_per_s']:8.1f} TFLOP/s ({row['of_matrix']:4.0%})",
            flush=True,
        )
        for name, rival in case.rivals.items():
            try:
                rival_s = clock.seconds(rival, captured=case.captured)
                same = None if "not compared" in name else error(rival(), case.run(), 2e-2)
            except (RuntimeError, TypeError, ValueError) as failure:
                row["beside"][name] = {"failed": str(failure).splitlines()[0][:200]}
                print(f"    {name:<48}  failed: {row['beside'][name]['failed']}", flush=True)
                continue
            row["beside"][name] = {"us": 1e6 * rival_s, "ratio": rival_s / seconds, "difference": same}
            note = "" if same is None or same <= 1 else "  DIFFERS"
            print(f"    {name:<48}{1e6 * rival_s:10.1f} us, {rival_s / seconds:.2f} times ours{note}", flush=True)
        rows.append(row)
    if left:
        print(f"no time for {len(left)} cases: {', '.join(left)}", file=sys.stderr)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    about = {"benchmark": "kernels", "device": torch.cuda.get_device_name(device), **versions}
    return {**about, "seconds": time.monotonic() - begin, "ceilings": ceilings, "cases": rows, "left_out": left}


def tune(device: Any, only: str) -> None:
    """Write this machine's table of configurations."""
    from benchmarks.kernel_parts import attention, operators
    from benchmarks.kernel_parts.candidates import Tuner
    from benchmarks.kernel_parts.measure import Clock

    tuner = Tuner(Clock(device))
    for case in itertools.chain(attention.timed(device), operators.timed(device)):
        if case.name.startswith(only):
            tuner.tune(case)
    print(f"written: {tuner.write()}")


if __name__ == "__main__":
    raise SystemExit(main())
