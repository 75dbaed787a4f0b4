"""`areal init`, `--version`, `-h` and the short names of `--run`."""

from __future__ import annotations

import shlex
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal.errors import InvalidInput, NotFound
from areal_launch.cli import app
from areal_launch.commands import builtin_recipes
from areal_launch.commands.init import KINDS
from areal_launch.commands.stack import read_experiment
from areal_launch.run_folder import find_run


@pytest.mark.parametrize("kind", KINDS)
def test_init_when_of_a_kind_then_its_folder_is_a_recipe(tmp_path: Path, monkeypatch, kind) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["init", "mine", "--kind", kind])
    assert answer.exit_code == 0, answer.output
    assert "areal check mine && areal run mine" in answer.output
    config, module = read_experiment(Path("mine"), None, ["total_train_steps=3"])
    assert (config.experiment_name, config.total_train_steps) == ("mine", 3)
    assert "examples/" not in (module.__doc__ or "")
    assert "areal run mine" in module.__doc__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mine", "--kind", "rlv"], "did you mean 'rlvr'"),
        (["Mine"], "expected lower-case letters"),
        (["full"], "expected a new or an empty folder"),
        (["a-file"], "expected a new or an empty folder"),
        (["lat\udce9/mine"], r"'lat\udce9/mine': expected a path in UTF-8"),
    ],
)
def test_init_when_it_makes_no_sense_then_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch, arguments, said
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "a-file").write_text("mine")
    answer = CliRunner().invoke(app, ["init", *arguments])
    assert answer.exit_code == 2
    assert said in answer.output
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["a-file", "full", "x"]


@pytest.mark.parametrize("name", ["null", "true", "on", "no", "1e5", "0x10", "2024-01-01", "1"])
def test_init_when_yaml_reads_the_name_as_something_else_then_it_stays(
    tmp_path: Path, monkeypatch, name
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", name]).exit_code == 0
    assert read_experiment(Path(name), None, [])[0].experiment_name == name


@pytest.mark.parametrize("kind", ["rlvr", "sft"])
@pytest.mark.parametrize("parent", ["a b", "a\\Nb", 'a"""b', "-a", "a'b"])
def test_init_when_the_path_is_unusual_then_recipe_and_next_command_are_right(
    tmp_path: Path, monkeypatch, parent, kind
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = f"{parent}/mine"
    answer = CliRunner().invoke(app, ["init", "--kind", kind, "--", folder])
    assert answer.exit_code == 0, answer.output
    command = answer.output.splitlines()[-1].removeprefix("next: ")
    shown = shlex.split(command)[-1]
    assert shlex.split(command) == ["areal", "check", shown, "&&", "areal", "run", shown]
    assert Path(shown).resolve() == tmp_path / folder
    assert not shown.startswith("-")
    _, module = read_experiment(Path(folder), None, [])
    assert "areal run " in module.__doc__


def test_example_when_there_is_no_checkout_then_is_the_distributions(
    tmp_path: Path, monkeypatch
) -> None:
    file = tmp_path / "share" / "areal" / "examples" / "dpo.py"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    listed = metadata.PackagePath("../../../share/areal/examples/dpo.py")
    listed.dist = type("Dist", (), {"locate_file": staticmethod(lambda _: file)})
    monkeypatch.setattr(builtin_recipes, "EXAMPLES", tmp_path / "nowhere")
    monkeypatch.setattr(builtin_recipes.metadata, "files", lambda _: [listed])
    assert builtin_recipes.find_example("dpo.py") == file.resolve()
    with pytest.raises(InvalidInput, match=r"sft\.py: expected a checkout"):
        builtin_recipes.find_example("sft.py")


@pytest.mark.parametrize("arguments", [["-h"], ["run", "-h"], ["versions", "list", "-h"]])
def test_help_when_asked_by_one_letter_then_is_shown(arguments) -> None:
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0
    assert "Usage" in answer.output


def test_version_when_asked_then_is_that_of_the_distribution() -> None:
    answer = CliRunner().invoke(app, ["--version"])
    assert answer.exit_code == 0
    assert answer.output.startswith("areal-services ")


def made(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "stack.json").write_text("{}")


def test_run_when_named_by_its_trial_then_is_found_unless_two_have_the_name(tmp_path) -> None:
    made(tmp_path, "math/demo", "math/second", "code/demo")
    for name in ("second", "math/second", str(tmp_path / "math" / "second")):
        assert find_run(Path(name), tmp_path).path == tmp_path / "math" / "second"
    assert find_run(Path("code/demo"), tmp_path).path == tmp_path / "code" / "demo"
    with pytest.raises(InvalidInput, match=r"'demo': 2 trials.*code/demo, math/demo"):
        find_run(Path("demo"), tmp_path)
    with pytest.raises(NotFound, match="did you mean 'second'"):
        find_run(Path("secnd"), tmp_path)
    for name in ("../math/demo", "/nowhere", "a/b/c", "math"):
        with pytest.raises(NotFound):
            find_run(Path(name), tmp_path)
