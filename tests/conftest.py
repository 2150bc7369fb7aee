"""What all tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


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
