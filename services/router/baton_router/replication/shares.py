"""How the capacity of an instance is divided among replicas: max-min fair, and what nobody wants in equal parts."""

from __future__ import annotations

from collections.abc import Mapping


def fair_shares(capacity: int, wants: Mapping[str, int]) -> dict[str, int]:
    """Divide ``capacity`` among replicas by what each could use.

    Everybody is sure of half of an equal part (at least 1 if there is enough for all), so that nobody is left with
    nothing when Redis goes away. Of the rest, nobody gets more than he wants while another wants more and has less;
    what is left when all have what they want is divided equally. The result depends on the arguments alone, so that
    all replicas come to the same; it adds up to ``capacity``.

    Args:
        capacity: Of the instance.
        wants: Per replica: units in use and units that it could use beside them.
    """
    names = sorted(wants)
    if not names or capacity <= 0:
        return dict.fromkeys(names, 0)
    count = len(names)
    floor = min(capacity // count, max(1, capacity // (2 * count)))
    shares = dict.fromkeys(names, floor)
    left = capacity - floor * count
    hungry = sorted((name for name in names if wants[name] > floor), key=lambda name: (wants[name], name))
    while hungry and left:
        part = left // len(hungry)
        name = hungry.pop(0)  # who wants least; the others share what he leaves
        more = min(wants[name] - floor, part)
        shares[name] += more
        left -= more
    for at, name in enumerate(names):
        shares[name] += left // count + (at < left % count)
    return shares
