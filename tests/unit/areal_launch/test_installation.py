"""The `areal` command of a wrong installation ends with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from areal_launch.__main__ import installation_problem

SERVICES = Path(__file__).resolve().parents[3] / "services"


def distribution(site: Path, name: str, scripts: str) -> None:
    folder = site / f"{name}.dist-info"
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_text(f"[console_scripts]\n{scripts}\n")


def test_installation_when_the_original_project_is_there_too_then_it_is_refused(
    tmp_path: Path,
) -> None:
    distribution(tmp_path, "areal_services-0.2.0", "areal-buffer = areal_buffer.__main__:main")
    assert installation_problem([str(tmp_path)]) == ""
    distribution(tmp_path, "areal-1.0.4", "areal = areal.infra.cli:main")
    problem = installation_problem(["", str(tmp_path / "nowhere"), str(tmp_path)])
    assert "areal-1.0.4.dist-info" in problem
    assert "environment of its own" in problem
    assert "\n" not in problem


def test_installation_when_it_is_a_former_one_of_ours_then_it_is_accepted(tmp_path: Path) -> None:
    distribution(tmp_path, "areal-0.1.0", "areal-buffer = areal_buffer.__main__:main")
    assert installation_problem([str(tmp_path)]) == ""


def test_command_when_only_services_are_installed_then_it_names_the_extra() -> None:
    # -S: no site-packages, so not even typer.
    script = f"import sys; sys.path.insert(0, {str(SERVICES)!r}); " + (
        "from areal_launch.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-IS", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == (
        "areal: this installation has only services; pip install 'areal-services[launch]'\n"
    )
