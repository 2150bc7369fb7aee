"""Compiles the Triton kernels for a GPU, which needs none: ``python -m tests.support.compile_kernels 90``.

Triton's interpreter takes more than its compiler does. Prints a line of JSON for each launch that fails, and for each
compiled kernel with the launch that was the first to need it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path

from tests.support.gpu_compiler import CARDS, compiling_for, read_resources
from tests.support.kernel_launches import all_launches

import baton_kernels.gpu


def main() -> int:
    """Compile the launches for one card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, choices=CARDS)
    parser.add_argument("--brief", action="store_true", help="only launches that compile each kernel once")
    parser.add_argument("--only", default="", help="regular expression that a launch's name has to contain")
    asked = parser.parse_args()
    card = CARDS[asked.arch]
    if baton_kernels.gpu.is_interpreted():
        raise SystemExit("TRITON_INTERPRET is set: nothing would be compiled")
    with tempfile.TemporaryDirectory() as folder, compiling_for(card) as compiled:
        for launch in all_launches():
            if (asked.brief and not launch.brief) or not re.search(asked.only, launch.name):
                continue
            if launch.fp8 and card.capability < (8, 9):
                continue
            done = len(compiled)
            try:
                launch.call()
            except Exception as error:  # of any kind: the others are compiled too
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                sys.stdout.write(json.dumps({"launch": launch.name, "error": reason}) + "\n")
            for kernel in compiled[done:]:
                taken = dataclasses.asdict(read_resources(kernel, Path(folder)))
                sys.stdout.write(json.dumps({"launch": launch.name, **taken}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
