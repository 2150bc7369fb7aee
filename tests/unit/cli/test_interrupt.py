"""Ctrl-C while the command's modules are imported: status 130 and no traceback, as later."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import os, signal, sys

class Interrupt:
    '''Raises SIGINT when a module is imported, as a user would.'''
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from baton.cli.main import main
sys.exit(main(["up", "--port", "99999"]))
"""


def interrupted_at(module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, module], capture_output=True, text=True, check=False)


def test_an_interrupt_during_imports_ends_quietly() -> None:
    for module in ("baton.cli.up", "httpx", "baton.quantize"):
        done = interrupted_at(module)
        assert (done.returncode, done.stderr) == (130, ""), module


def test_without_one_the_command_runs() -> None:
    assert interrupted_at("no_such_module").returncode == 2
