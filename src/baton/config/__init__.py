"""Configuration: frozen dataclasses, flags made from them, and the only place that reads the environment."""

from baton.config.flags import add_flags, from_flags
from baton.config.worker import EngineConfig

__all__ = ["EngineConfig", "add_flags", "from_flags"]
