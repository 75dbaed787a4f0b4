"""Every JSON value in every kind of field: the value, or one line that names what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import InvalidInput
from areal.request_fields import (
    OutOfRange,
    WrongKind,
    body_of,
    get,
    need,
    number,
    shown,
    texts_by_name,
    whole,
)
from areal_inference.api import Limits, parse_generate
from areal_sandbox.e2b import connect

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**300, -(10**4000), 2**63, -1, 0])
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "\n\x00", "x" * 10_000])
)
JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


Reader = Callable[[dict[str, Any]], Any]
READERS: dict[str, tuple[Reader, tuple[type, ...], str]] = {
    **{
        f"{read.__name__} {kind.__name__}": (
            lambda body, read=read, kind=kind: read(body, "f", kind),
            (kind,),
            said,
        )
        for read in (get, need, connect.field)
        for kind, said in {
            str: "a string",
            int: "a whole number",
            bool: "true or false",
            list: "a list",
            dict: "an object",
        }.items()
    },
    "whole": (lambda body: whole(body, "f", 1, 64), (int,), "(a whole number|1 to 64)"),
    "number": (lambda body: number(body, "f"), (float,), "(a number|-1e\\+09 to 1e\\+09)"),
    "texts": (lambda body: texts_by_name(body, "f"), (dict,), "(a string|an object)"),
    "seconds": (lambda body: connect.seconds(body["f"], "f"), (float,), "a number of seconds"),
}


def refused(read: Callable[[], Any]) -> tuple[Any, str]:
    """What was read, or the line of the error; any other exception is the test's failure."""
    try:
        return read(), ""
    except InvalidInput as error:
        return None, str(error)


def check(name: str, value: Any) -> None:
    read, kinds, said = READERS[name]
    found, line = refused(lambda: read({"f": value}))
    if line:
        assert re.fullmatch(rf"f(\[.*\])?: expected {said}, got .+", line), line
        assert len(line) < 400
    elif found is None:
        assert value is None
    else:
        assert isinstance(found, kinds)
        assert type(found) is bool or not isinstance(found, bool)


@pytest.mark.parametrize("name", READERS)
@given(value=JSON)
def test_field_when_any_value_comes_then_it_or_one_line_with_name_and_what_was_expected(
    name: str, value: Any
) -> None:
    check(name, value)


# Values that Python itself cannot write.
UNWRITABLE = {
    "digits": 10**5000,
    "inside": [10**5000],
    "deep": nested(5000),
    "deep in an object": {"a": nested(5000)},
}


@pytest.mark.parametrize("value", UNWRITABLE.values(), ids=UNWRITABLE)
@pytest.mark.parametrize("name", READERS)
def test_field_when_its_value_cannot_be_written_then_still_one_line(name: str, value: Any) -> None:
    check(name, value)


@given(content=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_body_when_any_bytes_come_then_an_object_or_one_line(content: bytes) -> None:
    found, line = refused(lambda: body_of(content))
    assert isinstance(found, dict) or line.startswith("body: ")


PARAMETERS = ["max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "sampling_seed", "n"]
PARAMETERS += ["stop_token_ids", "min_new_tokens", "stream_interval", "skip_special_tokens"]
FIELDS = ["return_logprob", "stream", "logprob_start_len", "top_logprobs_num", "rid", "text"]
FIELDS += ["input_ids", "sampling_params", "extra_key", "return_text_in_logprobs"]


def check_generate(name: str, value: Any) -> None:
    limits = Limits(
        vocab_size=100, context_length=64, max_total_tokens=64, eos_token_ids=frozenset({1})
    )
    given = {"sampling_params": {name: value}} if name in PARAMETERS else {name: value}
    body = {"input_ids": [5], "sampling_params": {}} | given
    found, line = refused(lambda: parse_generate(body, limits, None))
    if found is None:
        assert re.search(rf"{name}|body|sampling_params|token", line), line
        assert len(line) < 1000


@given(name=st.sampled_from(PARAMETERS + FIELDS), value=JSON)
def test_generate_when_a_field_has_any_value_then_requests_or_one_line(
    name: str, value: Any
) -> None:
    check_generate(name, value)


@pytest.mark.parametrize("value", UNWRITABLE.values(), ids=UNWRITABLE)
@pytest.mark.parametrize("name", PARAMETERS + FIELDS)
def test_generate_when_a_value_cannot_be_written_then_still_one_line(name: str, value: Any) -> None:
    check_generate(name, value)


def test_number_when_true_then_it_is_no_number_and_a_range_is_another_error() -> None:
    with pytest.raises(WrongKind, match="f: expected a whole number, got 'True'"):
        whole({"f": True}, "f", 1)
    with pytest.raises(OutOfRange, match="f: expected 1 or more, got 0"):
        whole({"f": 0}, "f", 1)
    with pytest.raises(WrongKind, match=r"a\.f: expected a string, got none"):
        need({}, "f", str, "a.")
    assert shown(10**5000) == "int"
