"""What all tests share."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tokenizers
import torch
from tests.support.servers.warm import WarmStarter
from tests.thorough import is_thorough

import baton.tokenizer.tokenizer
from baton.tokenizer.tokenizer import FastEncoder

pytest_plugins = ["tests.support.crashes"]

# How long an example takes, and how long it takes to make one, is the machine's business.
CALM = [hypothesis.HealthCheck.too_slow]
# The same examples each time: who changes nothing breaks nothing. Others: --hypothesis-profile=explore.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=CALM)
hypothesis.settings.register_profile("explore", deadline=None, derandomize=False, suppress_health_check=CALM)
hypothesis.settings.load_profile("tests")

if not torch.cuda.is_available():
    # Before anything imports triton: its kernels run on the CPU then.
    os.environ["TRITON_INTERPRET"] = "1"

os.umask(0o077)
"""Files with tokens and keys that tests write must be their owner's alone, or they are refused."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As of a shell's background job; what tests start would inherit it, and some of that is ended by Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


gc.disable()
"""Until all modules are there: what they make stays."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where those few are asked for that run alone, the modules of all others are not even imported."""
    wanted = config.option.markexpr
    if "alone" not in wanted or "not alone" in wanted or collection_path.suffix != ".py":
        return None
    return True if "mark.alone" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what only ``make test-all`` runs (``tests/thorough.py``)."""
    for item in items:
        if is_thorough(item):
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """No collection need look again at the modules of everything: tests that hunt leaks collect often."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Tensors and arrays that are drawn without a seed are the same each time, whatever ran before.

    Python's own generator stays as it is: two processes must not draw the same ports.
    """
    torch.manual_seed(0)
    np.random.seed(0)


_MUCH_BYTES = 192 << 20
_kept = 0
"""Resident memory of this process when it last gave some back."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Give memory back when much more is held than after the last time: what tests free lies about in the C library.

    Engines, and threads that come and go, leave it in many pieces, and no two tests want the same.
    """
    global _kept
    result = yield
    if _resident() > _kept + _MUCH_BYTES:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        _kept = _resident()
    return result


def _resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.fixture(scope="session")
def starter() -> Iterator[WarmStarter]:
    """Starts instances and ranks that need not import torch each, for tests in which many die."""
    starter = WarmStarter(
        "tests.support.servers.cluster", "baton_router.main", "transformers.models.llama.modeling_llama"
    )
    yield starter
    starter.close()


@pytest.fixture(autouse=True, scope="session")
def _fast_encoders_are_made_once() -> Iterator[None]:
    """Tests load the same few tokenizers hundreds of times; each fast encoder keeps some MB, also when it is gone."""
    module = baton.tokenizer.tokenizer
    make = module.fast_encoder
    made: dict[tuple[str, object, object], FastEncoder | None] = {}

    def find_or_make(backend: tokenizers.Tokenizer, parts: dict[str, Any]) -> FastEncoder | None:
        # Tests replace how they are loaded, and the package.
        key = backend.to_str(), module._load, sys.modules.get("fastokens", "not imported yet")
        if key not in made:
            made[key] = make(backend, parts)
        encoder = made[key]
        return None if encoder is None else FastEncoder(encoder._fast)

    patch = pytest.MonkeyPatch()
    patch.setattr(module, "fast_encoder", find_or_make)
    yield
    patch.undo()


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Files and folders get the modes that they are made with; the tests' umask would hide wrong ones."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command sets up logging for its process; called in a test, that would be every later test's process.

    A level left at INFO makes records of the log, and a record keeps the exception that it tells of, with all that
    the exception's frames hold.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
