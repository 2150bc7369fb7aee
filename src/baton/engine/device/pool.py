"""Memory for KV pools: how much of it is free where a model runs, and arenas there."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from baton.engine.device.arena import DeviceArena
from baton.engine.device.compute import ComputeDevice
from baton.kv_cache.arena import Arena, HostArena

_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Versions 2 and 1: folder, files of limit and use, and the part of the use that can be dropped."""


def new_arena(
    device: ComputeDevice, blocks: int, block_bytes: int, *, private: bool, leader: ComputeDevice | None = None
) -> Arena:
    """Return an arena where a model runs.

    Args:
        device: Of the rank.
        blocks: How many.
        block_bytes: Size of each.
        private: No other process will read it.
        leader: Of this process's own rank, if that is another one.
    """
    if device.on_gpu:
        return DeviceArena(device, blocks, block_bytes, leader=leader)
    return HostArena(blocks, block_bytes, private=private)


def free_bytes(device: torch.device) -> int:
    """Bytes of the memory that a pool for a device comes from which are free: the device's, or this host's."""
    if device.type == "cpu":
        return available_bytes()
    torch.cuda.empty_cache()  # what torch keeps of what it has freed
    return int(torch.cuda.mem_get_info(device)[0])


def available_bytes() -> int:
    """Bytes of host memory that this process can still take, within the limit of its control group."""
    available = int(psutil.virtual_memory().available)
    for folder, limit, usage, cache in _CONTROL_GROUPS:
        try:
            text = (folder / limit).read_text().strip()
            if text == "max":
                continue
            used = int((folder / usage).read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == cache:  # page cache that can be dropped does not count
                    used -= int(value)
            available = min(available, max(0, int(text) - max(0, used)))
        except (OSError, ValueError):
            continue  # no such version of control groups here
    return available
