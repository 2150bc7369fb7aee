"""Event loops that targets keep from input to input."""

from __future__ import annotations

import asyncio
import contextlib
import functools

KEPT = contextlib.ExitStack()
"""What targets keep. Whoever runs them ends it; libFuzzer ends the process as it is."""


@functools.cache
def event_loop(owner: str) -> asyncio.AbstractEventLoop:
    """Return the loop of a target's module, which ends with what it keeps."""
    return KEPT.enter_context(asyncio.Runner()).get_loop()
