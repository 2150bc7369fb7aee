"""``benchmarks/index.py --fleets``: what it places prompts with is the router's own, as it is now."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "router" / "index_parts"


def test_prompts_are_placed_where_their_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import decision

    of_lengths = decision.measure_decisions(chains=2, count=2, lengths=(4,))
    assert of_lengths["4"]["p50_us"] > 0
    fleets = decision.measure_fleets(sizes=(2,), policies=("match_minus_load", "cost_ms"), count=2)
    names = {f"{policy}, 2 + 2" for policy in ("match_minus_load", "cost_ms")}
    assert fleets.keys() == names | {f"{name}, one full" for name in names}
