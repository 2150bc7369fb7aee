"""Choices made by the bytes of an input, so that coverage-led mutation reaches structured values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_STRANGE = [
    *("", "\0", "\n", "\x7f", "\ud800", "é", "日", "\u200d", "\ufdfa"),
    *("<|im_end|>", "<|im_start|>", "__class__", "{{", ".."),
]
_NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400]
_PARTS = [0.0, -0.0, 0.5, 1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")]


class Choices:
    """Reads an input; beyond its end everything is 0."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def more(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """Return so many bytes, fewer at the end."""
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def number(self, least: int, most: int) -> int:
        """Return a number between two, both included."""
        size = ((most - least).bit_length() + 7) // 8
        return least + int.from_bytes(self.take(size), "little") % (most - least + 1)

    def flag(self) -> bool:
        return bool(self.number(0, 1))

    def pick(self, values: Sequence[T]) -> T:
        return values[self.number(0, len(values) - 1)]

    def text(self) -> str:
        """Return words, some of them awkward."""
        parts = []
        for _ in range(self.number(0, 4)):
            strange = self.flag()
            parts.append(self.pick(_STRANGE) if strange else self.take(self.number(0, 8)).decode("utf-8", "replace"))
        return "".join(parts)

    def integer(self) -> int:
        return self.number(0, 20) if self.flag() else self.pick(_NUMBERS)

    def value(self, depth: int = 3) -> Any:
        """Return anything that JSON can hold, and some that it cannot."""
        kind = self.number(0, 8 if depth else 5)
        if kind <= 1:
            return [None, True, False][self.number(0, 2)]
        if kind == 2:
            return self.integer()
        if kind == 3:
            return self.pick(_PARTS) if self.flag() else self.number(0, 1000) / 100
        if kind <= 5:
            return self.text()
        if kind == 6:
            return [self.value(depth - 1) for _ in range(self.number(0, 4))]
        return {self.text(): self.value(depth - 1) for _ in range(self.number(0, 4))}

    def fields(self, names: Sequence[str], most: int = 8) -> dict[str, Any]:
        """Return some of the fields named, of any kind."""
        return {self.pick(names): self.value() for _ in range(self.number(0, most))}

    def mutated(self, data: bytes) -> bytes:
        """Return bytes that were flipped, cut, doubled or put in."""
        out = bytearray(data)
        for _ in range(self.number(0, 4)):
            at, kind = self.number(0, max(0, len(out) - 1)), self.number(0, 3)
            if kind == 0 and out:
                out[at] ^= self.number(1, 255)
            elif kind == 1:
                del out[at : at + self.number(1, 64)]
            elif kind == 2:
                out[at:at] = self.take(self.number(1, 16))
            else:
                out[at:at] = out[at : at + self.number(1, 64)]
        return bytes(out)
