"""Engines that preempt: they believe that outputs are short, so they admit more than what there are blocks for."""

from __future__ import annotations

from baton.engine.core import EngineCore
from baton.engine.scheduler import MIN_OUTPUTS


def expect_short_outputs(core: EngineCore) -> None:
    """Have an engine expect short outputs, as if those before had been."""
    for _ in range(8 * MIN_OUTPUTS):
        core._scheduler.output_lengths.add(1)
