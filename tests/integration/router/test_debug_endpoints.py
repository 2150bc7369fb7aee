"""``/debug``, ``/console`` and ``baton explain`` over a real router with real links to workers without a model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.watched import KEY, PROMPT, SALT, Watched, watched_router

from baton.cli.main import main
from baton_router.indexer.events import IndexState

STATIC = Path(__file__).parents[3] / "services/router/baton_router/frontend/console/static"


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with watched_router(tmp_path) as running:
        yield running


async def test_decisions_are_explained(watched: Watched) -> None:
    for at in range(3):
        assert (await watched.complete(f"mine-{at}")).status_code == 200
    listed = await watched.get("/debug/decisions?limit=2")
    assert [x["id"].split("-")[2] for x in listed["decisions"]] == ["2", "1"]
    assert listed["seen"] == 3
    assert [x["outcome"] for x in (await watched.get("/debug/decisions?id=mine-1"))["decisions"]] == ["done"]
    told = await watched.get("/debug/decisions/mine-1")
    assert told == await watched.get(f"/debug/decisions/{told['id']}")
    assert (told["outcome"], told["prompt_tokens"], told["generated_tokens"]) == ("done", len(PROMPT), 3)
    (placement,) = told["placements"]
    rows = {x["instance"]: x for x in placement["candidates"]}
    assert set(rows) == {"p0", "d0", "d1"}
    assert rows["p0"]["winner"]
    assert sum(x["winner"] for x in rows.values()) == 2
    assert all(sum(x["terms"].values()) == pytest.approx(x["score"]) for x in rows.values())
    assert told["trace"]["decode"] == told["decode"]
    assert told["why"]
    missing = await watched.http.get("/debug/decisions/nobody")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "request_id")


async def test_a_stream_that_moved_shows_both_placements(watched: Watched) -> None:
    for worker in watched.workers[1:]:
        worker.state.pause_after = 2
    running = asyncio.create_task(watched.complete("moving", max_tokens=6))
    decodes = watched.workers[1:]
    await watched.until(lambda: any(worker.state.running for worker in decodes))
    first = next(worker for worker in decodes if worker.state.running)
    (seen,) = (await watched.get("/debug/decisions?id=moving"))["decisions"]
    assert (seen["outcome"], seen["decode"]) == ("running", first.instance_id)
    await watched.until(lambda: watched.app.processor.decisions.find("moving")[0].clock.generated == 2)  # type: ignore[union-attr]
    for worker in decodes:
        worker.state.pause_after = None
    await first.stop()
    assert (await running).status_code == 200
    told = await watched.get("/debug/decisions/moving")
    assert [x["decode"] for x in told["placements"]] == [first.instance_id, told["decode"]]
    assert (told["outcome"], told["migrations"], told["generated_tokens"]) == ("done", 1, 6)
    assert any("placed again" in line for line in told["why"])


async def test_an_answer_is_found_by_its_own_id_beside_that_of_the_client(watched: Watched) -> None:
    await watched.complete("other")
    body = {"prompt": [1, 2, 3], "max_tokens": 3, "request_id": "mine"}
    answer = await watched.http.post("/v1/completions", json=body, headers={"x-request-id": "header"})
    told = [
        await watched.get(f"/debug/decisions/{name}")
        for name in ("mine", answer.json()["id"], answer.headers["x-request-id"])
    ]
    assert told[0]["id"].startswith("mine-")
    assert [each["id"] for each in told] == [told[0]["id"]] * 3


async def test_what_was_refused_is_remembered_too(watched: Watched) -> None:
    for worker in watched.workers[1:]:
        await worker.stop()
    await watched.until(lambda: not watched.app.is_ready())
    assert (await watched.complete("early")).status_code == 503
    told = await watched.get("/debug/decisions/early")
    assert (told["outcome"], told["decode"], told["placements"]) == ("unavailable", None, [])
    assert told["why"] == ["it was never placed: unavailable"]


async def test_index_tells_how_far_it_can_be_trusted(watched: Watched) -> None:
    await watched.complete("one")
    decode = next(x for x in watched.workers[1:] if x.state.requests)
    instance = next(x for x in watched.app.registry.instances() if x.instance_id == decode.instance_id)
    await watched.until(lambda: instance.events.num_blocks == 2)
    seen = await watched.get("/debug/index")
    rows = {x["instance"]: x for x in seen["instances"]}
    assert set(rows) == {"p0", "d0", "d1"}
    row = rows[decode.instance_id]
    assert (row["state"], row["blocks"], row["age_s"]) == ("exact", 2, 0)
    assert row["epoch"] == decode.epoch.hex()
    assert (row["tiers"], row["decided_prompts"]) == (["device"], 0)
    assert row["sequence"] == decode.state.event_position
    assert seen["groups"][row["group"]] == {"block_size": 4, "instances": ["p0", "d0", "d1"]}
    await decode.stop()
    await watched.until(lambda: instance.events.state is IndexState.STALE)
    row = {x["instance"]: x for x in (await watched.get("/debug/index"))["instances"]}[decode.instance_id]
    assert (row["state"], row["status"]) == ("stale", "down")
    assert row["age_s"] > 0


async def test_nothing_secret_is_shown(watched: Watched) -> None:
    await watched.complete("quiet")
    texts = [
        (await watched.http.get(path)).text
        for path in ("/debug/decisions", "/debug/decisions/quiet", "/debug/index", "/debug/console")
    ]
    for text in texts:
        assert "quiet" in text or "epoch" in text
        assert SALT not in text
        assert KEY not in text
        assert not re.search(r"\b70[1-8], ?70[1-8]\b", text), "token ids of the prompt"


@pytest.mark.parametrize("path", ["/debug/decisions", "/debug/decisions/one", "/debug/index", "/debug/console"])
async def test_data_want_a_key(watched: Watched, path: str) -> None:
    await watched.complete("one")
    async with httpx.AsyncClient(base_url=watched.url, timeout=240) as stranger:
        assert (await stranger.get(path)).status_code == 401
    answer = await watched.http.get(path)
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("limit", ["0", "501", "-1", "x", "1e2", "9" * 40])
async def test_limits_are_checked(watched: Watched, limit: str) -> None:
    answer = await watched.http.get("/debug/decisions", params={"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_the_page_is_open_and_strict(watched: Watched) -> None:
    async with httpx.AsyncClient(base_url=watched.url, timeout=240) as stranger:
        root = await stranger.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert (root.status_code, root.headers["location"]) == (307, "console")
        for accept in ("application/json", "*/*"):
            answer = await stranger.get("/", headers={"accept": accept})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        page = await stranger.get("/console")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert named
        for name in named:
            answer = await stranger.get(f"/{name}")
            assert answer.status_code == 200, name
            again = await stranger.get(f"/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for name in ("nope.js", "..%2fconsole.py", "%2e%2e/console.py", "__init__.py"):
            assert (await stranger.get(f"/console/{name}")).status_code in {401, 404}, name
        assert (await stranger.head("/console")).content == b""
        assert (await stranger.post("/console")).status_code == 405


def test_the_page_asks_nobody_else() -> None:
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|innerHTML|\beval\b|style=", text), file.name


async def test_viewers_share_a_snapshot(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_router.frontend.console.console._LEAST_AGE_S", 3600.0)  # longer than eight answers take
    await watched.complete("one")
    answers = await asyncio.gather(*(watched.http.get("/debug/console") for _ in range(8)))
    assert len({answer.content for answer in answers}) == 1
    seen = answers[0].json()
    assert {x["id"] for x in seen["instances"]} == {"p0", "d0", "d1"}
    assert seen["decisions"][0]["id"].startswith("cmpl-one-")
    assert seen["flows"]["items"][0]["target"] in {"d0", "d1"}


async def test_metrics_have_every_term(watched: Watched) -> None:
    await watched.complete("one")
    text = (await watched.http.get("/metrics")).text
    for role, term in (("decode", "match"), ("prefill", "load"), ("pair", "score"), ("pair", "match")):
        assert f'baton_router_decision_term_bucket{{le="+Inf",role="{role}",term="{term}"}} 1.0' in text
    assert 'baton_http_requests_total{endpoint="/debug/index"' not in text
    await watched.get("/debug/index")
    assert 'baton_http_requests_total{endpoint="/debug/index"' in (await watched.http.get("/metrics")).text


async def test_explain_command(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    assert await watched.explain() == 1
    assert "--api-key-file" in capsys.readouterr().err
    key = ("--api-key-file", watched.key_file)
    assert await watched.explain(*key) == 0
    assert capsys.readouterr().out == "no requests yet\n"
    await watched.complete("odd")
    await watched.complete("two")
    assert await watched.explain(*key) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["request", "cmpl-two", "cmpl-odd"]
    assert await watched.explain(*key, "--limit", "1") == 0
    assert "cmpl-odd" not in capsys.readouterr().out
    assert await watched.explain("two", *key) == 0
    text = capsys.readouterr().out
    for part in ("cmpl-two-", "chosen", "= pair score", "d0", "d1", "p0", "match", "TTFT"):
        assert part in text
    assert await watched.explain("two", "--json", *key) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "done"
    assert await watched.explain("nobody", *key) == 1
    assert "nobody" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--url", "ftp://x"], 2, "--url"),
        (["--limit", "0"], 2, "--limit"),
        (["--timeout-s", "0"], 2, "--timeout-s"),
        (["--api-key-file", "/nowhere"], 2, "/nowhere"),
        (["--url", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
    ],
)
def test_explain_says_what_is_wrong(
    args: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *args]) == status
    assert said in capsys.readouterr().err


async def test_explain_obeys_no_control_characters(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "request_id": "evil\x1b[31m"}
    assert (await watched.http.post("/v1/completions", json=body)).status_code == 400
    assert (await watched.http.post("/v1/completions", json={**body, "request_id": "evil"})).status_code == 200
    (record,) = watched.app.processor.decisions.find("evil")
    record.request_id = record.request_id.replace(
        "evil", "evil\x1b[31m"
    )  # as another version of the router might let it in
    assert await watched.explain("--api-key-file", watched.key_file) == 0
    assert await watched.explain("evil\x1b[31m", "--api-key-file", watched.key_file) == 0
    assert "\x1b" not in capsys.readouterr().out


async def test_an_instance_that_leaves_while_caches_are_reset_is_named(watched: Watched) -> None:
    """Its lease runs out, say: the router closes its channel, and gRPC ends the call like a cancelled one."""
    leaving = watched.workers[1]
    leaving.state.hold_resets = True
    running = asyncio.create_task(watched.http.post("/reset_prefix_cache", headers={"authorization": f"Bearer {KEY}"}))
    await leaving.wait_until(lambda: leaving.state.resetting > 0)
    instances = {instance.instance_id: instance for instance in watched.app.registry.instances()}
    await instances[leaving.instance_id].close()
    answer = await running
    assert answer.status_code == 503, answer.text
    assert leaving.address in answer.json()["error"]["message"]
