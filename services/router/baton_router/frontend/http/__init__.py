"""The router's HTTP front: OpenAI's interface, and what there is to see."""

from baton_router.frontend.console.debug import add_replicas, watch
from baton_router.frontend.http.app import create_app
from baton_router.frontend.http.options import HttpOptions

__all__ = ["HttpOptions", "add_replicas", "create_app", "watch"]
