"""What users hold of an earlier state is still there: flags, endpoints, metrics, RPCs, public names."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "interface/0.1.0.json"
COMMAND = [sys.executable, str(ROOT / "scripts/list_interface.py")]


def test_nothing_is_missing() -> None:
    result = subprocess.run([*COMMAND, "--compare", str(RECORDED)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    changed = copy.deepcopy(recorded)
    changed["flags"]["baton up"].append("--no-such-flag")
    changed["metrics"]["baton_no_such_metric"] = ["counter"]
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    command = [*COMMAND, "--compare", str(tmp_path / "changed.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "flags: baton up: --no-such-flag" in result.stdout
    assert "metrics: baton_no_such_metric" in result.stdout
