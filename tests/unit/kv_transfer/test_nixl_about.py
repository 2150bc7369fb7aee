"""What an agent says of itself arrives as it was sent, or is refused before NIXL sees it."""

from __future__ import annotations

import pytest

from baton.kv_transfer.pipes.nixl_about import MAX_METADATA_BYTES, describe_agent, parse_agent
from baton.kv_transfer.protocol.frames import BadFrameError

NAME, METADATA = "baton-0123456789abcdef", bytes(range(256)) * 2


def test_what_was_said_is_read() -> None:
    assert parse_agent(describe_agent(NAME, METADATA) | {"arenas": []}) == (NAME, METADATA)
    assert parse_agent(describe_agent("x" * 64, b"x" * MAX_METADATA_BYTES))[1] == b"x" * MAX_METADATA_BYTES


@pytest.mark.parametrize("length", [*range(20), 255, 256, 257, *range(492, 512)])
def test_metadata_cut_short_anywhere_is_refused(length: int) -> None:
    said = describe_agent(NAME, METADATA)
    with pytest.raises(BadFrameError) as caught:
        parse_agent(said | {"metadata": said["metadata"][: 2 * length]})
    assert caught.value.field == "metadata"


@pytest.mark.parametrize("at", range(0, len(METADATA), 7))
def test_a_changed_byte_is_noticed(at: int) -> None:
    changed = bytearray(METADATA)
    changed[at] ^= 1 << at % 8
    with pytest.raises(BadFrameError):
        parse_agent(describe_agent(NAME, METADATA) | {"metadata": changed.hex()})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent", None),
        ("agent", "x" * 65),
        ("agent", "ü"),
        ("agent", "\ud800"),
        ("metadata", METADATA),
        ("metadata", "0"),
        ("metadata", "00" * (MAX_METADATA_BYTES + 1)),
    ],
)
def test_what_is_no_description_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(BadFrameError) as caught:
        parse_agent(describe_agent(NAME, METADATA) | {field: value})
    assert caught.value.field == field


def test_one_agents_metadata_are_not_anothers() -> None:
    with pytest.raises(BadFrameError):
        parse_agent(describe_agent(NAME, METADATA) | {"agent": "baton-another"})
