"""Writes alerts and dashboard of ``examples/monitoring`` from the chart's; ``--check`` fails if they are out of date.

The chart's select by Kubernetes' labels, these by the job of ``examples/monitoring/prometheus.yml``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "baton" / "files"
TARGET = ROOT / "examples" / "monitoring"
JOB = 'job="baton"'
_NOTE = "# Made by scripts/gen_monitoring.py from helm/baton/files/alerts.yaml; do not edit.\n"


def alerts() -> str:
    """Return a file of alerting rules, as Prometheus reads it."""
    rules = yaml.safe_load((CHART / "alerts.yaml").read_text(encoding="utf-8").replace("SELECTOR", JOB))
    return _NOTE + yaml.safe_dump({"groups": [{"name": "baton", "rules": rules}]}, sort_keys=False, width=120)


def dashboard() -> str:
    """Return a dashboard for Grafana without the variable of the namespace."""
    text = (
        (CHART / "dashboard.json")
        .read_text(encoding="utf-8")
        .replace(r"namespace=\"$namespace\"", json.dumps(JOB)[1:-1])
    )
    made = json.loads(text)
    variables = made["templating"]["list"]
    made["templating"]["list"] = [each for each in variables if each["name"] != "namespace"]
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the files, or compare them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date; write nothing")
    check = parser.parse_args().check
    stale = []
    for name, text in (("alerts.yaml", alerts()), ("dashboard.json", dashboard())):
        path = TARGET / name
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(str(path.relative_to(ROOT)))
        elif not check:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run scripts/gen_monitoring.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
