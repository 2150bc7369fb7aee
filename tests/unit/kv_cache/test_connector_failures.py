"""A connector that fails, in whatever it is asked, costs neither a request nor the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.support.models.linked_engines import PROMPT, Engine, PrefillSide, expected

from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate
from baton.kv_transfer.connector.multi import MultiConnector
from baton.types import BlockId, PrefillPath, RequestId, Tenant


@pytest.mark.parametrize("where", ["plan_error", "start_error"])
def test_a_connector_that_fails_costs_a_local_prefill_and_says_so(pair: tuple[Engine, Engine], where: str) -> None:
    _, decode = pair
    setattr(decode.link, where, OSError("no route"))
    decode.add("a")
    decode.run()
    assert decode.tokens("a") == expected(decode)
    metrics = decode.ends["a"].metrics
    assert metrics is not None
    assert metrics.transfer.path is PrefillPath.LOCAL
    assert "no route" in metrics.transfer.local_reason


def test_a_connector_that_fails_to_save_costs_no_request() -> None:
    class Broken(PrefillSide):
        follows_all = True

        def blocks_computed(self, *_: object) -> None:
            raise OSError("the disk is full")

        def request_finished(self, request_id: RequestId) -> bool:
            raise OSError("still full")

    engine = Engine(side=Broken())
    engine.add("a")
    engine.run()
    assert engine.tokens("a") == expected(engine)
    engine.assert_empty()


HOOKS = (
    "cancel_load",
    "poll_loads",
    "poll_releases",
    "has_pending",
    "step_begins",
    "layer_computed",
    "blocks_belong",
    "blocks_computed",
    "request_finished",
)


class Failing(PrefillSide):
    """Follows all, plans a load of whatever is named so, and fails in one hook."""

    follows_all = True

    def __init__(self, hook: str, failure: Callable[[], object]) -> None:
        super().__init__()
        self.loads: list[RequestId] = []
        self.calls, self.failing = 0, True

        def fail(*_: object) -> object:
            self.calls += 1
            return failure() if self.failing else working()

        def working() -> object:
            return [] if hook.startswith("poll") else None

        setattr(self, hook, fail)

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        return LoadPlan(8) if request.request_id.startswith("load") else None

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        self.loads.append(request.request_id)

    def cancel_load(self, request_id: RequestId) -> None: ...

    def request_finished(self, request_id: RequestId) -> bool:
        return False


def _raise() -> object:
    raise OSError("this hook does not work")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_costs_neither_a_request_nor_the_engine(hook: str, alone: bool) -> None:
    failing = Failing(hook, _raise)
    engine = Engine(side=failing if alone else MultiConnector([failing, KVConnector()]))
    for name in ("a", "b"):
        engine.add(name, tenant=Tenant("somebody"))
        engine.run()
        assert engine.tokens(name) == expected(engine), name
    engine.add("for others", [2, *PROMPT], prefill_only=True)
    engine.run()
    assert engine.tokens("for others") == expected(engine, [2, *PROMPT])[:1]
    engine.add("load", PROMPT[::-1])
    engine.step()
    assert engine.core.stats().num_loading == 1
    assert engine.core.abort(RequestId("load"))
    engine.step()
    assert engine.core.stats().num_loading == 1  # its end has not been reported yet
    assert failing.calls
    failing.failing = False
    failing.poll_loads = lambda: [LoadUpdate(RequestId("load"), 0, error="cancelled")]  # type: ignore[method-assign]
    engine.step()
    failing.poll_loads = list  # type: ignore[method-assign]
    engine.assert_empty()


@pytest.mark.parametrize("answer", [None, 7, [["no update"]]])
@pytest.mark.parametrize("hook", ["poll_loads", "poll_releases"])
def test_an_answer_that_is_none_costs_nothing(hook: str, answer: object) -> None:
    failing = Failing(hook, lambda: answer)
    engine = Engine(side=failing)
    engine.add("a")
    engine.run()
    assert engine.tokens("a") == expected(engine)
    assert failing.calls


def test_a_plan_that_is_none_is_computed_here(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.link.plan_load = lambda *_: 12  # type: ignore[assignment, method-assign, return-value]
    decode.add("a")
    decode.run()
    assert decode.tokens("a") == expected(decode)
    metrics = decode.ends["a"].metrics
    assert metrics is not None
    assert metrics.transfer.local_reason == "connector: DecodeSide planned a load with a int"


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_tenant_computed_is_not_saved_without_owner(alone: bool) -> None:
    failing = Failing("blocks_belong", _raise)
    engine = Engine(side=failing if alone else MultiConnector([failing, KVConnector()]))
    engine.add("a", tenant=Tenant("somebody"))
    engine.run()
    engine.add("b", [1, 2, *PROMPT])
    engine.run()
    assert set(failing.progress) == {"b"}
