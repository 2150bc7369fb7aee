"""An administrator has the instances' prefix caches dropped, through the router, while requests run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.handover import test_role_change
from tests.integration.handover.test_role_change import TINY, Fleet, prompt

from baton.kv_cache.block_pool import BlockPool

fleet = test_role_change.fleet


def pools(fleet: Fleet) -> list[BlockPool]:
    return [instance.context.engine.core._pool for instance in fleet.instances]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_what_no_request_uses_is_dropped_everywhere_and_the_index_knows(fleet: Fleet, path: str) -> None:
    ids, many = prompt(0), {"max_tokens": 100, "ignore_eos": True}
    alone, _ = await fleet.complete(ids, **many)
    # Where it was computed the router is sure to know once it was told of all its blocks.
    await fleet.until(lambda: any(x.events.num_blocks >= len(ids) // 16 for x in fleet.app.registry.instances()))
    _, again = await fleet.complete(ids)
    assert int(again["x-baton-cached-tokens"]) > 0

    body = {"prompt": ids, "temperature": 0, "return_token_ids": True, "stream": True, **many}
    async with fleet.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        events = [await anext(lines)]
        cached = sum(pool.num_cached for pool in pools(fleet))
        answer = await fleet.http.post(path)
        assert answer.status_code == 200, answer.text
        dropped = answer.json()["blocks"]
        assert set(dropped) == {"i0", "i1"}
        assert 0 < sum(dropped.values()) <= cached + 100
        events += [line async for line in lines]
    chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert [token for x in chunks for token in x["choices"][0].get("token_ids", ())] == alone  # its KV was left alone

    assert (await fleet.http.post(path)).status_code == 200
    assert [pool.num_cached for pool in pools(fleet)] == [0, 0]
    await fleet.until(lambda: not any(x.events.num_blocks for x in fleet.app.registry.instances()))
    tokens, afresh = await fleet.complete(ids)
    assert int(afresh["x-baton-cached-tokens"]) == 0
    assert tokens == alone[: len(tokens)]
    for instance in fleet.instances:
        await instance.context.engine.call(instance.context.engine.core.check_integrity)


async def test_a_web_page_of_another_host_drops_nothing(fleet: Fleet) -> None:
    refused = await fleet.http.post("/reset_prefix_cache", headers={"origin": "https://evil.example"})
    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"
    assert (await fleet.http.get("/reset_prefix_cache")).status_code == 405
    own = {"origin": str(fleet.http.base_url).rstrip("/")}
    assert (await fleet.http.post("/reset_prefix_cache", headers=own)).status_code == 200


async def test_the_tokenizers_configuration_is_told(fleet: Fleet) -> None:
    info = (await fleet.http.get("/tokenizer_info")).json()
    config = json.loads((Path(TINY) / "tokenizer_config.json").read_text())
    assert {**info, "chat_template": None} == {**config, "chat_template": None}
    assert "{%" in info["chat_template"]
    assert info["tokenizer_class"]


async def test_instances_that_cannot_are_named(fleet: Fleet) -> None:
    assert (await fleet.http.post("/reset_prefix_cache")).status_code == 200
    for instance in fleet.instances:
        await instance.stop(0)
    failed = await fleet.http.post("/reset_prefix_cache")
    assert failed.status_code == 503
