"""Trainer and servers have the GPUs in turns, and never both."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import WaitTimeout
from areal_torch.training.gpu_turn import GpuTurn
from areal_torch.training.ranks import Ranks


class Gpu:
    """Both sides; each notices when the other one is still there."""

    def __init__(self, slow: int = 0) -> None:
        self.slow = slow
        """Calls after which the servers are asleep."""
        self.asked = 0
        self.servers = True
        self.states = False
        self.before_use: Callable[[], None] = lambda: None
        self.done: list[str] = []

    def sleep(self) -> list[str]:
        self.asked += 1
        if self.asked <= self.slow:
            return ["10.0.0.7:30000"]
        self.servers = False
        self.done.append("sleep")
        return []

    def wake(self, timeout: float | None = None) -> None:
        assert not self.states, "the states are still on the GPU"
        self.servers, self.asked = True, 0
        self.done.append("wake")

    def to_host(self) -> None:
        self.states = False
        self.done.append("to_host")

    def to_device(self) -> None:
        assert not self.servers, "the servers still hold memory"
        self.states = True
        self.done.append("to_device")


def turn_of(gpu: Gpu, timeout_s: float = 60.0) -> GpuTurn:
    return GpuTurn(Ranks(0, 1), gpu, timeout_s)


def test_turn_when_a_model_is_created_and_used_then_servers_sleep_first():
    gpu = Gpu(slow=2)
    turn = turn_of(gpu)
    turn.admit(gpu)
    turn.give()
    gpu.before_use()
    gpu.before_use()
    assert gpu.done == ["sleep", "to_device", "to_host", "wake", "sleep", "to_device"]


@given(st.lists(st.sampled_from(["take", "give", "use"]), max_size=20))
def test_turn_when_it_is_taken_and_given_in_any_order_then_only_one_has_the_gpu(calls: list[str]):
    gpu = Gpu(slow=1)
    turn = turn_of(gpu)
    turn.admit(gpu)
    for call in calls:
        gpu.before_use() if call == "use" else getattr(turn, call)()
        assert gpu.states != gpu.servers
        assert gpu.servers == (call == "give")
    changes = [name for name in gpu.done if name in ("sleep", "wake")]
    assert all(a != b for a, b in itertools.pairwise(changes)), "each once, in turn"


def test_turn_when_gpus_are_not_shared_then_no_one_is_asked_and_nothing_moves():
    gpu, turn = Gpu(), GpuTurn(Ranks(0, 1), None, 60.0)
    assert not turn.shared
    turn.admit(gpu)
    turn.take()
    turn.give()
    assert gpu.done == []


def test_turn_when_a_server_never_sleeps_then_it_is_named_and_the_states_stay_in_host_memory():
    gpu = Gpu(slow=10**9)
    turn = turn_of(gpu, timeout_s=0.0)
    with pytest.raises(WaitTimeout, match=r"memory of the GPU.*10\.0\.0\.7:30000") as refused:
        turn.admit(gpu)
    assert "\n" not in str(refused.value)
    assert not gpu.states
    gpu.slow = 0
    turn.take()
    assert gpu.states
