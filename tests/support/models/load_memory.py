"""Run as a process: loads a model, and says what memory that took. Arguments: folder, field=value of the engine."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

from baton.config import EngineConfig
from baton.engine.executor.base import load_executor


def status(name: str) -> int:
    """Bytes that ``/proc/self/status`` has under a name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Load a tiny model first, so that what is loaded once for any model does not count."""
    tiny, folder, *values = sys.argv[1:]
    torch.set_num_threads(1)
    options = dict(value.split("=") for value in values)
    load_executor(EngineConfig(model=tiny, **options)).close()  # type: ignore[arg-type]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    executor = load_executor(EngineConfig(model=folder, **options))  # type: ignore[arg-type]
    gc.collect()
    result = {"peak": status("VmHWM") - before, "resident": status("VmRSS") - before, "how": executor.description}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
