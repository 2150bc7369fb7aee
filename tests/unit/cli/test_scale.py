"""``baton scale``: which instances change their role."""

from __future__ import annotations

from typing import Any

import pytest

from baton.cli.instances import parse_targets
from baton.cli.main import main
from baton.client import Instance, Load, Switch
from baton.client.scaling import plan_switches
from baton.errors import ConfigError
from baton.types import Role

P, D = Role.PREFILL, Role.DECODE


def instance(name: str, role: Role, in_flight: int = 0, **changes: Any) -> Instance:
    load = Load(0, 0, 0, 100, 0, 0, 0, 0.0, 0.0, 0, False)
    values = {"healthy": True, "index_state": "exact", "load": load, "in_flight": in_flight, "indexed_blocks": 0}
    return Instance(instance_id=name, address="h:1", role=role, **{**values, **changes})


FLEET = [instance("p0", P, 3), instance("p1", P, 1), instance("d0", D, 7), instance("d1", D, 2)]


def test_the_least_busy_of_those_that_are_too_many_change():
    assert plan_switches(FLEET, {P: 1, D: 3}) == [Switch("p1", P, D)]
    assert plan_switches(FLEET, {P: 3}) == [Switch("d1", D, P)]
    assert plan_switches(FLEET, {D: 4}) == [Switch("p1", P, D), Switch("p0", P, D)]
    assert plan_switches(FLEET, {P: 2, D: 2}) == []


def test_instances_that_cannot_be_used_do_not_count():
    broken = [*FLEET, instance("d2", D, healthy=False), instance("d3", D, refused="another model")]
    assert plan_switches(broken, {P: 3, D: 1}) == [Switch("d1", D, P)]


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ({P: 3, D: 2}, "2 prefill and 2 decode instances, 4 in all, which prefill=3 and decode=2 is not"),
        ({P: 9}, "4 in all, which prefill=9 is not"),
        ({P: 4, D: 0}, "at least one decode instance must stay"),
        ({P: 4}, "at least one decode instance must stay"),
    ],
)
def test_targets_that_do_not_fit(targets, says):
    with pytest.raises(ConfigError, match=says):
        plan_switches(FLEET, targets)


def test_targets():
    assert parse_targets(["decode=1", "prefill=3"]) == {D: 1, P: 3}
    for words in (["3P1D"], ["prefill=x"], ["prefill=1", "prefill=2"], ["router=2"]):
        with pytest.raises(ConfigError):
            parse_targets(words)


def test_a_wrong_target_is_one_line(capsys):
    assert main(["scale", "prefill:3"]) == 2
    assert capsys.readouterr().err == "baton scale: error: targets look like prefill=3 decode=1, got 'prefill:3'\n"
