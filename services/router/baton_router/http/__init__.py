"""The router's OpenAI-compatible HTTP front."""

from baton_router.http.app import create_app
from baton_router.http.options import HttpOptions

__all__ = ["HttpOptions", "create_app"]
