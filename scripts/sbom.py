"""Writes what an environment is made of as CycloneDX."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run cyclonedx-py and write what it prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cyclonedx", default="cyclonedx-py", help="the program")
    parser.add_argument("--python", default=sys.executable, help="of the environment")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    command = [args.cyclonedx, "environment", args.python, "--pyproject", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, "--output-reproducible", "--of", "JSON"], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return done.returncode
    document = json.loads(done.stdout)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{args.out}: {len(document['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
