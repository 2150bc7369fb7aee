from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from baton.config import EngineConfig, add_flags, from_flags
from baton.config.flags import option
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    name: str = option("x", "a name")
    count: int | None = option(None, "a count")
    ratio: float = option(0.5, "a ratio, 50% say")
    on: bool = option(True, "a switch")
    kinds: tuple[str, ...] = option(("a",), "some kinds")
    hidden: int = 3


def parse(*argv: str, env: dict[str, str] | None = None) -> Sample:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    return from_flags(Sample, parser.parse_args(argv), env=env or {})


def test_flag_beats_environment_beats_default():
    env = {"BATON_COUNT": "7", "BATON_NAME": "env", "BATON_ON": "no", "BATON_KINDS": "p,q"}
    assert parse() == Sample()
    assert parse(env=env) == Sample(name="env", count=7, on=False, kinds=("p", "q"))
    assert parse("--name", "flag", "--count", "9", "--on", "--kinds", "z", env=env) == Sample(
        "flag", 9, 0.5, True, ("z",)
    )


def test_fields_without_help_are_no_flags():
    with pytest.raises(SystemExit):
        parse("--hidden", "4")
    assert parse(env={"BATON_HIDDEN": "4"}).hidden == 3


@pytest.mark.parametrize("variable", ["BATON_COUNT", "BATON_ON", "BATON_RATIO"])
def test_an_unreadable_variable_is_named(variable):
    with pytest.raises(ConfigError) as caught:
        parse(env={variable: "maybe so"})
    assert caught.value.field == variable


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (EngineConfig, {"kv_blocks": 0}),
        (EngineConfig, {"threads": 0}),
        (EngineConfig, {"kv_memory_fraction": 1.0}),
        (EngineConfig, {"max_model_len": -5}),
        (WorkerConfig, {"port": 70000}),
        (WorkerConfig, {"pipes": ("carrier-pigeon",)}),
        (WorkerConfig, {"pipes": ()}),
        (WorkerConfig, {"routers": ("localhost",)}),
        (WorkerConfig, {"lease_s": 0}),
    ],
)
def test_a_configuration_that_cannot_work_names_its_field(cls, changes):
    with pytest.raises(ConfigError) as caught:
        cls(**changes)
    assert caught.value.field == next(iter(changes))


def test_help_prints():
    parser = argparse.ArgumentParser()
    for cls in (Sample, EngineConfig):
        add_flags(parser, cls)
    assert "--kv-memory-fraction" in parser.format_help()
