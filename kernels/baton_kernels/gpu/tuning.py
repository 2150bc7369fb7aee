"""Tile sizes of kernels: tables of configurations per device and shape, and their precedence.

A table is a JSON file::

    {"device": "NVIDIA H200", "capability": [9, 0], "provenance": "measured", "note": "how, when and by whom",
     "operators": {"quantized_linear": [{"when": {"form": "int4", "tokens": [1, 16], "rows": [4096, 4096]},
                                         "use": {"tile_m": 16, "tile_n": 64, "tile_k": 128, "warps": 4}}]}}

``when`` bounds sizes (both ends included) and names forms; other sizes and forms are not restricted. Tables are
searched in this order for the first entry that fits:

1. measured on a device of this name, in the folder of this machine (:data:`LOCAL_TABLES`), where
   ``benchmarks/kernels.py --tune`` writes them;
2. measured on a device of this name, shipped with the package (``tuned/``);
3. shipped for the device's compute capability, by its major number;
4. shipped for any device (``tuned/any.json``), which has an entry for everything.

``provenance`` is ``measured`` or ``reasoned``: chosen from the properties of the hardware, without measurements.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

LOCAL_TABLES = Path("~/.cache/baton/kernels")
_SHIPPED = Path(__file__).parent / "tuned"
_PROVENANCES = ("measured", "reasoned")
_INTERPRETED_PROCESSORS = 4

When = Mapping[str, tuple[int, int] | str]


@dataclass(frozen=True, slots=True)
class Tuning:
    """One configuration.

    Attributes:
        tile_m: Rows of a tile; 0: no tiles (a quantized weight is unpacked and multiplied by the vendor's library).
        tile_n: Columns, or keys, of a tile.
        tile_k: Elements of a tile in the dimension that is summed over.
        warps: Number of warps per program.
        stages: Number of loads that are in flight at a time.
        programs: Number of programs per multiprocessor that a launch aims at, where work can be divided.
    """

    tile_m: int = 0
    tile_n: int = 64
    tile_k: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2


@dataclass(frozen=True, slots=True)
class Table:
    """A file of configurations.

    Attributes:
        device: Name of the device, or ``None``: any with this capability.
        capability: Major and minor number, or ``None``: any.
        provenance: ``measured`` or ``reasoned``.
        operators: Entries by operator, in their order.
    """

    device: str | None
    capability: tuple[int, int] | None
    provenance: str
    operators: Mapping[str, tuple[tuple[When, Tuning], ...]]

    def find(self, operator: str, shape: Mapping[str, int | str]) -> Tuning | None:
        """Return the first entry that fits, or ``None``."""
        for when, use in self.operators.get(operator, ()):
            if all(_fits(bound, shape.get(name)) for name, bound in when.items()):
                return use
        return None


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        ValueError: The file is no table; names the file and the field.
    """
    try:
        content = json.loads(path.read_text())
        if content["provenance"] not in _PROVENANCES:
            raise ValueError(f"provenance must be one of {', '.join(_PROVENANCES)}, not {content['provenance']!r}")
        operators = {
            name: tuple((_when(entry["when"]), _use(entry["use"])) for entry in entries)
            for name, entries in content["operators"].items()
        }
        capability = content.get("capability")
        pair = None if capability is None else (int(capability[0]), int(capability[1]))
        return Table(content.get("device"), pair, content["provenance"], operators)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from error
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is no table of configurations: {error}") from error


def ranked_tables(
    name: str, capability: tuple[int, int] | None, local: Path = LOCAL_TABLES, shipped: Path = _SHIPPED
) -> list[Table]:
    """Return the tables for a device, in the order in which they are searched; see the module's docstring."""
    ranked: list[tuple[int, Table]] = []
    for folder in (local.expanduser(), shipped):
        for path in sorted(folder.glob("*.json")):
            table = read_table(path)
            if table.device is not None:
                if table.device == name and table.provenance == "measured":
                    ranked.append((1 if folder == shipped else 0, table))
            elif folder == shipped:
                if table.capability is None:
                    ranked.append((3, table))
                elif capability is not None and table.capability[0] == capability[0]:
                    ranked.append((2, table))
    return [table for _, table in sorted(ranked, key=lambda each: each[0])]


@functools.cache
def _tables(device: torch.device) -> list[Table]:
    if device.type != "cuda":
        return ranked_tables("cpu", None)
    return ranked_tables(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def tuning_for(operator: str, device: torch.device, shape: Mapping[str, int], **names: str) -> Tuning:
    """Return the configuration of an operator for a shape.

    Raises:
        LookupError: No table has one.
    """
    return _look_up(operator, device, (*shape.items(), *names.items()))


@functools.lru_cache(maxsize=4096)
def _look_up(operator: str, device: torch.device, shape: tuple[tuple[str, int | str], ...]) -> Tuning:
    sizes = dict(shape)
    if operator in _trials:
        return _trials[operator]
    for table in _tables(device):
        tuning = table.find(operator, sizes)
        if tuning is not None:
            return tuning
    raise LookupError(f"no configuration of {operator} for {sizes}")


def token_bounds(device: torch.device) -> set[int]:
    """Return the numbers of tokens at which an operator's configuration changes: both ends of each range."""
    whens = [when for table in _tables(device) for entries in table.operators.values() for when, _ in entries]
    ranges = [when.get("tokens") for when in whens]
    return {end for bound in ranges if bound is not None and not isinstance(bound, str) for end in bound if end > 0}


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; a few under the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_trials: dict[str, Tuning] = {}


@contextlib.contextmanager
def trial(operator: str, tuning: Tuning) -> Iterator[None]:
    """Run an operator with a configuration instead of the tables', for measurements."""
    _trials[operator] = tuning
    _look_up.cache_clear()
    try:
        yield
    finally:
        del _trials[operator]
        _look_up.cache_clear()


def write_table(path: Path, device: str, note: str, operators: Mapping[str, Sequence[tuple[When, Tuning]]]) -> None:
    """Write a table of configurations that were measured on a device."""
    entries = {
        name: [{"when": dict(when), "use": asdict(use)} for when, use in each] for name, each in operators.items()
    }
    table = {"device": device, "capability": None, "provenance": "measured", "note": note, "operators": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


def _fits(bound: tuple[int, int] | str, size: int | str | None) -> bool:
    if isinstance(bound, str):
        return size == bound
    return isinstance(size, int) and bound[0] <= size <= bound[1]


def _when(given: Mapping[str, Any]) -> When:
    when: dict[str, tuple[int, int] | str] = {}
    for name, bound in given.items():
        if not isinstance(bound, str):
            low, high = bound
            bound = (int(low), int(high))
        when[name] = bound
    return when


def _use(given: Mapping[str, Any]) -> Tuning:
    known = {field.name for field in fields(Tuning)}
    if unknown := given.keys() - known:
        raise ValueError(f"{sorted(unknown)[0]} is no field of a configuration ({', '.join(sorted(known))})")
    return Tuning(**{name: int(value) for name, value in given.items()})
