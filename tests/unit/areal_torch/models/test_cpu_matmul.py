"""How matrices of a bfloat16 model are kept on a CPU, from measured rates."""

from pathlib import Path

import pytest
import torch

from areal_torch.models import cpu_matmul
from areal_torch.models.cpu_matmul import FLOAT32, Storage, choose, measure, room_for_weights

BY_OUT, BY_IN = Storage(torch.bfloat16, transposed=True), Storage(torch.bfloat16)
GIB = 1024**3


def rates(by_out: float, by_in: float, float32: float) -> dict[Storage, float]:
    return {BY_OUT: by_out, BY_IN: by_in, FLOAT32: float32}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        pytest.param(rates(17, 0.65, 31), FLOAT32, id="AVX2"),
        pytest.param(rates(55, 53, 34), BY_OUT, id="AVX-512 with bfloat16"),
        pytest.param(rates(20, 0.5, 22), BY_OUT, id="float32 hardly faster"),
        pytest.param(rates(20, 40, 22), BY_IN, id="the order of today is faster"),
    ],
)
def test_choice_when_rates_are_known_then_the_fast_way_with_its_reason(measured, expected):
    choice = choose(measured, 135_000_000, 16 * GIB)
    assert choice.storage == expected
    assert "\n" not in choice.why
    for way, rate in measured.items():
        assert f"{way} {rate:.2g}" in choice.why
    assert ("0.50 GiB, twice that of 16 bits" in choice.why) == (expected == FLOAT32)


def test_choice_when_float32_does_not_fit_then_16_bits_and_it_says_so():
    choice = choose(rates(17, 0.65, 31), 7_000_000_000, 16 * GIB)
    assert choice.storage == BY_OUT
    assert "two sets of weights would take 52.2 GiB, expected at most 16.0" in choice.why


def test_measure_when_run_then_a_rate_for_each_way_and_the_threads_are_as_before():
    before = torch.get_num_threads()
    found = measure()
    assert list(found) == [BY_OUT, BY_IN, FLOAT32]
    assert all(rate > 0 for rate in found.values())
    assert torch.get_num_threads() == before


def test_measure_when_a_way_is_hopeless_then_it_is_timed_only_once(monkeypatch):
    """A slow product must not delay the start of a server again and again."""
    clock, calls = [0.0], []
    product = torch.mm

    def mm(left: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        slow = matrix.dtype == torch.bfloat16 and matrix.is_contiguous()
        calls.append(slow)
        clock[0] += 1.0 if slow else 0.01
        return product(left, matrix)

    monkeypatch.setattr(cpu_matmul.torch, "mm", mm)
    monkeypatch.setattr(cpu_matmul.time, "perf_counter", lambda: clock[0])
    found = measure()
    assert found[BY_IN] == pytest.approx(found[FLOAT32] / 100)
    assert calls.count(True) == 3  # each batch size once


@pytest.mark.parametrize(("storage", "strides"), [(BY_OUT, (1, 3)), (BY_IN, (5, 1))])
def test_matrix_when_allocated_then_its_shape_is_the_same_and_its_order_is_the_one_asked_for(
    storage, strides
):
    matrix = storage.matrix(3, 5)
    assert matrix.shape == (3, 5)
    assert matrix.stride() == strides


def test_room_when_a_container_has_a_limit_then_half_of_that(tmp_path: Path):
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    assert room_for_weights(limit) == 500_000
    limit.write_text("max\n")
    assert room_for_weights(limit) == room_for_weights(tmp_path / "none") > 500_000
