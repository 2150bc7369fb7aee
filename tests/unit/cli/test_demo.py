"""``baton demo``: which flags its instances get for speculation, and what it tells of drafts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from baton.cli import demo
from baton.client.types import Trace
from baton.config.demo_model import DEMO_DRAFTS, default_model
from baton.errors import ConfigError


def flags_for(*words: str, model: str = "") -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    return demo._drafting(parser.parse_args(["demo", *words]), model or default_model())


@pytest.mark.parametrize("method", DEMO_DRAFTS)
def test_what_drafts_for_the_demo_model_needs_no_path(method: str) -> None:
    flags = flags_for("--speculative", method, "--speculative-tokens", "3")
    assert flags[:3] == ("--speculative", method, "--speculative-model")
    assert (Path(flags[3]).name, flags[4:]) == (f"baton-tiny-{method}", ("--speculative-tokens", "3"))


def test_methods_without_weights_and_others_weights() -> None:
    assert flags_for() == ()
    assert flags_for("--speculative", "suffix") == ("--speculative", "suffix", "--speculative-tokens", "4")
    own = flags_for("--model", "mine", "--speculative", "medusa", "--speculative-model", "heads", model="mine")
    assert own[:4] == ("--speculative", "medusa", "--speculative-model", "heads")
    for words in (["medusa", "--model", "mine"], ["ngram", "--speculative-model", "heads"]):
        with pytest.raises(ConfigError) as caught:
            flags_for("--speculative", *words)
        assert caught.value.field == "speculative_model"


@pytest.mark.parametrize(("drafted", "told"), [(0, None), (12, "12 / 4, 2.00 tokens per step")])
def test_it_tells_what_became_of_drafts(drafted: int, told: str | None) -> None:
    console = Console(record=True, width=120, quiet=False)
    trace = Trace(transferred_tokens=34, drafted_tokens=drafted, accepted_tokens=4 if drafted else 0)
    assert demo._report(console, demo.Answer(list(range(9)), 0.1, 1.0, trace), list(range(9))) == 0
    text = console.export_text()
    assert ("draft tokens" in text) == (told is not None)
    assert told is None or told in text
