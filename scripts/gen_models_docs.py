"""Writes the table of docs/models.md: what becomes of every causal language model of the installed transformers.

Each is made as a tiny checkpoint from its config class and loaded; those that are served are loaded on two ranks as
well (``tp``, ``pp``). The table stands between ``<!-- models -->`` and ``<!-- end models -->``.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "models.md"
SECTION = re.compile(r"(?<=<!-- models -->\n).*?(?=<!-- end models -->)", re.DOTALL)
HEAD = "| type | class | path | tp | pp | notes |\n| --- | --- | --- | --- | --- | --- |\n"


def main() -> int:
    """Make the table and write it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of rows, comma-separated; the others stay as they are")
    only = parser.parse_args().only
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from tests.support.models.architectures import cases, table_row
    from tests.support.servers.warm import WarmStarter

    text = DOC.read_text()
    old = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    rows, starter = [], WarmStarter("transformers.models.llama.modeling_llama")
    for case in cases():
        if only is None or str(case) in only.split(",") or str(case) not in old:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(table_row(case, Path(folder), starter))
            sys.stderr.write(rows[-1] + "\n")
        else:
            rows.append(old[str(case)])
    starter.close()
    DOC.write_text(SECTION.sub(lambda _: HEAD + "\n".join(rows) + "\n", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
