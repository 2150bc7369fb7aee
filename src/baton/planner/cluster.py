"""The deployment's file that a plan ends with: what ``baton up -f`` and the services' ``--config`` read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.errors import ConfigError
from baton.planner.profile import EngineProfile, Limits
from baton.planner.search import Found


def cluster_yaml(found: Found, model: str, slos: Mapping[str, float], comments: Sequence[str]) -> str:
    """Return the file's text.

    Args:
        found: The deployment, with its goodput.
        model: A directory, or a name on the Hugging Face hub.
        slos: Targets in milliseconds, by metric.
        comments: Lines at its beginning.
    """
    deployment, limits = found.deployment, found.deployment.limits
    lines = [f"# {line}" for line in comments]
    lines += [f"model: {json.dumps(model)}", f"ratio: {deployment.ratio}", "", "slo:"]
    lines += [f"  {metric}-ms: {limit:g}" for metric, limit in slos.items()]
    lines += ["", "worker:", "  flags:", *_limit_flags(limits)]
    for role, count, engine in (
        ("prefill", deployment.prefills, deployment.prefill),
        ("decode", deployment.decodes, deployment.decode),
    ):
        if count and (flags := _shape_flags(engine)):
            lines += ["", f"{role}:", "  flags:", *flags]
    lines += ["", "router:", "  flags:", f"    policy: {deployment.policy}"]
    if deployment.threshold is not None:
        lines.append(f"    remote-prefill-threshold: {deployment.threshold}")
    return "\n".join(lines) + "\n"


def _limit_flags(limits: Limits) -> list[str]:
    flags = {
        "max-num-seqs": limits.max_num_seqs,
        "max-num-batched-tokens": limits.max_num_batched_tokens,
        "prefill-chunk": limits.prefill_chunk,
        "block-size": limits.block_size,
        "remote-prefill-threshold": limits.remote_prefill_threshold,
    }
    return [f"    {name}: {value}" for name, value in flags.items()]


def _shape_flags(engine: EngineProfile) -> list[str]:
    sizes = {"tp": engine.tp, "pp": engine.pp}
    return [f"    {name}: {size}" for name, size in sizes.items() if size > 1]


def write_cluster(path: Path, text: str) -> None:
    """Write the file.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="output") from error
