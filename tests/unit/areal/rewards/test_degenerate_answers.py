"""Whatever a model writes, a built-in reward returns soon; measured in CPU time, with slack."""

from __future__ import annotations

import os
import resource
import signal
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.areal.rewards.degenerate_texts import texts

from areal.rewards import math_verifier
from areal.rewards.judge_score import read_score
from areal.rewards.math import math_reward
from areal.rewards.multiple_choice import multiple_choice_reward

GOLDS = ("16", "\\frac{\\pi}{4}", "(x+1)^{40}", "1, 2", "\\{1,2\\}", "x < 3", "Evelyn", "1e-7")
# Twice the limit of one second, as clocks are coarse and a child is ended late.
LONGEST_S = 2.0
MEDIAN_S = 0.004


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.mark.process
@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "10000"]
)
def test_rewards_when_texts_are_degenerate_then_each_takes_bounded_cpu_time(count: int) -> None:
    math_reward("\\boxed{\\int_0^1 x dx}", "\\sum_{k=1}^2 k")  # fills the parser's tables
    taken = []
    for index, text in enumerate(texts(count, seed=count)):
        began = cpu_s()
        assert math_reward(text, GOLDS[index % len(GOLDS)]) in (0.0, 1.0)
        taken.append((cpu_s() - began, text))
        began = cpu_s()
        multiple_choice_reward(text, "B", ["w", "x", "y", "z"])
        with suppress(ValueError):
            assert 0 <= read_score(text, 10.0) <= 1
        taken.append((cpu_s() - began, text))
    longest, text = max(taken)
    median = statistics.median(each for each, _ in taken)
    print(
        f"{count} texts: median {median * 1e3:.2f} ms, longest {longest * 1e3:.0f} ms of CPU time"
    )
    assert longest < LONGEST_S, text[:200]
    assert median < MEDIAN_S


COSTLY = (
    "9^{9^{9^{9}}}",
    "\\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}",
    "((((9!)!)!)!)!",
    ", ".join(["\\sum_{k=1}^{99999} k^{-k}"] * 8),
    "e^{e^{e^{e^{e^{9}}}}}",
    "\\sin(10^{10^{10^{10}}})",
    "(" * 300 + "2" + ")" * 300,
    "\\frac{1}{" * 300 + "2" + "}" * 300,
    "\\sqrt{2+" * 60 + "2" + "}" * 60,
    "1+" * 4000 + "1",
    "9" * 5000 + ".0x",
    ",".join(map(str, range(5000))),
)


@pytest.mark.parametrize("text", COSTLY, ids=range(len(COSTLY)))
def test_math_when_an_answer_is_too_costly_then_it_scores_0_and_counts_as_a_timeout(text, caplog):
    score = math_reward(f"\\boxed{{{text}}}", "16")
    assert (score, score.parts) == (0.0, {"timeouts": 1.0})
    assert "answer scored 0: " in caplog.text


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("7^{1000000000}", "16"),
        ("100000000!", "16"),
        ("\\binom{1000000000}{500000000}", "16"),
        ("(x+y+z)^{40}+1", "(x+y+z+1)^{40}"),
        ("(x+y+z+w)^{60}", "16"),
        ("\\sin(41x)\\cos(x)-\\cos(41x)\\sin(x)", "\\cos(40x)"),
    ],
)
def test_math_when_a_large_answer_can_be_judged_then_it_is_and_no_timeout(text, gold):
    score = math_reward(f"\\boxed{{{text}}}", gold)
    assert score == 0.0
    assert not getattr(score, "parts", {})


@pytest.mark.process
@pytest.mark.parametrize(("crashes", "score"), [(1, 1.0), (9, 0.0)])
def test_math_when_a_child_crashes_then_another_is_asked_once_and_a_line_says_so(
    crashes: int,
    score: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    verdict = math_verifier._verdict

    def crashing(gold: str, found: str) -> bytes:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) <= crashes:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        return verdict(gold, found)

    monkeypatch.setattr(math_verifier, "_verdict", crashing)
    text = f"\\int_0^1 {2 * crashes}x dx"  # one that no test has asked for
    found = math_reward(f"\\boxed{{{text}}}", str(crashes))
    assert found == score
    assert len(list(tmp_path.iterdir())) == 2
    assert caplog.text.count("math-verify's process was ended by SIGSEGV; asking another") == 1


@pytest.mark.process
def test_math_when_a_sum_never_ends_then_its_child_is_ended_in_any_thread():
    scores = []
    text = "\\boxed{\\sum_{k=1}^{100000000} \\frac{1}{k^2+1}}"
    thread = threading.Thread(target=lambda: scores.append(math_reward(text, "16")))
    thread.start()
    thread.join(60)
    assert scores[0].parts == {"timeouts": 1.0}
    assert math_reward("\\boxed{\\int_0^1 2x dx}", "1") == 1.0
