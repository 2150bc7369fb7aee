"""Train the demo model ``models/baton-tiny`` from the Python standard library.

Needs no download: the corpus is the standard library of the interpreter that
runs it.  Writes a directory in Hugging Face format with a model card whose
figures come from the run itself.  The parts are in ``demo_model``; this is::

    python scripts/train_demo_model.py --minutes 25 --threads 2

With ``--minutes`` the learning-rate schedule follows the wall clock, so the
run always ends in time but depends on the speed of the machine.  With
``--steps`` (and a generous ``--minutes``) the run is reproducible for a seed on
one machine and one set of package versions.

``--tools`` trains its sibling ``models/baton-tiny-tools`` instead, which calls
tools with what a request says, from conversations that are made up::

    python scripts/train_demo_model.py --tools --minutes 15 --threads 2
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from demo_model.batches import RowSource, prepare
from demo_model.card import draw_curve, render_card
from demo_model.corpus import load_sources
from demo_model.evaluation import draw_samples, held_out_rows, measure_answers, measure_losses
from demo_model.tool_training import run as run_tools
from demo_model.training import MAX_CONTEXT, build_model, save_model, train

LOGGER = logging.getLogger("train_demo_model")
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models" / "baton-tiny"
TOOLS_DEFAULTS: dict[str, Any] = {
    "out": DEFAULT_OUT.with_name("baton-tiny-tools"), "minutes": 15.0, "rows": 16, "vocab": 896, "layers": 3,
    "answers": 1024, "warmup": 200, "lr": 2e-3,
}  # fmt: skip
"""What ``--tools`` changes of the defaults."""
CURVE_ROWS = 32
"""Held-out rows behind each point of the loss curve."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train the demo model baton-tiny from the standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=DEFAULT_OUT, help="directory to write")
    add("--minutes", type=float, default=25.0, help="when training ends, counted from the start of the script")
    add("--steps", type=int, default=0, help="number of steps; 0: as the time allows")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights and order")
    add("--context", type=int, default=512, help="tokens per row")
    add("--rows", type=int, default=8, help="rows per step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--warmup", type=int, default=80, help="warm-up steps")
    add("--vocab", type=int, default=4096, help="vocabulary size")
    add("--layers", type=int, default=6, help="number of layers")
    add("--answers", type=int, default=40, help="held-out requests to answer at the end")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile where it works")
    add("--tools", action="store_true", help=f"train the model that calls tools; defaults: {TOOLS_DEFAULTS}")
    if "--tools" in arguments:
        parser.set_defaults(**TOOLS_DEFAULTS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Train the model, measure it, and write its directory."""
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.tools:
        run_tools(args, list(arguments), started)
        return

    dataset = prepare(load_sources(Path(sysconfig.get_paths()["stdlib"])), args.vocab, MAX_CONTEXT, args.seed)
    LOGGER.info("%s", {key: value for key, value in dataset.facts.items() if key != "held_out_paths"})

    model = build_model(dataset.tokenizer, args.layers)
    rows = held_out_rows(dataset, args.context)
    picks = np.sort(np.random.default_rng(args.seed).permutation(len(rows))[:CURVE_ROWS])
    curve, progress = train(model, RowSource(dataset, args.seed), rows[picks], args, started)
    shape = save_model(args.out, model, dataset.tokenizer)

    # The rounded weights are what gets measured, in float32 arithmetic.
    model.to(torch.float32).eval()
    results = measure_losses(model, dataset, args.context, args.rows)
    LOGGER.info("%s", results)
    torch.set_num_threads(1)  # one token at a time, threads cost more than they bring
    results["answers"] = measure_answers(model, dataset, args.answers)
    samples = draw_samples(model, dataset.tokenizer, args.seed)

    training = {
        "command": "python scripts/train_demo_model.py " + " ".join(arguments),
        **{name: getattr(args, name) for name in ("seed", "threads", "rows", "context", "lr", "warmup")},
        **{package.__name__: package.__version__ for package in (torch, transformers, tokenizers)},
        **progress,
        "total_minutes": round((time.monotonic() - started) / 60.0, 2),
    }
    log: dict[str, Any] = {"data": dataset.facts, "model": shape, "training": training, "results": results}
    log |= {"curve": curve, "samples": samples}
    for name, text in (
        ("training_log.json", json.dumps(log, indent=1, ensure_ascii=False) + "\n"),
        ("loss_curve.svg", draw_curve(curve, results["bigram_loss"])),
        ("README.md", render_card(log)),
    ):
        (args.out / name).write_text(text, encoding="utf-8")
    LOGGER.info("answers %s; wrote %s", results["answers"], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
