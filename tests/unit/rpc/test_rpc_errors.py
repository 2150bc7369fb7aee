"""One table from gRPC status to exception, in both directions."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from baton.errors import BatonError, InternalError, all_errors
from baton.rpc.errors import BY_STATUS, from_status, status_code, status_details

SDK = Path(__file__).parents[3] / "docs" / "sdk.md"


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_is_an_error_whose_own_status_it_is(code: grpc.StatusCode) -> None:
    error = from_status(code, "why")
    assert type(error) is BY_STATUS.get(code, InternalError)
    assert error.message.startswith("why")
    if code in BY_STATUS:
        assert status_code(error) is code


def test_every_error_has_a_status_of_the_table() -> None:
    for cls in all_errors().values():
        assert cls is InternalError or grpc.StatusCode[cls.grpc_status] in BY_STATUS, cls


@pytest.mark.parametrize("cls", all_errors().values())
def test_with_details_each_comes_back_as_it_was(cls: type[BatonError]) -> None:
    error = cls("why", field="where", retry_after_s=1.5)
    back = from_status(status_code(error), "other words", status_details(error))
    assert type(back) is cls
    assert (back.message, back.field, back.retry_after_s) == ("why", "where", 1.5)


def test_the_sdks_document_names_the_errors_of_the_table() -> None:
    section = SDK.read_text(encoding="utf-8").split("\n## Errors")[1]
    named = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert {cls.__name__ for cls in BY_STATUS.values()} | {"InternalError"} <= named
    assert named <= {cls.__name__ for cls in all_errors().values()}
