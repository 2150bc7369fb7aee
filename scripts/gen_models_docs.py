"""Writes the table of docs/models.md: what becomes of every causal language model of the installed transformers.

Each is made as a tiny checkpoint from its config class and loaded; those that are served are loaded on two ranks as
well (``tp``, ``pp``). The table is between ``<!-- models -->`` and ``<!-- end models -->``.
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


def main() -> int:
    """Make the table and write it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of models, comma-separated; the others stay as they are")
    only = parser.parse_args().only
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from tests.support.models.architectures import cases, read_table, render_table, table_cells
    from tests.support.servers.warm import WarmStarter

    text = DOC.read_text()
    cells, starter = read_table(text), WarmStarter("transformers.models.llama.modeling_llama")
    wanted = {str(case): case for case in cases()}
    for name, case in wanted.items():
        if only is None or name in only.split(",") or name not in cells:
            with tempfile.TemporaryDirectory() as folder:
                cells[name] = table_cells(case, Path(folder), starter)
            sys.stderr.write(f"{name}: {' | '.join(cells[name])}\n")
    starter.close()
    table = render_table({name: cells[name] for name in wanted})
    DOC.write_text(SECTION.sub(lambda _: table, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
