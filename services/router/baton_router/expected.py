"""Chains that instances will hold although they haven't said so yet: a radix tree with counts.

A node is a run of blocks that all chains through it share, so a chain is remembered once, however many requests and
owners expect it, and costs as many steps as it has branches. Hashes are chained: two chains that agree in a block agree
in all before it, so where they part is found by halving.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.hashing import HASH_BYTES, HashChain


@dataclass(slots=True, eq=False)
class _Node:
    """A run of blocks; ``counts``: expectations per owner that reach its end."""

    data: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.data) // HASH_BYTES


@dataclass(slots=True, eq=False)
class Expectation:
    """A chain that an owner is expected to hold; give it back once with :meth:`ExpectedChains.forget`.

    Attributes:
        over: It was given back.
    """

    tree: ExpectedChains
    owner: int
    leaf: _Node
    over: bool = False


class ExpectedChains:
    """The tree. Owners are numbers of the caller's; they are never used twice."""

    def __init__(self) -> None:
        self._root = _Node(b"", None)
        self._blocks: dict[int, int] = {}

    def num_blocks(self, owner: int) -> int:
        """Distinct blocks expected of an owner."""
        return self._blocks.get(owner, 0)

    def add(self, owner: int, chain: HashChain) -> Expectation:
        """Expect a whole chain, from its first block on."""
        node, at, data = self._root, 0, chain.data
        while at < len(data):
            below = node.children.get(data[at : at + HASH_BYTES])
            if below is None:
                below = _Node(data[at:], node)
                node.children[data[at : at + HASH_BYTES]] = below
            shared = _shared(below, data, at)
            if shared < len(below.data):
                below = self._split(below, shared)
            node, at = below, at + shared
            if owner not in node.counts:
                node.counts[owner] = 0
                self._blocks[owner] = self._blocks.get(owner, 0) + node.length
            node.counts[owner] += 1
        return Expectation(self, owner, node)

    def forget(self, expectation: Expectation) -> None:
        """End an expectation."""
        owner, node = expectation.owner, expectation.leaf
        expectation.over = True
        while node.parent is not None:
            node.counts[owner] -= 1
            if not node.counts[owner]:
                del node.counts[owner]
                self._blocks[owner] -= node.length
                if not self._blocks[owner]:
                    del self._blocks[owner]
            if not node.counts:
                del node.parent.children[node.data[:HASH_BYTES]]
            node = node.parent

    def match(self, chain: HashChain) -> dict[int, int]:
        """Return per owner how many leading blocks it is expected to hold, if any."""
        depths: dict[int, int] = {}
        node, at, data = self._root, 0, chain.data
        while at < len(data):
            below = node.children.get(data[at : at + HASH_BYTES])
            if below is None:
                break
            shared = _shared(below, data, at)
            at += shared
            depths.update(dict.fromkeys(below.counts, at // HASH_BYTES))
            if shared < len(below.data):
                break
            node = below
        return depths

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two and return the upper one; the lower one stays itself, and with it the leaf it may be."""
        assert node.parent is not None
        upper = _Node(node.data[:at], node.parent, counts=dict(node.counts))
        node.parent.children[node.data[:HASH_BYTES]] = upper
        node.data, node.parent = node.data[at:], upper
        upper.children[node.data[:HASH_BYTES]] = node
        return upper


def _shared(node: _Node, data: bytes, at: int) -> int:
    """Return how many bytes of a node's run agree with ``data`` from ``at`` on; the first block does."""
    if data.startswith(node.data, at):
        return len(node.data)
    size = min(len(node.data), len(data) - at)
    if node.data[size - HASH_BYTES : size] == data[at + size - HASH_BYTES : at + size]:
        return size
    low, high = 1, size // HASH_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        begin = (middle - 1) * HASH_BYTES
        if node.data[begin : begin + HASH_BYTES] == data[at + begin : at + begin + HASH_BYTES]:
            low = middle
        else:
            high = middle
    return low * HASH_BYTES
