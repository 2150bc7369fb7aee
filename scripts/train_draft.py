"""Train what drafts for the demo model ``models/baton-tiny``, which stays as it is.

``draft`` is a model of one layer, ``eagle`` and ``eagle3`` are heads of one layer, ``medusa`` are four heads. Each
learns the demo model's probabilities over the text that that was trained on (``demo_model``), which needs no download,
and over its own answers, and is measured on the modules that are held out of both::

    python scripts/train_draft.py --method eagle3 medusa draft --minutes 10 --threads 1

Ended by SIGTERM or Ctrl-C, it keeps the run, and the same command goes on with it (exit status 75 until it is done). An
MTP layer is not among them: no published form attaches one to a Llama, which the demo model is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from demo_model.batches import Dataset, encode_sources
from demo_model.corpus import load_sources
from demo_model.draft_card import render_card
from demo_model.draft_engine import measure, own_rows
from demo_model.draft_training import Plan, frequent_tokens, held_out, right_at_places, train
from demo_model.drafts import METHODS, OWN_VOCABULARY
from transformers import AutoModelForCausalLM, AutoTokenizer

LOGGER = logging.getLogger("train_draft")
MODELS = Path(__file__).resolve().parent.parent / "models"
TARGET = MODELS / "baton-tiny"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--method", nargs="+", choices=sorted(METHODS), default=["eagle3"], help="what to train (default: eagle3)")
    add("--out", type=Path, default=MODELS, help="where to write folders baton-tiny-METHOD (default: models)")
    add("--minutes", type=float, default=10.0, help="of training each, in processor time per thread (default: 10)")
    add("--threads", type=int, default=1, help="CPU threads (default: 1)")
    add("--rows", type=int, default=2, help="rows per step (default: 2)")
    add("--context", type=int, default=256, help="tokens per row (default: 256)")
    add("--rate", type=float, default=3e-3, help="peak learning rate (default: 0.003)")
    add("--warmup", type=int, default=30, help="warm-up steps (default: 30)")
    add(
        "--drafted", type=int, default=2048, help="eagle3, medusa: size of its own vocabulary, the most frequent tokens"
    )
    add("--own", type=int, default=48, help="rows of the demo model's own answers, half of training (default: 48)")
    add("--seed", type=int, default=0, help="seed of rows and weights (default: 0)")
    return parser.parse_args()


def main() -> int:
    """Train, write, measure."""
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    loader: Any = AutoModelForCausalLM
    target = loader.from_pretrained(TARGET, dtype=torch.float32).train(False).requires_grad_(False)
    dataset = encode_sources(
        load_sources(Path(sysconfig.get_paths()["stdlib"])), AutoTokenizer.from_pretrained(TARGET), args.seed
    )
    own = own_rows(TARGET, dataset, args.own, args.context, args.threads, args.seed)
    done = all(train_one(method, args, target, dataset, own, lambda: bool(signals)) for method in args.method)
    return os.EX_OK if done else os.EX_TEMPFAIL


def train_one(
    method: str, args: argparse.Namespace, target: Any, dataset: Dataset, own: torch.Tensor, stopped: Callable[[], bool]
) -> bool:
    """Train one of them, and write it with its log; returns whether it was done before somebody stopped it."""
    torch.manual_seed(args.seed)
    size = target.config.vocab_size
    vocabulary = min(args.drafted, size) if method in OWN_VOCABULARY else size
    drafted, share = frequent_tokens(dataset, size, vocabulary)
    draft = METHODS[method](target, drafted)
    plan = Plan(
        args.minutes, args.threads, args.rows, args.context, args.rate, args.warmup, args.seed, vocabulary, args.own
    )
    out = args.out / f"baton-tiny-{method}"
    progress = train(draft, target, drafted, dataset, own, plan, out.with_suffix(".training"), stopped)
    if progress is None:
        return False

    draft.write(out, TARGET, drafted)
    given = [f"--{name} {value:g}" for name, value in vars(args).items() if name not in {"method", "out"}]
    facts = {"method": method, "command": " ".join(["python scripts/train_draft.py --method", method, *given])}
    facts |= dataclasses.asdict(plan) | {"vocabulary_share": round(share, 4)}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    facts |= {"corpus_sha256": dataset.facts["sha256"], "train_tokens": dataset.facts["train_tokens"]}
    # What is measured is what was written: weights in bfloat16.
    draft.load_state_dict({name: tensor.float() for name, tensor in draft.rounded().items()})
    results = {"steps": progress.step, "tokens": progress.step * plan.rows * plan.context}
    results |= {"parameters": sum(parameter.numel() for parameter in draft.parameters())}
    results |= {"bytes": (out / "model.safetensors").stat().st_size}
    results |= {"held_out_right": right_at_places(draft, target, drafted, held_out(dataset, args.seed))}
    results |= {"engine": measure(TARGET, out, method, dataset, args.threads)}
    lines = [facts, *progress.log, results]
    (out / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (out / "README.md").write_text(render_card(lines), encoding="utf-8")
    LOGGER.info("%s: %s", out, results)
    return True


if __name__ == "__main__":
    sys.exit(main())
