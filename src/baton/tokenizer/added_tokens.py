"""Tokens that stand in a text by their own names, as ``<|im_start|>`` does, and are found before words are."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

NONE = 2**32 - 1
REFUSED = NONE - 1
"""The id of those whose place in a text takes more to know than their names."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Names of tokens, byte by byte; ``array("I")`` each.

    Attributes:
        roots: [256]: the node of the names that begin with a byte; 0: there are none.
        nodes: [nodes * 3]: the id of the token whose name ends here or ``NONE``, the first edge, how many edges.
        edges: [edges * 2]: byte and node.
        longest: Bytes of the longest name; 1 if there are none.
    """

    roots: array[int]
    nodes: array[int]
    edges: array[int]
    longest: int = 1

    @property
    def only(self) -> int:
        """The one byte that all names begin with; 0: there are several, or none."""
        first = [byte for byte, node in enumerate(self.roots) if node]
        return first[0] if len(first) == 1 else 0


def token_tree(added: list[dict[str, Any]]) -> TokenTree | None:
    """Return the tree of a tokenizer's added tokens; ``None``: they are not found by their names alone.

    Args:
        added: That part of a ``tokenizer.json``.
    """
    if any(not token["content"] for token in added):
        return None
    # The library looks for tokens with and without "normalized" one after the other: longest-first holds among each.
    mixed = len({bool(token.get("normalized")) for token in added}) > 1
    top: dict[int, Any] = {}
    for token in added:
        content = token["content"]
        if token.get("normalized") and not content.isascii():
            return None  # it is not this name that is looked for
        plain = not (mixed or token.get("single_word") or token.get("lstrip") or token.get("rstrip"))
        node = top
        for byte in content.encode():
            node = node.setdefault(byte, {})
        node[-1] = token["id"] if plain else REFUSED
    return _flat(top, max((len(token["content"].encode()) for token in added), default=1))


def _flat(top: dict[int, Any], longest: int) -> TokenTree:
    roots, nodes, edges = array("I", bytes(4 * 256)), array("I", (NONE, 0, 0)), array("I")
    waiting = deque([top])
    count = 1
    while waiting:
        node = waiting.popleft()
        below = [(byte, child) for byte, child in node.items() if byte >= 0]
        if node is not top:
            nodes.extend((node.get(-1, NONE), len(edges) // 2, len(below)))
        for byte, child in below:
            if node is top:
                roots[byte] = count
            else:
                edges.extend((byte, count))
            waiting.append(child)
            count += 1
    return TokenTree(roots, nodes, edges, longest)
