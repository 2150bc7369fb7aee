"""Has processes know the executors of ``paced_executor.py``, as an installed package would."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ENTRY_POINTS = """[baton.executors]
paced = paced_executor:PacedExecutor
paced_agents = paced_executor:PacedAgentsExecutor
"""


@contextlib.contextmanager
def paced_executors() -> Iterator[None]:
    """Have this process, and those that are started meanwhile, know the paced executors."""
    parts = str(Path(__file__).parent)
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder, "baton_paced-0.1.dist-info")
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-paced\nVersion: 0.1\n")
        (facts / "entry_points.txt").write_text(ENTRY_POINTS)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, parts, *([before] if before else [])])
        sys.path[:0] = [folder, parts]
        try:
            yield
        finally:
            sys.path[:] = [path for path in sys.path if path not in (folder, parts)]
            os.environ["PYTHONPATH"] = before or ""
