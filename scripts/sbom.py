"""Writes what an environment is made of as CycloneDX, with the C code that Baton carries in its own tree."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def vendored() -> dict[str, object]:
    """Return the component of ``native/xxhash``, its version as its header has it."""
    header = (ROOT / "native/xxhash/xxhash.h").read_text()
    numbers = [re.search(rf"#define XXH_VERSION_{part} +(\d+)", header) for part in ("MAJOR", "MINOR", "RELEASE")]
    version = ".".join(found[1] for found in numbers if found)
    return {
        "type": "library",
        "bom-ref": "native/xxhash",
        "name": "xxHash",
        "version": version,
        "purl": f"pkg:github/Cyan4973/xxHash@v{version}",
        "licenses": [{"license": {"id": "BSD-2-Clause"}}],
        "scope": "required",
    }


def main() -> int:
    """Run cyclonedx-py and add to what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cyclonedx", default="cyclonedx-py", help="the program")
    parser.add_argument("--python", default=sys.executable, help="of the environment")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    command = [args.cyclonedx, "environment", args.python, "--pyproject", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, "--output-reproducible", "--of", "JSON"], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout)
    found["components"].append(vendored())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{args.out}: {len(found['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
