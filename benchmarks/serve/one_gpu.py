"""1P1D on one GPU against one instance that does both, over HTTP, under the same load.

Both ways run ``baton up`` with a random Llama of the shape of Llama-3.1-8B in bfloat16, on the same GPU: a prefill and
a decode instance that hand KV over on the device (``--pipe cuda_ipc``), or one decode instance that computes its
prompts. Each gets the same requests from ``baton bench serve`` (random tokens, Poisson arrivals); reported are its
percentiles of TTFT and ITL. Then, one at a time, prompts of ``--isl`` tokens with one new token: ``exposed_ms`` is what
the transfer added to TTFT, as the service says, and ``exposed_share`` its part of the time until the answer was there.

    python benchmarks/serve/one_gpu.py --device cuda:0 --write
    TRITON_INTERPRET=1 python benchmarks/serve/one_gpu.py --device interpret --smoke

The second command runs a tiny model in Triton's interpreter, to see that all of it runs; its figures say nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests``, and not this file's folder.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import torch
from benchmarks.engine_parts.on_device import DTYPES, LLAMA_8B, TINY, write_llama
from tests.support.servers.up import running_up

RESULT = Path(__file__).resolve().parents[1] / "results" / "one_gpu.json"
WAYS = {"1P1D": ("--ratio", "1P1D", "--pipe", "cuda_ipc"), "colocated": ("--ratio", "0P1D")}
READY_S = 1800.0
DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "baton-tiny"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def main() -> int:
    args = parse_args()
    shape, dtype = ({**TINY, "vocab_size": 4096}, "float32") if args.smoke else (LLAMA_8B, "bfloat16")
    drawn_on = torch.device("cpu" if args.smoke else args.device)
    result: dict[str, Any] = {
        "benchmark": "one_gpu",
        "device": args.device if args.smoke else torch.cuda.get_device_name(drawn_on),
        "load": {name: getattr(args, name) for name in ("isl", "osl", "request_rate", "requests")},
    }
    with tempfile.TemporaryDirectory(prefix="baton-one-gpu-") as folder:
        write_llama(Path(folder), shape, DTYPES[dtype], drawn_on)
        for name in TOKENIZER:  # routers want one; prompts are ids, so any with fewer tokens than the model will do
            shutil.copy(DEMO_MODEL / name, folder)
        for way in args.ways:
            with served(way, folder, args, shape["max_position_embeddings"]) as url:
                result[way] = measure(url, shape["vocab_size"], args)
            print(f"{way}: {json.dumps(result[way])}", file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--isl", type=int, default=8192, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=256, help="output tokens")
    parser.add_argument("--request-rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument(
        "--kv-blocks", type=int, default=8192, help="of each instance; twice as many where there is one"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model and load, to see that it runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    if args.smoke:
        args.isl = 40
        args.osl = 3
        args.request_rate = 2.0
        args.requests = 2
        args.kv_blocks = 32
    return args


@contextlib.contextmanager
def served(way: str, folder: str, args: argparse.Namespace, longest: int) -> Iterator[str]:
    """Run a deployment; yields its URL."""
    blocks = args.kv_blocks * (2 if way == "colocated" else 1)
    engine = ["--model", folder, "--device", args.device, "--kv-blocks", str(blocks), "--no-prefix-caching"]
    engine += ["--max-model-len", str(min(longest, args.isl + args.osl + 16)), "--max-num-batched-tokens", "8192"]
    engine += ["--prefill-chunk", str(min(2048, args.isl))]
    if args.smoke:
        engine += ["--cuda-graphs", "1,2", "--max-num-seqs", "2"]
    with running_up(*WAYS[way], *engine, ready_s=READY_S) as running:
        yield running.url


def measure(url: str, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    """Percentiles under load, and what of a prompt's time the transfer takes."""
    command = [sys.executable, "-m", "baton.cli.main", "bench", "serve", "--url", url, "--vocab-size", str(vocab)]
    for name in ("isl", "osl", "request-rate", "requests"):
        command += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    done = subprocess.run([*command, "--warmup", "1", "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr + done.stdout)
    (load,) = (row for row in map(json.loads, done.stdout.splitlines()) if row["record"] == "serve")
    figures = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s", "requests_per_s")
    return {**{name: load[name] for name in figures}, **alone(url, vocab, args)}


def alone(url: str, vocab: int, args: argparse.Namespace) -> dict[str, float]:
    """One prompt at a time."""
    rng = np.random.default_rng(5)
    times = []
    exposed = []
    with httpx.Client(timeout=600.0) as client:
        model = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        for turn in range(2 if args.smoke else 8):
            prompt = rng.integers(16, vocab, args.isl).tolist()
            begin = time.perf_counter()
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            answer = client.post(f"{url}/v1/completions", json=body)
            answer.raise_for_status()
            if turn:
                times.append(1e3 * (time.perf_counter() - begin))
                exposed.append(float(answer.headers.get("x-baton-exposed-ms", 0.0)))
    whole = statistics.median(times)
    part = statistics.median(exposed)
    return {"alone_ms": round(whole, 2), "exposed_ms": round(part, 3), "exposed_share": round(part / whole, 4)}


if __name__ == "__main__":
    sys.exit(main())
