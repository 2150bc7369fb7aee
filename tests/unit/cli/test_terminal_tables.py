"""``baton status`` and ``baton explain`` in narrow terminals: columns go, names stay whole, and numbers add up."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from baton.cli.explain import print_explanation, print_list
from baton.cli.status import render

INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-10")
TRACE = {"cached_tokens": 0, "transferred_tokens": 96, "kv_bytes": 393216, "transfer_ms": 1.0, "recomputed_tokens": 0}


def instance(name: str, **fields: Any) -> dict[str, Any]:
    role = name.partition("-")[0]
    return {
        "id": name, "role": role, "status": "ready", "draining": False, "silent": False, "lost_s": None, "reason": None,
        "in_flight": 12, "running": 11, "waiting": 1, "loading": 0, "blocks_total": 8192, "blocks_active": 4000,
        "blocks_cached": 800, "index": {"state": "exact"}, **fields,
    }  # fmt: skip


def state(*instances: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": "baton-tiny", "policy": "match_minus_load", "running": 123, "queued": 4, "seen": 98765,
        "now": {"hit_rate": 0.25, "requests_per_s": 101.5, "tokens_per_s": 12345.6, "failed": 0.0,
                "ttft_ms": {"p50": 120.0, "p99": 18000.0}, "itl_ms": {"p50": 10.0, "p99": 20.0}},
        "instances": list(instances or map(instance, INSTANCES)), **fields,
    }  # fmt: skip


def candidate(name: str, own: dict[str, float], **fields: Any) -> dict[str, Any]:
    found = {"instance": name, "role": name.partition("-")[0], "match_rate": own["match"], "load": 1.176, "own": own,
             "terms": own,
             "partner": None, "partner_terms": {}, "pair_terms": {}, "winner": False, **fields}  # fmt: skip
    parts = (found["own"], found["partner_terms"], found["pair_terms"])
    return {**found, "score": sum(sum(part.values()) for part in parts)}


PREFILL_OWN = {"match": 0.71, "load": -0.2, "speed": 0.0, "even": -0.02}
DECODE_OWN = {"match": 0.0, "load": -0.1}
EXPLAINED: dict[str, Any] = {
    "id": "cmpl-a-request-with-a-name-of-its-own-0123456789abcdef0123456789abcdef", "time_iso": "2026-11-28T07:30:17Z",
    "outcome": "done", "why": ["decode: decode-1"], "others": [], "ttft_ms": 12.3, "duration_ms": 99.0,
    "path": "remote", "reason": None, "prefill": "prefill-1", "decode": "decode-1", "prompt_tokens": 96,
    "generated_tokens": 8,
    "trace": TRACE, "placements": [{"at_ms": 0.0, "index_state": "exact", "candidates": [
        candidate("prefill-0", {**PREFILL_OWN, "match": 0.0}, partner="decode-1", partner_terms=DECODE_OWN),
        candidate("prefill-1", PREFILL_OWN, partner="decode-1", partner_terms=DECODE_OWN, winner=True),
        candidate("decode-0", {"match": 0.71, "load": -0.588}, partner="prefill-1", partner_terms=PREFILL_OWN),
        candidate("decode-1", DECODE_OWN, partner="prefill-1", partner_terms=PREFILL_OWN, winner=True),
        candidate("decode-10", {"match": 0.0, "load": -0.7}, partner="prefill-1", partner_terms=PREFILL_OWN),
    ]}],
}  # fmt: skip


def shown(what: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, highlight=False)
    what(console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 140])
def test_status_cuts_no_name_and_no_heading(width: int) -> None:
    lines = shown(lambda console: console.print(render(state())), width)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    head = next(line for line in lines if line.startswith("instance")).split("  ")
    words = {word.strip() for word in head if word.strip()}
    assert words <= {"instance", "role", "status", "in flight", "running", "waiting", "loading", "KV used", "cached",
                     "index"}  # fmt: skip
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0] in INSTANCES]
    assert [row[0] for row in rows] == list(INSTANCES)
    assert all("ready" in row for row in rows)
    if width >= 80:
        assert {"in flight", "running", "KV used", "cached"} <= words
    if width >= 100:
        assert {"waiting", "loading"} <= words
    if width >= 140:
        assert "index" in words


def test_status_tells_of_lost_and_silent_instances_and_of_a_standstill() -> None:
    reason = "its lease ran out; it missed 3 probes in a row, at an address that makes this line longer than a terminal"
    lost = instance("decode-1", status="lost", lost_s=72.0, reason=reason)
    found = state(instance("decode-0", silent=True), lost, stalled_s=12.0)
    text = " ".join(" ".join(shown(lambda console: console.print(render(found)), 80)).split())
    assert "1 lost" in text
    assert "decode-0 decode silent" in text
    assert f"decode-1 was lost 72 s ago: {reason}" in text
    assert "stalled: no token for 12 s" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_explain_cuts_no_name(width: int) -> None:
    lines = shown(lambda console: print_explanation(console, EXPLAINED), width)
    assert "…" not in "".join(lines)
    assert all(len(line) <= width for line in lines[1:]), "but for the id, which is for copying"
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0] in INSTANCES]
    assert sorted(row[0] for row in rows) == sorted(INSTANCES)
    assert sorted(row[0] for row in rows if row[-1] == "chosen") == ["decode-1", "prefill-1"]
    heads = [line for line in lines if line.startswith("instance")]
    assert len(heads) == 2
    assert all("= pair score" in head for head in heads)
    assert all("with" in head for head in heads)
    if width >= 80:
        assert all("= own" in head and "+ partner" in head for head in heads)


def test_a_rows_numbers_add_up() -> None:
    lines = shown(lambda console: print_explanation(console, EXPLAINED), 200)
    (row,) = (line.split() for line in lines if line.startswith("decode-0"))
    name, match_rate, _, match, load, own, partner, partner_score, score = row
    assert (name, match_rate, match, partner) == ("decode-0", "71%", "0.710", "prefill-1")
    assert float(match) + float(load) == pytest.approx(float(own), abs=2e-3)
    assert float(own) + float(partner_score) == pytest.approx(float(score), abs=2e-3)
    (head,) = (line for line in lines if line.startswith("instance") and "even" not in line)
    assert head.split() == ["instance", "match", "rate", "load", "x", "mean", "match", "+", "load", "=", "own", "with",
                            "+", "partner", "=", "pair", "score"]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_list_of_requests_keeps_their_names(width: int) -> None:
    decision = {"id": "cmpl-my-request", "time": 0.0, "prefill": "prefill-1", "decode": "decode-10", "path": "remote",
                "match_rate": 0.5, "ttft_ms": 12.3, "kv_bytes": 393216, "outcome": "done"}  # fmt: skip
    lines = shown(lambda console: print_list(console, {"decisions": [decision]}), width)
    assert all(len(line) <= width for line in lines)
    assert all(name in lines[1] for name in ("prefill-1", "decode-10", "cmpl-my-request", "done"))


def test_pipes_get_every_column(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.cli.tables import open_console

    monkeypatch.delenv("COLUMNS", raising=False)
    found = state(instance("decode-with-a-name-that-is-longer-than-any-terminal-has-room-for-in-one-of-its-columns"))
    open_console().print(render(found))
    out = capsys.readouterr().out
    assert found["instances"][0]["id"] in out
    assert all(name in out for name in ("loading", "waiting", "index", "in flight"))
