"""The GPU kit's driver: deadlines, crashes, memory, and what stays of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tools.gpu import __main__ as kit
from tools.gpu import driver, plan, worker
from tools.gpu.plan import Case


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose only case does what its setting says, in a worker that imports nothing."""
    cases = tmp_path / "tools/gpu/cases"
    cases.mkdir(parents=True)
    source = Path(worker.__file__).read_text()
    source = source.replace('("torch", "transformers", "areal_torch.engines.fsdp")', "()")
    source = source.replace("import torch", "import no_torch_in_this_test")
    (cases.parent / "worker.py").write_text(source)
    (cases / "fake.py").write_text(
        "import os, time\n"
        "def measure(setting, miniature):\n"
        "    does = setting['does']\n"
        "    if does == 'hang': stuck_here()\n"
        "    if does == 'crash': os._exit(7)\n"
        "    if does == 'print': print('noise', flush=True)\n"
        "    if does == 'import': import a_package_that_is_not_there\n"
        "    if does == 'oom': raise OutOfMemoryError('CUDA out of memory. 70 GiB.')\n"
        "    if does == 'error': raise ValueError('bad\\nlines')\n"
        "    return {'pid': os.getpid()}\n"
        "class OutOfMemoryError(RuntimeError): pass\n"
        "def stuck_here():\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    return tmp_path / "gpu.jsonl"


def run(
    monkeypatch: pytest.MonkeyPatch, out: Path, *does: str, budget_s: float = 120, try_s: float = 60
) -> list[dict[str, Any]]:
    """Run a plan of one case with these settings."""
    case = Case("fake", "fake", budget_s, tuple({"does": each} for each in does), try_s)
    monkeypatch.setattr(plan, "CASES", (case,))
    list(driver.Driver(out, miniature=True).run_all(["fake"], time.monotonic() + budget_s))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_worker_when_tries_succeed_or_fail_then_one_process_runs_them_all(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok, noisy, error, absent, last = run(
        monkeypatch, fake, "nothing", "print", "error", "import", "nothing"
    )
    assert ok["pid"] == noisy["pid"] == last["pid"]
    assert ok["case"] == "fake"
    assert ok["setting"] == {"does": "nothing"}
    assert {"outcome", "seconds", "at", "gpu", "torch"} <= set(ok)
    assert error["outcome"] == "failed"
    assert error["why"] == "ValueError: bad lines"
    assert error["frames"][-1].endswith("fake.py:9 measure")
    assert absent["outcome"] == "skipped"
    assert absent["why"] == "needs a_package_that_is_not_there"
    assert "noise" in fake.with_suffix(".log").read_text()


def test_driver_when_a_try_hangs_then_its_stack_stays_and_the_next_runs(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, after = run(monkeypatch, fake, "hang", "nothing", try_s=8)
    assert hang["outcome"] == "hang"
    assert "stuck_here" in hang["frames"][0], hang
    assert "Timeout" in fake.with_suffix(".log").read_text()
    assert after["outcome"] == "ok"


@pytest.mark.parametrize(("does", "outcome"), [("crash", "crash"), ("oom", "out of memory")])
def test_driver_when_a_try_breaks_the_worker_then_the_next_has_a_new_one(
    fake: Path, monkeypatch: pytest.MonkeyPatch, does: str, outcome: str
) -> None:
    before, broken, after = run(monkeypatch, fake, "nothing", does, "nothing")
    assert broken["outcome"] == outcome
    assert "why" in broken
    assert before["pid"] != after["pid"]


def test_driver_when_memory_runs_out_then_the_try_is_repeated_with_less(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("fake", "fake", 60, ({"does": "oom"},), smaller={"does": "nothing"})
    monkeypatch.setattr(plan, "CASES", (case,))
    lines = list(driver.Driver(fake, miniature=True).run_all(["fake"], time.monotonic() + 60))
    assert [line["outcome"] for line in lines] == ["out of memory", "ok"]
    case = Case("fake", "fake", 60, ({"does": "oom"},))  # there is nothing smaller
    monkeypatch.setattr(plan, "CASES", (case,))
    lines = list(driver.Driver(fake, miniature=True).run_all(["fake"], time.monotonic() + 60))
    assert len(lines) == 1


def test_driver_when_time_is_up_then_the_rest_says_so(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run(monkeypatch, fake, "hang", "nothing", "nothing", budget_s=6)
    assert [line["outcome"] for line in lines] == ["hang", "no time left", "no time left"]


def test_driver_when_a_case_hangs_then_those_after_it_keep_their_share(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = (
        Case("first", "fake", 1, ({"does": "hang"},)),
        Case("second", "fake", 3, ({"does": "x"},)),
    )
    monkeypatch.setattr(plan, "CASES", cases)
    started = time.monotonic()
    ran = driver.Driver(fake, miniature=True).run_all(["first", "second"], started + 80)
    hang = next(ran)
    assert hang["outcome"] == "hang"
    assert hang["seconds"] == pytest.approx(20, abs=5)
    assert next(ran)["outcome"] == "ok"
    ran.close()


def test_worker_when_a_try_ends_then_its_memory_is_released_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: done.append("synchronize"),
        max_memory_allocated=lambda: 3 << 30,
        empty_cache=lambda: done.append("empty_cache"),
        reset_peak_memory_stats=lambda: done.append("reset"),
    )
    torch = ModuleType("torch")
    vars(torch).update(cuda=cuda, distributed=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    result: dict[str, Any] = {"outcome": "ok"}
    assert worker.clean(result)
    assert result["peak_gib"] == 3.0
    assert done == ["synchronize", "empty_cache", "reset"]

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    cuda.synchronize = broken
    assert not worker.clean(result)
    assert result["afterwards"] == "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "nonsense"], "--only nonsense: expected some of imports,"),
        (["--budget-s", "0"], "--budget-s 0: expected more than 0"),
    ],
)
def test_kit_when_an_option_is_wrong_then_one_line_names_it(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kit.main(options)
    assert said in capsys.readouterr().err
