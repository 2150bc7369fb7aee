"""What EndpointSlices say: which addresses take requests. Free of I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Slices:
    """The EndpointSlices of one selector, as list and watch tell of them.

    Args:
        port: Name of the port to take.
    """

    def __init__(self, port: str) -> None:
        self._port = port
        self._slices: dict[str, frozenset[str]] = {}

    def replace(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Take a whole list."""
        self._slices = {_name(item): self._addresses(item) for item in items}

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        """Take a change: ``ADDED``, ``MODIFIED`` or ``DELETED``."""
        if kind == "DELETED":
            self._slices.pop(_name(item), None)
        else:
            self._slices[_name(item)] = self._addresses(item)

    def addresses(self) -> set[str]:
        """Return every ``host:port`` that takes requests; a slice may repeat what another one has."""
        return set[str]().union(*self._slices.values())

    def _addresses(self, item: Mapping[str, Any]) -> frozenset[str]:
        port = next((x.get("port") for x in item.get("ports") or () if x.get("name") == self._port), None)
        if port is None:
            return frozenset()
        form = "[{}]:{}" if item.get("addressType") == "IPv6" else "{}:{}"
        return frozenset(
            form.format(address, port)
            for endpoint in item.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False  # not said: ready
            for address in endpoint.get("addresses") or ()
        )


def _name(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])
