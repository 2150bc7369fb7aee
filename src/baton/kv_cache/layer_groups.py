"""Layers that see the same part of a sequence share blocks: full attention one group, sliding windows others.

Without groups a block holds all layers of its tokens, so it stays for as long as any layer needs it. With groups a
block holds one group's layers: blocks of a window's group are given back when no later token will see them. All groups
take their blocks from one pool, so their blocks have one size: as many places for layers as the largest group has.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv_cache.layout import LayerGroup, LayerShape

MAX_GROUPS = 8
"""Each costs every sequence a block table."""
LONG = 8
"""Sequences are taken to be so many times as long as windows: so much more costs an empty place of full attention."""


def group_layers(windows: Sequence[int], shapes: Sequence[LayerShape]) -> tuple[LayerGroup, ...]:
    """Divide a model's layers into groups, those of full attention first.

    The number of layers per group is the one with which long sequences take the least memory, empty places included:
    Gemma 3's 5 : 1 gives 6 groups, or 7 where some places stay empty.

    Args:
        windows: Of each layer; 0: it sees everything.
        shapes: Of each layer.

    Returns:
        At least two groups; none where all layers see the same, or differ in shape.
    """
    kinds: dict[int, list[int]] = {0: []}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if not kinds[0] or len(kinds) == 1 or len(set(shapes)) > 1:
        return ()

    def counts(size: int) -> tuple[int, int]:
        """Groups of full attention, and of windows."""
        each = [-(-len(layers) // size) for layers in kinds.values()]
        return each[0], sum(each[1:])

    def cost(size: int) -> tuple[int, int]:
        full, others = counts(size)
        return size * (LONG * full + others), -size

    sizes = [size for size in range(1, len(windows) + 1) if sum(counts(size)) <= MAX_GROUPS]
    if not sizes:
        return ()
    size = min(sizes, key=cost)
    return tuple(
        LayerGroup(tuple(layers[at : at + size]), window)
        for window, layers in kinds.items()
        for at in range(0, len(layers), size)
    )
