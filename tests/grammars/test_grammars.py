"""A few of what ``python -m tests.grammars.run`` does by the hundred."""

from __future__ import annotations

import os

from tests.grammars.run import MODEL, Report, accept, answer, mutate, tiny_compiler

from baton.engine.llm import LLM

SEED = int(os.environ.get("BATON_TEST_GRAMMAR_SEED") or 40_000)
"""The same each time; others by this variable, or, by the thousand, by ``tests.grammars.run``."""


def test_answers_validate_or_were_cut() -> None:
    report = Report()
    grammars = accept(range(SEED, SEED + 16), report)
    with LLM(str(MODEL), dtype="float32", kv_blocks=600, max_num_seqs=64) as llm:
        answer(llm, grammars, report, max_tokens=60, n=1)
    assert report.wrong == [], f"from seed {SEED}"
    assert report.answers == 3 * report.accepted


def test_broken_schemas_are_taken_or_refused_by_their_place() -> None:
    report = Report()
    mutate(range(SEED, SEED + 400), tiny_compiler(), report)
    assert report.wrong == [], f"from seed {SEED}"
    assert min(report.accepted, report.refused.total()) > 20
