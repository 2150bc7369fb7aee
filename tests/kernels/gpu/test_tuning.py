"""Tables of configurations: which one wins, and what is no table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from baton_kernels.gpu import tuning

OPERATORS = ("attention_few", "attention_many", "experts", "quantized_experts", "quantized_linear", "eight_bit_linear")


def write(folder: Path, name: str, warps: int, **fields: object) -> None:
    entry = {"when": {"tokens": [1, 16]}, "use": {"tile_m": 16, "warps": warps}}
    table = {"device": None, "capability": None, "provenance": "reasoned", "operators": {"op": [entry]}, **fields}
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(table))


def test_which_table_wins(tmp_path: Path) -> None:
    """What was measured here, then measured elsewhere, then for the architecture, then for any device."""
    local, shipped = tmp_path / "local", tmp_path / "shipped"
    write(shipped, "any.json", 1)
    write(shipped, "hopper.json", 2, capability=[9, 0])
    write(shipped, "ampere.json", 9, capability=[8, 0])
    write(shipped, "a.json", 3, device="H200", provenance="measured", capability=[9, 0])
    write(local, "b.json", 4, device="H200", provenance="measured")
    write(local, "c.json", 8, device="H100", provenance="measured")
    write(local, "d.json", 7, device="H200")  # says itself that nobody measured it

    def warps(name: str, capability: tuple[int, int] | None) -> list[int]:
        found = (table.find("op", {"tokens": 5}) for table in tuning.ranked_tables(name, capability, local, shipped))
        return [each.warps for each in found if each is not None]

    assert warps("H200", (9, 0)) == [4, 3, 2, 1]
    assert warps("H100", (9, 0)) == [8, 2, 1]
    assert warps("A100", (8, 6)) == [9, 1]
    assert warps("cpu", None) == [1]


def test_entries_fit_by_sizes_and_names() -> None:
    sizes = {"when": {"tokens": [1, 16], "form": "int4"}, "use": {"tile_m": 16}}
    other = {"when": {"rows": [4096, 4096]}, "use": {"tile_m": 32}}
    any_of = {"when": {}, "use": {"tile_m": 64, "programs": 3}}
    path = Path(tuning.__file__).parent / "tuned" / "any.json"
    assert tuning.read_table(path).provenance == "reasoned"
    entries = tuple((tuning._when(each["when"]), tuning._use(each["use"])) for each in (sizes, other, any_of))
    table = tuning.Table(None, None, "reasoned", {"op": entries})
    assert table.find("op", {"tokens": 16, "form": "int4", "rows": 4096}) == tuning.Tuning(tile_m=16)
    assert table.find("op", {"tokens": 17, "form": "int4", "rows": 4096}) == tuning.Tuning(tile_m=32)
    assert table.find("op", {"tokens": 16, "form": "int8"}) == tuning.Tuning(tile_m=64, programs=3)
    assert table.find("other", {"tokens": 1}) is None


def test_what_was_measured_is_written_and_wins(tmp_path: Path) -> None:
    fast = tuning.Tuning(tile_m=16, warps=8)
    tuning.write_table(tmp_path / "new" / "h200.json", "H200", "a test", {"op": [({"tokens": (1, 16)}, fast)]})
    (table, *_) = tuning.ranked_tables("H200", (9, 0), tmp_path / "new")
    assert (table.device, table.provenance) == ("H200", "measured")
    assert table.find("op", {"tokens": 16}) == fast
    assert table.find("op", {"tokens": 17}) is None
    device, shape = torch.device("cpu"), {"k_dim": 128}
    before = tuning.tuning_for("attention_few", device, shape)
    with tuning.trial("attention_few", fast):
        assert tuning.tuning_for("attention_few", device, shape) == fast
    assert tuning.tuning_for("attention_few", device, shape) == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "no table"),
        ("[]", "no table"),
        ('{"operators": {}}', "provenance is missing"),
        ('{"provenance": "guessed", "operators": {}}', "provenance must be one of measured, reasoned"),
        ('{"provenance": "measured", "operators": {"op": [{"when": {}}]}}', "use is missing"),
        ('{"provenance": "measured", "operators": {"op": [{"when": {"n": [1]}, "use": {}}]}}', "no table"),
        ('{"provenance": "measured", "operators": {"op": [{"when": {}, "use": {"tile": 1}}]}}', "tile is no field"),
    ],
)
def test_what_is_no_table_is_refused_with_its_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=why) as caught:
        tuning.read_table(path)
    assert str(path) in str(caught.value)


def test_every_operator_has_a_configuration_for_every_shape() -> None:
    assert all(table.provenance == "reasoned" for table in tuning.ranked_tables("H200", (9, 0), Path("/nowhere")))
    for capability in (None, (9, 0), (8, 0)):
        tables = tuning.ranked_tables("any", capability, Path("/nowhere"))
        for operator in OPERATORS:
            for size in (0, 1, 16, 17, 40, 100, 1000, 100_000):
                shape = dict.fromkeys(
                    ("tokens", "rows", "columns", "k_dim", "v_dim", "group", "tokens_per_expert"), size
                )
                assert any(table.find(operator, shape) for table in tables), (operator, capability, size)
    with pytest.raises(LookupError, match="no configuration of nothing"):
        tuning.tuning_for("nothing", torch.device("cpu"), {})
