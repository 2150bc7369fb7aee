"""Configuration: frozen dataclasses, flags made from them, and the only place that reads the environment."""

from baton.config.engine import EngineConfig
from baton.config.flags import add_flags, from_flags

__all__ = ["EngineConfig", "add_flags", "from_flags"]
