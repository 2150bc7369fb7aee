"""The master of a Mooncake Store of a test's own, where its package is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tests.support.servers.listening import ListeningProcess

from baton.rpc.server import free_port


@functools.cache
def missing_mooncake() -> str | None:
    """Return why there is no Mooncake Store; ``None``: there is one."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        return "the package mooncake-transfer-engine is not installed"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"mooncake.store cannot be imported: {error}"
    return None


class MooncakeMaster(ListeningProcess):
    """One master."""

    @property
    def url(self) -> str:
        """Where it is."""
        return f"mooncake://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str]:
        spec = importlib.util.find_spec("mooncake")
        if spec is None or spec.origin is None:
            raise RuntimeError(str(missing_mooncake()))
        flags = ("-rpc_address", "127.0.0.1", "-rpc_port", str(self.port), "-metrics_port", str(free_port()))
        return (str(Path(spec.origin).with_name("mooncake_master")), *flags)
