"""Writes ``golden/*.yaml`` anew; look at what changed: ``python -m tests.helm.write_golden``."""

from __future__ import annotations

from pathlib import Path

from tests.support.chart import EXAMPLES, example, render, without_secrets

for name in EXAMPLES:
    (Path(__file__).parent / f"golden/{name}.yaml").write_text(without_secrets(render(example(name))))
