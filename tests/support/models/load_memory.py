"""Run as a process: loads models one after the other, and says what memory each took.

Takes a JSON list of ``[tiny, model, fields of the engine's configuration]`` as its argument, writes a list of
:class:`Found`.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.child_env import child_env

from baton.allocator import return_free_memory
from baton.config import EngineConfig
from baton.engine.executor.base import load_executor


@dataclass(frozen=True)
class Found:
    """Bytes of physical memory more than before.

    Attributes:
        peak: Most while a model was loaded, pages of files among them.
        resident: Afterwards, likewise.
        anonymous: Afterwards, without pages of files, which the system takes back when it needs memory.
        how: How the model is run.
    """

    peak: int
    resident: int
    anonymous: int
    how: str


def measure(loads: Sequence[tuple[Path, Path, dict[str, Any]]], **variables: str) -> list[Found]:
    """Load models in a process of its own, with ``variables`` in its environment; ``loads`` as the module has them."""
    given = json.dumps([[str(tiny), str(model), fields] for tiny, model, fields in loads])
    command = [sys.executable, "-m", "tests.support.models.load_memory", given]
    env = child_env(**variables)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=600)
    return [Found(**each) for each in json.loads(done.stdout)]


def status() -> dict[str, int]:
    """What ``/proc/self/status`` has in kB, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def measure_here(tiny: str, model: str, fields: dict[str, Any]) -> Found:
    """Load a model in this process, after a tiny one of its kind: what is loaded once for any model does not count."""
    load_executor(EngineConfig(model=tiny, **fields)).close()
    gc.collect()
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = status()
    executor = load_executor(EngineConfig(model=model, **fields))
    gc.collect()
    after = status()
    executor.close()
    return Found(
        after["VmHWM"] - before["VmRSS"],
        after["VmRSS"] - before["VmRSS"],
        after["RssAnon"] - before["RssAnon"],
        executor.description,
    )


def main() -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps([asdict(measure_here(*load)) for load in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
