"""Blocks that running requests will make instances hold, before any event says so: a radix tree with counts.

A node is a run of blocks that all chains through it share, so a chain is stored once however many requests and owners
it is pending for, and costs as many steps as it has branches. Hashes are chained: two chains that agree in one block
agree in all blocks before it, so the block at which they part is found by binary search.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from baton.hashing import HASH_BYTES, HashChain


class _Node(msgspec.Struct, eq=False):
    """A run of blocks; ``counts``: pending chains per owner that reach its end."""

    data: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = msgspec.field(default_factory=dict)
    counts: dict[int, int] = msgspec.field(default_factory=dict)


class PendingChain(msgspec.Struct, eq=False):
    """A chain that counts as held by an owner until :meth:`release`, which must be called once.

    Attributes:
        over: It was released.
    """

    tree: PendingBlocks
    owner: int
    leaf: _Node
    over: bool = False

    def release(self) -> None:
        """Let the chain count no more; harmless if the owner's slot was dropped meanwhile."""
        self.over = True
        self.tree._remove(self.owner, self.leaf)


class _Walk(NamedTuple):
    """How far a chain follows the tree.

    Attributes:
        data: The chain.
        passed: Nodes whose whole run it shares, from the root's child on.
        at: Bytes of the chain up to the last one's end.
        below: The node that it shares ``shared`` bytes more with, if there is one; it parts or ends within it.
    """

    data: bytes
    passed: list[_Node]
    at: int
    below: _Node | None
    shared: int


class PendingBlocks:
    """The tree. Owners are numbers chosen by the caller and never reused."""

    def __init__(self) -> None:
        self._root = _Node(b"", None)
        self._bytes: dict[int, int] = {}
        """Of the distinct hashes that are pending, by owner."""
        self._walked: _Walk | None = None
        """The latest walk, kept until the tree changes: a chain is usually looked up, then added for two owners."""

    def num_blocks(self, owner: int) -> int:
        """Distinct blocks pending for an owner."""
        return self._bytes.get(owner, 0) // HASH_BYTES

    def add(self, owner: int, chain: HashChain) -> PendingChain:
        """Count a whole chain, from its first block on, as held by ``owner``."""
        data, passed, at, below, shared = self._walk(chain.data)
        if below is not None:
            passed.append(self._split(below, shared))
            at += shared
        node = passed[-1] if passed else self._root
        if at < len(data):
            leaf = _Node(data[at:], node)
            node.children[data[at : at + HASH_BYTES]] = leaf
            node = leaf
            passed.append(leaf)
        for step in passed:
            counts = step.counts
            if owner in counts:
                counts[owner] += 1
            else:
                counts[owner] = 1
                self._bytes[owner] = self._bytes.get(owner, 0) + len(step.data)
        self._walked = _Walk(data, passed, len(data), None, 0)
        return PendingChain(self, owner, node)

    def _remove(self, owner: int, node: _Node) -> None:
        self._walked = None
        while node.parent is not None:
            node.counts[owner] -= 1
            if not node.counts[owner]:
                del node.counts[owner]
                self._bytes[owner] -= len(node.data)
                if not self._bytes[owner]:
                    del self._bytes[owner]
            if not node.counts:
                del node.parent.children[node.data[:HASH_BYTES]]
            node = node.parent

    def match(self, chain: HashChain) -> dict[int, int]:
        """Return per owner how many leading blocks are pending for it, if any."""
        depths: dict[int, int] = {}
        if not self._root.children:
            return depths
        _, passed, end, below, shared = self._walk(chain.data)
        at = 0
        for node in passed:
            at += len(node.data)
            depths.update(dict.fromkeys(node.counts, at // HASH_BYTES))
        if below is not None:
            depths.update(dict.fromkeys(below.counts, (end + shared) // HASH_BYTES))
        return depths

    def _walk(self, data: bytes) -> _Walk:
        walked = self._walked
        if walked is not None and walked.data is data:
            return walked
        node, at = self._root, 0
        passed: list[_Node] = []
        below, shared = None, 0
        while at < len(data):
            below = node.children.get(data[at : at + HASH_BYTES])
            if below is None:
                break
            shared = _shared(below, data, at)
            if shared < len(below.data):
                break
            node, at, below = below, at + shared, None
            passed.append(node)
        self._walked = walked = _Walk(data, passed, at, below, shared)
        return walked

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
