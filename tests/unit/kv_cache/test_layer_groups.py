from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.kv_cache.layout import MAX_GROUPS, KVLayout, LayerGroup, LayerShape, group_layers

SHAPE = LayerShape(2, 16, 16)


@given(st.lists(st.sampled_from((0, 512, 1024)), min_size=1, max_size=64))
def test_every_layer_is_in_one_group_of_its_window(windows: list[int]) -> None:
    groups = group_layers(windows, [SHAPE] * len(windows))
    if not groups:
        assert len(set(windows)) == 1 or 0 not in windows
        return
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert groups[0].window == 0
    assert 2 <= len(groups) <= MAX_GROUPS
    layout = KVLayout((SHAPE,) * len(windows), 16, "float32", groups)
    ungrouped = KVLayout((SHAPE,) * len(windows), 16, "float32")
    assert layout.block_bytes * len(groups) >= ungrouped.block_bytes
    for layer, place in enumerate(layout.places):
        group = groups[layout.group_of[layer]]
        assert layer in group.layers
        assert place.k == group.layers.index(layer) * SHAPE.elements_per_token * 16 * 4
        assert place.end == place.k + SHAPE.elements_per_token * 16 * 4 <= layout.block_bytes


@pytest.mark.parametrize(
    ("name", "full_every", "layers", "groups", "places"),
    [
        ("Gemma 3 1B", 6, 26, 7, 28),
        ("Gemma 3 4B", 6, 34, 7, 35),
        ("Gemma 3 12B", 6, 48, 6, 48),
        ("Gemma 3 27B", 6, 62, 7, 70),
        ("Gemma 2 2B, GPT-OSS", 2, 26, 2, 26),
    ],
)
def test_published_models(name: str, full_every: int, layers: int, groups: int, places: int) -> None:
    windows = [0 if layer % full_every == full_every - 1 else 1024 for layer in range(layers)]
    found = group_layers(windows, [SHAPE] * layers)
    assert len(found) == groups
    assert len(found) * max(len(group.layers) for group in found) == places


def test_layers_that_differ_in_shape_stay_together() -> None:
    assert group_layers([0, 8], [SHAPE, LayerShape(1, 16, 16)]) == ()
    with pytest.raises(ConfigError) as refused:
        KVLayout((SHAPE, LayerShape(1, 16, 16)), 16, "float32", (LayerGroup((0,)), LayerGroup((1,), 8)))
    assert refused.value.field == "layer_groups"
    with pytest.raises(ConfigError):
        KVLayout((SHAPE,) * 3, 16, "float32", (LayerGroup((0,)), LayerGroup((1,), 8)))
