"""An instance's load report, and when it is worth a message.

Routers count what they place themselves at once. A report tells them what others have placed, that requests wait, or
that none is taken any more. So it goes out as soon as one of these changed by more than a threshold, and whatever
changed is told every other second: every step of a busy engine changes some number, and each message costs its routers
more than the number is worth.
"""

from __future__ import annotations

import time

from baton.api.v1 import common_pb2
from baton.engine.request import EngineStats
from baton.types import Role

SLOW_S = 2.0
"""Seconds after which any change is told."""
_SHARE = 1 / 8
_LEAST = {"num_waiting": 1, "waiting_prompt_tokens": 2048}
"""Fields that decide, with the change that is passed over however small the number is."""
_LEAST_OF_DECODE = {**_LEAST, "blocks_active": 64}
"""A prefill instance's blocks come and go with each prompt; its work are the prompt tokens."""
_LEAST_REQUESTS = 1


class LoadReporter:
    """Makes reports, with the speeds over the last seconds in which work was done."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._prefill = self._decode = 0
        self._rates = (0.0, 0.0)

    def report(self, stats: EngineStats, *, draining: bool) -> common_pb2.LoadReport:
        """Return the report of a moment."""
        self._update(stats)
        prefill_rate, decode_rate = self._rates
        return common_pb2.LoadReport(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_loading=stats.num_loading,
            blocks_total=stats.num_blocks,
            blocks_active=stats.blocks_active,
            blocks_cached=stats.blocks_cached,
            waiting_prompt_tokens=stats.waiting_prompt_tokens,
            prefill_tokens_per_s=prefill_rate,
            decode_tokens_per_s=decode_rate,
            num_preemptions=stats.num_preemptions,
            draining=draining,
        )

    def _update(self, stats: EngineStats) -> None:
        """Bring the speeds up to date, rounded so that noise does not look like a change."""
        now = time.monotonic()
        seconds = now - self._at
        if seconds < 1.0:
            return
        prefill, decode = stats.prefill_tokens - self._prefill, stats.decode_tokens - self._decode
        old_prefill, old_decode = self._rates
        self._rates = (
            float(round(prefill / seconds)) if prefill else old_prefill,
            float(round(decode / seconds)) if decode else old_decode,
        )
        self._at, self._prefill, self._decode = now, stats.prefill_tokens, stats.decode_tokens


def is_urgent(report: common_pb2.LoadReport, last: common_pb2.LoadReport, role: Role) -> bool:
    """Whether something that routers decide by differs by more than a threshold from what they were told last."""
    if report.draining != last.draining or _far(_requests(report), _requests(last), _LEAST_REQUESTS):
        return True
    fields = _LEAST if role is Role.PREFILL else _LEAST_OF_DECODE
    return any(_far(getattr(report, name), getattr(last, name), least) for name, least in fields.items())


def _requests(report: common_pb2.LoadReport) -> int:
    return report.num_running + report.num_waiting + report.num_loading


def _far(now: int, before: int, least: int) -> bool:
    # Nothing left is told at once: to routers whose own requests have ended the rest looked like others' work.
    return now == 0 < before or abs(now - before) > max(least, _SHARE * before)
