"""The runbook, the alerts and the dashboard tell of the same things in the same order."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import yaml

from baton.config import EngineConfig, add_flags
from baton.config.autoscale import AutoscaleConfig
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/baton/files"
TEXT = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
CHAPTERS = dict(re.findall(r"^## (\d+\. .+)\n((?:(?!^## ).*\n?)*)", TEXT, re.MULTILINE))


def alerts() -> list[dict[str, dict[str, str]]]:
    found: list[dict[str, dict[str, str]]] = yaml.safe_load((CHART / "alerts.yaml").read_text())
    return found


def panels() -> list[dict[str, list[dict[str, str]]]]:
    found: list[dict[str, list[dict[str, str]]]] = json.loads((CHART / "dashboard.json").read_text())["panels"]
    return found


def asked(expression: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bbaton_\w+", expression)}


def test_there_are_ten_ways_to_fail_each_with_alerts_and_panels() -> None:
    assert [name.split(".")[0] for name in CHAPTERS] == [str(number) for number in range(1, 11)]
    for name, text in CHAPTERS.items():
        assert re.search(r"^### Baton\w+$", text, re.MULTILINE), name
        assert re.search(r"^Panels: .+$", text, re.MULTILINE), name


def test_alerts_stand_in_the_runbooks_order_and_name_their_place_there() -> None:
    names = [each["alert"] for each in alerts()]
    assert names == re.findall(r"^### (\w+)$", TEXT, re.MULTILINE)
    for each in alerts():
        assert each["annotations"]["runbook"] == f"docs/runbook.md#{str(each['alert']).lower()}"
        assert each["labels"]["severity"] in ("critical", "warning")


def test_panels_stand_in_the_runbooks_order() -> None:
    listed = [title for line in re.findall(r"^Panels: (.+)$", TEXT, re.MULTILINE) for title in line.split("; ")]
    assert [each["title"] for each in panels()] == listed
    places = [(each["gridPos"]["y"], each["gridPos"]["x"]) for each in panels()]  # type: ignore[call-overload]
    assert places == sorted(set(places))


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_shows_what_its_alerts_ask_for(name: str) -> None:
    text = CHAPTERS[name]
    titles = re.findall(r"^Panels: (.+)$", text, re.MULTILINE)[0].split("; ")
    shown = {
        metric
        for each in panels()
        if each["title"] in titles
        for target in each["targets"]
        for metric in asked(target["expr"])
    }
    shown |= set(re.findall(r"`(baton_\w+)`", text))
    for each in alerts():
        if f"### {each['alert']}\n" in text:
            assert asked(str(each["expr"])) & shown, each["alert"]


def test_every_flag_of_the_runbook_exists() -> None:
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    for config in (RouterConfig, WorkerConfig, EngineConfig, KVStoreConfig, AutoscaleConfig):
        add_flags(parser, config)
    known = {flag for action in parser._actions for flag in action.option_strings}
    used = set(re.findall(r"`(--[a-z0-9-]+)", TEXT)) - {"--previous"}
    assert len(used) > 15
    assert used <= known
