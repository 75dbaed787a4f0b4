"""What is read of the experts that a server chose: nothing that it says does any harm."""

import base64
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.model_directory import RouteShape
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal_rollout.generation import routes
from areal_rollout.generation.routes import RouteReader

SHAPE = RouteShape(3, 2, 8)
ROWS = 4


def response(known=0):
    answer = LLMResponse([1, 2, 3], [4, 5], [0.0, 0.0], [0, 0], StopReason.LENGTH)
    if known:
        answer.routed_experts = np.full((known, 3, 2), 7, dtype=np.uint8)
    return answer


def said(value):
    return {"meta_info": {"routed_experts": value}}


def encoded(array, dtype="<i4"):
    return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()


def read(value, known=0, start=0, shape=SHAPE):
    answer = response(known)
    RouteReader(shape).add(answer, said(value), start)
    return answer.routed_experts


@given(
    st.none()
    | st.text(max_size=140)
    | st.binary(max_size=100).map(lambda data: base64.b64encode(data).decode())
    | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=24, max_size=24).map(encoded)
    | st.integers()
    | st.lists(st.integers())
    | st.dictionaries(st.text(), st.integers())
)
def test_routes_when_a_server_says_anything_then_they_are_whole_or_none(value):
    found = read(value)
    assert found is None or (found.shape == (ROWS, 3, 2) and found.max() < 8)


@pytest.mark.parametrize("worst", [-1, 8, 2**31 - 1])
def test_routes_when_an_expert_does_not_exist_then_there_are_none(worst):
    good = np.zeros((ROWS, 3, 2), int)
    assert read(encoded(good)) is not None
    good[2, 1, 1] = worst
    assert read(encoded(good)) is None


@pytest.mark.parametrize("known", range(4))
def test_routes_when_some_are_known_then_only_what_follows_is_added(known):
    more = np.arange(24).reshape(ROWS, 3, 2) % 7
    for start in range(known + 1):
        found = read(encoded(more[start:]), known, start)
        assert len(found) == ROWS
        assert (found[:known] == 7).all()
        np.testing.assert_array_equal(found[known:], np.sort(more[known:]))


def test_routes_when_a_server_names_the_best_expert_first_then_they_are_sorted():
    said_order = np.random.default_rng(0).random((ROWS, 3, 8)).argsort(-1)[..., :2]
    assert (np.diff(said_order) < 0).any()
    np.testing.assert_array_equal(read(encoded(said_order)), np.sort(said_order))


def test_routes_when_there_are_more_than_256_experts_then_each_has_two_bytes():
    found = read(encoded(np.full((ROWS, 3, 2), 300)), shape=RouteShape(3, 2, 512))
    assert found.dtype == np.uint16
    assert (found == 300).all()


def test_start_when_answers_have_different_routes_then_it_is_the_first_that_one_lacks():
    request = LLMRequest([1, 2, 3], GenerationHyperparameters())
    reader = RouteReader(SHAPE)
    assert reader.ask(request, [response(4), response(2)], 9).start == 2
    assert reader.ask(request, [response(4), response()], 9).start == 0


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 8}, SHAPE),
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_routed_experts": 8}, SHAPE),
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_local_experts": 8}, SHAPE),
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2}, None),
        ({"num_hidden_layers": 3, "num_experts": 0, "num_experts_per_tok": 2}, None),
        ({"num_hidden_layers": 3}, None),
        ({}, None),
        ({"num_hidden_layers": "3", "num_experts_per_tok": 2, "num_experts": 8}, None),
        ({"num_hidden_layers": 3, "num_experts_per_tok": -2, "num_experts": 8}, None),
        ({"num_hidden_layers": 3, "num_experts_per_tok": True, "num_experts": 8}, None),
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 1 << 20}, None),
    ],
)
def test_shape_when_a_config_is_read_then_only_a_mixture_of_experts_has_one(config, shape):
    assert RouteShape.of(config) == shape


def test_shape_when_a_folder_has_no_config_then_there_is_none(tmp_path):
    assert RouteShape.of_folder(tmp_path) is None


@given(st.binary(max_size=100))
def test_base64_when_it_is_read_in_parts_then_the_bytes_are_the_same(data):
    with mock.patch.object(routes, "_PART", 8):
        assert routes._data_of(base64.b64encode(data).decode()) == data


def test_base64_when_a_part_is_malformed_then_there_are_no_routes():
    good = encoded(np.zeros((ROWS, 3, 2), int))
    with mock.patch.object(routes, "_PART", 8):
        assert read(good) is not None
        for start in range(0, len(good), 4):
            for bad in ("AA==", "A=AA", "!AAA", "ÿAAA"):
                assert read(good[:start] + bad + good[start + 4 :]) is None
