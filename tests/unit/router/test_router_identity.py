"""Which instances a router takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.fake_worker import FINGERPRINT

from baton.errors import BatonError, ConfigError
from baton.tokenizer.model_files import tokenizer_digest
from baton.types import Epoch, InstanceId, Role
from baton.version import __version__, works_with
from baton_router.registry.instance import IdentityCheck, InstanceInfo


def info(role: Role = Role.DECODE, tokenizer: str = "", **fingerprint: Any) -> InstanceInfo:
    return InstanceInfo(
        instance_id=InstanceId("i"),
        role=role,
        epoch=Epoch(b"e" * 16),
        fingerprint=replace(FINGERPRINT, **fingerprint),
        num_blocks=1,
        max_model_len=2,
        model_names=("m",),
        model_path="",
        vocab_size=1,
        eos_token_ids=frozenset(),
        tokenizer_digest=tokenizer,
    )


def refused(check: IdentityCheck, who: InstanceInfo, *, first: bool = False, role: Role = Role.DECODE) -> str | None:
    with pytest.raises(BatonError) as caught:
        check.admit(who, role, first=first)
    assert caught.value.field is not None
    assert caught.value.field in caught.value.message
    return caught.value.field


def test_the_first_instance_decides_for_those_that_come_after_it() -> None:
    check = IdentityCheck()
    check.admit(info(tokenizer="a"), Role.DECODE, first=True)
    check.admit(info(block_size=8), Role.DECODE, first=False)
    check.admit(info(tokenizer=""), Role.DECODE, first=False)
    assert refused(check, info(tokenizer="b")) == "tokenizer"
    assert refused(check, info(kv_dtype="float16")) == "kv_dtype"
    assert refused(check, info(Role.PREFILL)) == "role"
    check.admit(info(tokenizer="b", kv_dtype="float16"), Role.DECODE, first=True)
    assert refused(check, info(tokenizer="b")) == "kv_dtype"


@pytest.mark.parametrize(
    ("theirs", "ours", "works"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.7", "0.1.0", True),
        ("0.2.0rc1", "0.1.9", True),
        ("0.1.0", "0.2.3", True),
        ("0.3.0", "0.1.0", False),
        ("1.1.0", "0.1.0", False),
        ("1.10.0", "1.1.0", False),
        ("nonsense", "0.1.0", False),
        ("", "0.1.0", True),
    ],
)
def test_minor_releases_next_to_each_other_speak(theirs: str, ours: str, works: bool) -> None:
    assert works_with(theirs, ours) is works


def test_a_version_that_is_too_far_away_is_refused_by_name() -> None:
    check = IdentityCheck()
    check.admit(replace(info(), version=__version__), Role.DECODE, first=True)
    assert refused(check, replace(info(), version="9.9.9")) == "version"
    assert refused(check, replace(info(), version="x" * 1000)) == "version"


def test_another_dtype_is_taken_where_somebody_converts_it() -> None:
    check, prefill, decode = IdentityCheck(), Role.PREFILL, Role.DECODE
    check.admit(info(prefill), prefill, first=True)
    assert refused(check, info(kv_dtype="bfloat16")) == "kv_dtype"
    assert refused(check, info(prefill, kv_dtype="bfloat16"), role=prefill) == "kv_dtype"
    check.admit(info(kv_dtype="bfloat16", kv_cast=True), decode, first=False)
    assert refused(check, info(kv_dtype="bfloat16")) == "kv_dtype"  # no prefill instance has KV for it
    check.admit(info(prefill, kv_dtype="bfloat16"), prefill, first=False)  # now somebody takes it
    check.admit(info(kv_dtype="bfloat16"), decode, first=False)
    assert refused(check, info(kv_dtype="bfloat16", kv_cast=True, rope="x")) == "rope"
    assert refused(check, info(kv_dtype="float16")) == "kv_dtype"


def test_a_prefill_instance_that_converts_needs_somebody_who_takes_what_it_may_have_converted() -> None:
    check, prefill = IdentityCheck(), Role.PREFILL
    check.admit(info(), Role.DECODE, first=True)
    assert refused(check, info(prefill, kv_cast=True), role=prefill) == "kv_cast"
    check.admit(info(kv_cast=True), Role.DECODE, first=False)
    check.admit(info(prefill, kv_cast=True), prefill, first=False)


def test_who_converts_is_forgotten_with_the_last_instance() -> None:
    check = IdentityCheck()
    check.admit(info(kv_cast=True), Role.DECODE, first=True)
    check.admit(info(), Role.DECODE, first=True)
    assert refused(check, info(kv_dtype="float16")) == "kv_dtype"


@pytest.mark.parametrize("first", [True, False])
def test_what_does_not_fit_the_router_is_refused_also_alone(first: bool) -> None:
    check = IdentityCheck("mine", block_size=16)
    for _ in range(2):  # who was refused decides nothing
        assert refused(check, info(tokenizer="mine", block_size=16, hash_scheme="other"), first=first) == "hash_scheme"
        assert refused(check, info(tokenizer="mine", block_size=4), first=first) == "block_size"
        assert refused(check, info(tokenizer="theirs", block_size=16), first=first) == "tokenizer"
    check.admit(info(tokenizer="mine", block_size=16), Role.DECODE, first=first)


def test_no_block_has_no_tokens() -> None:
    assert refused(IdentityCheck(), info(block_size=0), first=True) == "block_size"


@pytest.mark.parametrize(
    "wrong",
    [
        {"instance_id": InstanceId("")},
        {"instance_id": InstanceId("a\n} 5")},
        {"instance_id": InstanceId("n" * 257)},
        {"epoch": Epoch(b"short")},
        {"num_blocks": 0},
        {"max_model_len": 1},
        {"vocab_size": 0},
        {"model_names": ("m", "x\x1b[31m")},
        {"model_names": tuple(map(str, range(1000)))},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
@pytest.mark.parametrize("first", [True, False])
def test_an_instance_that_can_serve_nothing_is_refused(wrong: dict[str, Any], first: bool) -> None:
    """Else one broken instance decides what the router promises: every prompt would be too long, for example."""
    check = IdentityCheck()
    check.admit(info(), Role.DECODE, first=True)
    assert refused(check, replace(info(), **wrong), first=first) == next(iter(wrong))


def test_a_tokenizers_digest_is_of_what_decides_its_ids(tmp_path: Path) -> None:
    def written(**content: Any) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return tokenizer_digest(tmp_path)

    assert tokenizer_digest(tmp_path) == ""
    assert tokenizer_digest("org/name") == ""
    plain = written(model={"vocab": {"a": 0}, "merges": ["a b"]})
    assert len(plain) == 64
    assert written(model={"merges": [["a", "b"]], "vocab": {"a": 0}}, truncation={"max_length": 5}) == plain
    assert written(model={"vocab": {"a": 1}, "merges": ["a b"]}) != plain
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError):
        tokenizer_digest(tmp_path)
