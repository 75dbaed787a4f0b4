"""The scheduler on a fake model whose every token depends on the whole content of its cache row.

A wrong move, share or retraction therefore changes the output, and the fake also checks that what
lies in a row is what the request says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_inference.decode.request import Request, SamplingParams
from areal_inference.decode.scheduler import Scheduler


def next_token(version: str, sequence: Sequence[int]) -> int:
    """The fake model: deterministic in the weights and the whole sequence."""
    return random.Random(f"{version} {list(sequence)}").randrange(50)


class FakeRunner:
    """A cache of token lists; weights are a string."""

    def __init__(self, max_total: int = 10**9):
        self.max_total = max_total
        self.rows: list[list[tuple[str, int]]] = []
        self.weights = "v0"
        self.prefilled = 0
        self.poison = False

    def fits(self, rows: int, length: int) -> bool:
        return rows == 1 or rows * length <= self.max_total

    def reserve(self, rows: int, length: int) -> None:
        assert self.fits(rows, length)
        self.rows.extend([] for _ in range(rows - len(self.rows)))

    def prefill(self, requests: Sequence[Request]) -> None:
        for request in requests:
            tokens = (request.input_ids + request.output_ids)[:-1]
            self.rows[request.row] = [(self.weights, token) for token in tokens]
            self.prefilled += len(tokens)

    def share(self, source: int, targets: list[int], length: int) -> None:
        for target in targets:
            self.rows[target] = self.rows[source][:length]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source][:length]

    def decode(self, requests: Sequence[Request], *, changed: bool):
        identity = [id(r) for r in requests]
        assert changed or identity == self._last, "a changed batch was not announced"
        self._last = identity
        tokens = []
        for index, request in enumerate(requests):
            sequence = request.input_ids + request.output_ids
            assert request.row == index
            row = self.rows[index]
            assert [token for _, token in row[: len(sequence) - 1]] == sequence[:-1]
            self.rows[index] = [*row[: len(sequence) - 1], (self.weights, sequence[-1])]
            tokens.append(next_token(self.weights, sequence))
        logprob = float("nan") if self.poison else -0.5
        return tokens, [logprob] * len(tokens)

    def clear(self, row: int) -> None:
        self.rows[row] = []

    def load(self, weights: str) -> None:
        self.weights = weights

    def reset(self) -> None:
        self.rows = []


def make(*, max_running: int = 4, max_prefill_tokens: int = 64, max_total: int = 10**9):
    runner = FakeRunner(max_total)
    scheduler = Scheduler(
        runner,
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        weight_version="v0",
    )
    return scheduler, runner


def request(rid: str, prompt: Sequence[int], new: int = 5, **values) -> Request:
    params = SamplingParams(max_new_tokens=new, **values.pop("params", {}))
    return Request(rid=rid, input_ids=list(prompt), params=params, **values)


def drain(scheduler: Scheduler, limit: int = 10_000) -> None:
    for _ in range(limit):
        if not scheduler.can_step:
            return
        scheduler.step()
    raise AssertionError("the scheduler makes no progress")


def alone(prompt: Sequence[int], count: int, version: str = "v0") -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(version, sequence))
    return sequence[len(prompt) :]


def test_step_when_more_requests_than_rows_then_all_finish_as_if_alone():
    scheduler, _ = make(max_running=3)
    requests = [request(f"r{i}", range(i + 1), new=1 + i % 4) for i in range(20)]
    for item in requests:
        scheduler.submit(item)
    drain(scheduler)
    for item in requests:
        assert item.output_ids == alone(item.input_ids, len(item.output_ids))
        assert item.finish == {"type": "length", "length": item.params.max_new_tokens}
        assert item.spans == [("v0", 0)]
    assert set(scheduler.take_news()) == set(requests)


def test_step_when_stop_token_is_drawn_then_it_is_kept_and_matched():
    scheduler, _ = make()
    expected = alone([3, 4], 5)
    stop = expected[2]
    item = request("r", [3, 4], params={"stop_ids": frozenset({stop})})
    scheduler.submit(item)
    drain(scheduler)
    assert item.output_ids == expected[: expected.index(stop) + 1]
    assert item.finish == {"type": "stop", "matched": stop}


def test_admit_when_prompts_are_equal_then_prefilled_once():
    scheduler, runner = make(max_running=8)
    prompt = list(range(10))
    group = [request(f"r{i}", prompt, extra_key="7") for i in range(4)]
    other_key = request("other", prompt, extra_key="8")
    scored = request("scored", prompt, extra_key="7", logprob_start=0)
    for item in [*group, other_key, scored]:
        scheduler.submit(item)
    scheduler.step()
    assert runner.prefilled == 9 * 3
    assert [item.cached_tokens for item in group] == [0, 9, 9, 9]
    late = request("late", prompt, extra_key="7")
    scheduler.submit(late)
    scheduler.step()
    assert late.cached_tokens == 9
    drain(scheduler)
    assert late.output_ids == alone(prompt, 5)


def test_admit_when_weights_changed_then_old_prompts_are_not_shared():
    scheduler, runner = make()
    prompt = list(range(10))
    first = request("first", prompt, new=8)
    scheduler.submit(first)
    scheduler.step()
    scheduler.pause("in_place")
    scheduler.set_weights("v1", "v1")
    scheduler.resume()
    second = request("second", prompt, new=8)
    scheduler.submit(second)
    drain(scheduler)
    assert second.cached_tokens == 0
    assert second.output_ids == alone(prompt, 8, "v1")
    assert first.spans == [("v0", 0), ("v1", 1)]
    assert runner.prefilled == 18


def test_pause_when_in_place_then_cache_stays_and_new_requests_wait():
    scheduler, runner = make()
    running = request("running", [1, 2, 3])
    scheduler.submit(running)
    scheduler.step()
    scheduler.pause("in_place")
    waiting = request("waiting", [4])
    scheduler.submit(waiting)
    assert not scheduler.can_step
    assert not scheduler.flush()
    scheduler.resume()
    drain(scheduler)
    assert runner.prefilled == 2
    assert running.num_retractions == 0
    assert running.output_ids == alone([1, 2, 3], 5)
    assert waiting.output_ids == alone([4], 5)


def test_pause_when_retract_then_prompt_and_output_are_computed_again():
    scheduler, runner = make()
    items = [request(f"r{i}", range(1, 4 + i), new=6) for i in range(3)]
    for item in items:
        scheduler.submit(item)
    scheduler.step()
    scheduler.step()
    scheduler.pause("retract")
    assert [r.rid for r in scheduler.waiting] == ["r0", "r1", "r2"]
    assert scheduler.flush()
    before = runner.prefilled
    scheduler.set_weights("v1", "v1")
    scheduler.resume()
    drain(scheduler)
    assert runner.prefilled - before == sum(len(item.input_ids) + 1 for item in items)
    for item in items:
        head = alone(item.input_ids, 2)
        assert item.output_ids == head + alone(item.input_ids + head, 4, "v1")
        assert item.spans == [("v0", 0), ("v1", 2)]
        assert item.num_retractions == 1


def test_pause_when_abort_then_all_end_with_what_they_have():
    scheduler, _ = make(max_running=1)
    running, waiting = request("running", [1]), request("waiting", [2])
    for item in (running, waiting):
        scheduler.submit(item)
    scheduler.step()
    scheduler.pause("abort")
    for item, count in ((running, 1), (waiting, 0)):
        assert item.finish is not None
        assert item.finish["type"] == "abort"
        assert len(item.output_ids) == count
    assert not scheduler.running
    assert not scheduler.waiting


def test_abort_when_a_row_in_the_middle_goes_then_the_others_are_untouched():
    scheduler, _ = make()
    items = [request(f"r{i}", range(1, 3 + i), new=6) for i in range(4)]
    for item in items:
        scheduler.submit(item)
    scheduler.step()
    assert scheduler.abort({"r1", "unknown"}, "Aborted") == 1
    drain(scheduler)
    assert len(items[1].output_ids) == 1
    for item in (items[0], items[2], items[3]):
        assert item.output_ids == alone(item.input_ids, 6)


def test_gate_when_closed_then_only_earlier_requests_run_until_opened():
    scheduler, _ = make(max_running=1)
    early = [request("a", [1], new=2), request("b", [2], new=2)]
    for item in early:
        scheduler.submit(item)
    scheduler.close_gate()
    late = request("late", [3], new=2)
    scheduler.submit(late)
    assert not scheduler.quiet
    drain(scheduler)
    assert scheduler.quiet
    assert [item.finish is not None for item in (*early, late)] == [True, True, False]
    scheduler.set_weights("v1", "v1")
    scheduler.open_gate()
    drain(scheduler)
    assert late.output_ids == alone([3], 2, "v1")


def test_step_when_cache_is_full_then_the_last_one_waits_and_still_finishes():
    scheduler, _ = make(max_running=4, max_total=120)
    items = [request(f"r{i}", [i], new=100) for i in range(4)]
    for item in items:
        scheduler.submit(item)
    drain(scheduler)
    assert scheduler.stats.retracted > 0
    for item in items:
        assert item.output_ids == alone(item.input_ids, 100)


def test_step_when_logits_are_not_finite_then_aborted_with_partial_output():
    scheduler, runner = make()
    item = request("r", [1, 2])
    scheduler.submit(item)
    scheduler.step()
    runner.poison = True
    scheduler.step()
    assert item.finish is not None
    assert item.finish["message"] == "non-finite logits at version v0"
    assert item.output_ids == alone([1, 2], 1)
    assert runner.rows[0] == []


def test_news_when_streaming_then_one_per_token():
    scheduler, _ = make()
    scheduler.submit(request("quiet", [1], new=3))
    streamed = request("loud", [2], new=3, stream=True)
    scheduler.submit(streamed)
    news = []
    while scheduler.can_step:
        scheduler.step()
        news.append([r.rid for r in scheduler.take_news()])
    assert news == [["loud"], ["loud"], ["quiet", "loud"]]


def test_stats_when_paused_then_pause_time_is_counted_and_busy_time_is_not():
    now = [0.0]
    scheduler = Scheduler(
        FakeRunner(), max_running=1, max_prefill_tokens=8, weight_version="v0", clock=lambda: now[0]
    )
    scheduler.submit(request("r", [1]))
    scheduler.pause("in_place")
    now[0] = 3.0
    assert scheduler.pause_seconds == pytest.approx(3.0)
    scheduler.step()
    scheduler.resume()
    now[0] = 5.0
    assert scheduler.pause_seconds == pytest.approx(3.0)
    assert scheduler.stats.busy_seconds == 0.0


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("update"), st.sampled_from(["in_place", "retract"]), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
    ),
    max_size=40,
)


@given(actions=ACTIONS, max_running=st.integers(1, 5), max_total=st.integers(60, 200))
@settings(max_examples=150, deadline=None)
def test_output_when_anything_interleaves_then_every_token_is_of_its_version(
    actions, max_running: int, max_total: int
):
    """Random submits, steps, updates and aborts: each token follows from its span's weights."""
    scheduler, _ = make(max_running=max_running, max_prefill_tokens=9, max_total=max_total)
    prompts = [[1, 2, 3, 4], [1, 2], [9], [5, 6, 7, 8, 9, 10, 11, 12]]
    everything: list[Request] = []
    version = 0
    for action, first, second in actions:
        if action == "submit":
            everything.append(request(f"r{len(everything)}", prompts[first], new=second))
            scheduler.submit(everything[-1])
        elif action == "step":
            for _ in range(first):
                scheduler.step()
        elif action == "update":
            version += 1
            scheduler.pause(first)
            scheduler.set_weights(f"v{version}", f"v{version}")
            scheduler.resume()
        else:
            scheduler.abort({f"r{first}"}, "Aborted")
    drain(scheduler)
    for item in everything:
        assert item.finish is not None
        if item.finish["type"] != "abort":
            assert len(item.output_ids) == item.params.max_new_tokens
        starts = [start for _, start in item.spans] + [len(item.output_ids)]
        sequence = list(item.input_ids)
        for (name, start), end in zip(item.spans, starts[1:], strict=True):
            assert start < end
            for _ in range(start, end):
                sequence.append(next_token(name, sequence))
        assert sequence[len(item.input_ids) :] == item.output_ids
