"""The GPU kit, tiny, on this CPU, with the packages of a bare machine and those that it carries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.gpu import pack, plan, table

ROOT = Path(__file__).resolve().parents[2]
FILTER = Path(__file__).parent / "gpu_machine"
CARRIED = [
    Requirement(line)
    for line in (ROOT / "tools/gpu/carried.txt").read_text().splitlines()
    if not line.startswith("#")
]

_NOT_HERE = ("needs a GPU", "needs GPU_KIT_SGLANG")


def closure(*names: str) -> set[str]:
    """Packages, and all that they require."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        try:
            requires = [] if name in found else metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(canonicalize_name(requirement.name))
    return found


def bare_machine(carried: list[Requirement] = CARRIED) -> dict[str, str]:
    """Environment in which only torch, transformers, what they need, and `carried` are there."""
    there = closure("torch", "transformers") | {canonicalize_name(each.name) for each in carried}
    there |= {"areal-services"}  # the modules in the kit's folder have the names of the installed
    paths = [str(FILTER)]
    if other := os.environ.get("AREAL_TEST_TRANSFORMERS"):  # make test-transformers
        paths.append(other)
        there |= closure("httpx")  # of the huggingface-hub that came with it
    return os.environ | {"GPU_MACHINE": ",".join(there), "PYTHONPATH": os.pathsep.join(paths)}


def on_bare_machine(
    kit: Path, out: Path, *options: str, carried: list[Requirement] = CARRIED
) -> list[dict[str, Any]]:
    """Runs the kit on such a machine."""
    command = [sys.executable, "-m", "tools.gpu", "--miniature", "--out", str(out), *options]
    done = run(command, kit, bare_machine(carried))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(done.splitlines()) == len(lines) + 1
    return lines


def run(command: list[str], kit: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=kit, env=environment, capture_output=True, text=True, check=False, timeout=580
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make gpu-kit` packs, without wheels."""
    folder = tmp_path_factory.mktemp("kit") / "gpu-kit"
    pack.copy(folder)
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", plan.CASES, ids=lambda case: case.name)
def test_case_when_run_in_miniature_on_a_bare_machine_then_each_try_gives_figures(
    case: plan.Case, kit: Path, tmp_path: Path
) -> None:
    lines = on_bare_machine(kit, tmp_path / "gpu.jsonl", "--only", case.name, "--budget-s", "560")
    assert [line["setting"] for line in lines] == list(case.settings)
    for line in lines:
        assert line["outcome"] == "ok" or line.get("why") in _NOT_HERE, line
        assert {"seconds", "at", "gpu", "torch"} <= set(line)
        if "largest" in line:
            # A CPU computes in float32 unless it is told otherwise.
            narrow = line["setting"].get("dtype") == "bfloat16"
            assert line["largest"] < (0.02 if narrow else 1e-5), line
            assert line.get("gradient", 0.0) < (0.02 if narrow else 1e-5), line
    if case.name == "contact":
        by_part = {line["setting"].get("with"): line for line in lines}
        assert by_part["resume"]["difference"] == 0.0
        assert by_part["lora"]["at_first"] == 0.0
        assert "gradient_checkpointing" in by_part["oom"]["said"]
    if case.name == "turns":
        assert lines[0]["difference"] == 0.0
    if case.name == "rest":
        assert lines[0]["stack"].startswith("needs ")
        assert lines[0]["last_loss"] < lines[0]["first_loss"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", ["2.11", "2.14"])
def test_contact_when_attention_has_the_signature_of_a_release_then_models_are_right(
    kit: Path, release: str
) -> None:
    command = [sys.executable, str(FILTER / "attention.py"), release]
    said = run(command, kit, bare_machine()).splitlines()
    lines = [json.loads(each) for each in said if each.startswith("{")]
    assert len(lines) == 6
    for line in lines:
        assert line["calls"] > 0, line
        assert max(line["largest"], line["gradient"]) < 1e-5, line


def test_kit_when_packed_elsewhere_then_it_runs_without_this_installation_and_leaves_nothing(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, temporary = tmp_path / "gpu.jsonl", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    lines = on_bare_machine(kit, out, "--only", "imports,head", "--budget-s", "400")
    left = [each.name for each in temporary.iterdir() if each.name.startswith("gpu-")]
    assert left == [], "models and checkpoints"
    assert {line["outcome"] for line in lines} == {"ok"}, lines
    assert {"omegaconf", "obstore"} <= set(lines[0]["missing"])


def test_kit_when_a_package_is_missing_then_its_tries_are_skipped(
    kit: Path, tmp_path: Path
) -> None:
    without = [each for each in CARRIED if each.name != "structlog"]
    out = tmp_path / "gpu.jsonl"
    options = ("--only", "imports,checkpoint", "--budget-s", "400")
    lines = on_bare_machine(kit, out, *options, carried=without)
    first, *_, last = lines
    assert first["outcome"] == "ok"
    assert "structlog" in first["missing"]
    assert (last["outcome"], last["why"]) == ("skipped", "needs structlog")


def test_kit_when_packages_are_carried_then_they_are_those_that_are_locked() -> None:
    locks = "".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
    for each in CARRIED:
        assert re.search(rf"^{each.name}{each.specifier}\b", locks, re.MULTILINE), each


def test_plan_when_limits_are_added_up_then_they_fit_into_the_budget() -> None:
    assert sum(case.limit_s for case in plan.CASES) <= plan.BUDGET_S <= 520
    first = "imports primitives contact families step head widths prime modes kernels attention"
    then = "checkpoint turns moe recurrent plain rest"
    assert list(plan.NAMES) == [*first.split(), *then.split()]
    prime = [(s["shape"], s["tokens"], s["loss"], s.get("lora", False)) for s in
             plan.find("prime").settings if "attention" not in s]  # fmt: skip
    assert prime == [
        ("qwen3-0.6b", 16384, "rl", False),
        ("qwen3-0.6b", 65536, "rl", False),
        ("qwen3-0.6b", 16384, "sft", False),
        ("qwen3-4b", 16384, "rl", True),
        ("qwen3-4b", 65536, "rl", True),
    ]


def test_command_when_written_then_it_is_short_and_what_is_carried_is_light(kit: Path) -> None:
    assert len((kit / "run.sh").read_text()) <= 2000
    size = sum(file.stat().st_size for file in kit.rglob("*") if file.is_file())
    assert size < 30 << 20  # with 22 MB of wheels, below 64 MiB


def test_rows_when_every_try_says_much_then_a_terminal_shows_all() -> None:
    tries = sum(len(case.settings) for case in plan.CASES)
    failed = {"seconds": 1.0, "outcome": "failed", "why": "x" * 999}
    lines = [
        {"case": case.name, "setting": setting, **failed}
        for case in plan.CASES
        for setting in case.settings
    ]
    text = "\n".join([*(table.row(line, tries) for line in lines), table.count(lines)])
    assert len(text) <= 12_000
    assert f"{tries} tries: {tries} failed" in text


def test_table_when_some_was_measured_then_the_rest_says_so(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    first, second, *_ = plan.find("head").settings
    line = {"case": "head", "setting": first, "at": "t", "seconds": 1.0, "gpu": "H", "torch": "2"}
    rows = [
        {**line, "outcome": "ok", "ms": 9.0, "miniature": False},
        {**line, "outcome": "ok", "ms": 5.0, "peak_gib": 3.1, "miniature": False},
        {**line, "outcome": "ok", "ms": 1.0, "miniature": True},
        {**line, "setting": second, "outcome": "skipped", "why": "needs x", "miniature": False},
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = table.render(table.read(out))
    assert "On H, torch 2:" in text
    assert "| `head` | tokens 8192, chunk 441 | ms 5.0 | 3.1 |" in text
    assert "| `head` | tokens 8192, chunk 2048 | **skipped** needs x |  |" in text
    assert "| `head` | tokens 8192, chunk 4096 | not measured |  |" in text
    assert "| `plain` | all 1 | not measured |  |" in text


def test_page_when_a_second_run_measured_less_then_the_first_runs_rows_stay(tmp_path: Path) -> None:
    first, second, third, _ = plan.find("head").settings
    line = {"case": "head", "at": "t", "seconds": 1.0, "torch": "2", "outcome": "ok"}
    page = tmp_path / "gpu.md"
    page.write_text(f"above\n{table.BEGIN}\n{table.render([])}\n{table.END}\nbelow\n")
    runs = [
        [{"gpu": "A", "setting": first, "ms": 1.0}, {"gpu": "A", "setting": second, "ms": 2.0}],
        [{"gpu": "B", "setting": second, "ms": 3.0}, {"gpu": "B", "setting": third, "ms": 4.0}],
    ]
    for run in runs:
        table.write([line | each for each in run], page)
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert text.index("On A, torch 2:") < text.index("On B, torch 2:")
    rows = [row for row in text.splitlines() if row.startswith("| `head`")]
    assert [re.search(r"ms (\S+)|not measured", row)[0] for row in rows] == [
        "ms 1.0", "ms 3.0", "ms 4.0", "not measured"
    ]  # fmt: skip
    assert "| `plain` | all 1 | not measured |  |" in text
    before = text
    table.write([], page)
    assert page.read_text() == before


def test_page_when_nothing_was_measured_then_its_table_has_every_case() -> None:
    page = table.PAGE.read_text().split(table.BEGIN)[1].split(table.END)[0].strip()
    if "not measured" in page and "On " not in page:
        assert page == table.render([])
    assert all(f"| `{name}` |" in page for name in plan.NAMES)
