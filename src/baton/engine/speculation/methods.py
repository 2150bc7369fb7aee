"""Who drafts, by name."""

from __future__ import annotations

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.engine.speculation.bounded import BoundedDrafter
from baton.engine.speculation.chain import ChainDrafter
from baton.engine.speculation.drafter import Drafter, ReadsHidden
from baton.errors import ConfigError
from baton.plugins import PluginGroup

BUILT_IN = {
    "draft": "baton.engine.speculation.draft_model:load_draft_model",
    "eagle": "baton.engine.speculation.eagle:load_eagle",
    "eagle3": "baton.engine.speculation.eagle:load_eagle",
    "medusa": "baton.engine.speculation.medusa:load_medusa",
    "mtp": "baton.engine.speculation.mtp:load_mtp",
    "ngram": "baton.engine.speculation.ngram:NgramDrafter",
    "suffix": "baton.engine.speculation.suffix:SuffixDrafter",
}
"""Methods of ``--speculative``: a new one is a file and a line here."""
DRAFTERS = PluginGroup("speculative", "baton.drafters", BUILT_IN)
"""Callables that take the :class:`EngineConfig` and the executor and return a :class:`Drafter`."""


def load_drafter(config: EngineConfig, executor: Executor) -> Drafter | None:
    """Return what drafts for a loaded model; ``None``: nobody is to.

    Raises:
        ConfigError: There is no such method, or it cannot work with this model; names the field.
    """
    name = config.speculative
    if name == "none":
        return None
    make = DRAFTERS.load(name, other_names=["none"])
    if config.speculative_width > 1 and (why := executor.why_no_trees):
        raise ConfigError(f"speculative_width must be 1 here: {why}", field="speculative_width")
    drafter: Drafter = make(config, executor)
    if isinstance(drafter, ChainDrafter):
        drafter.tells_draws = config.speculative_acceptance == "rejection"
    waits = name not in BUILT_IN or config.speculative_tp > 1
    return BoundedDrafter(drafter) if waits and not isinstance(drafter, ReadsHidden) else drafter
