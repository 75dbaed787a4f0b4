"""A recipe that is a folder: one source with one digest, which any process loads again."""

import asyncio
import base64
import contextlib
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal import recipe_folder
from areal.config.experiment import GRPOConfig
from areal.errors import InvalidInput, Unavailable
from areal.recipe import (
    Recipe,
    find_config_class,
    find_function,
    forget_recipe,
    function_reference,
    load_recipe,
)
from areal.workflows.specs import build_workflow, describe_workflow, recipe_of
from areal_launch.commands.stack import read_experiment
from areal_trainer.recipe_fault import fault_of_recipe

ENTRY = """
from pathlib import Path

from areal import RLVRWorkflow

from . import json
from .parts.rewards import score
from .workflows import Mine, MyConfig

PROMPT = (Path(__file__).parent / "prompts" / "system.txt").read_text()


def main(argv):
    return PROMPT, json.NAME


def fails():
    return json.boom()
"""
FILES = {
    "recipe.py": ENTRY,
    "recipe.yaml": "model: {path: tiny}\n",
    "prompts/system.txt": "Add.",
    "json.py": "NAME = 'mine'\ndef boom():\n    return {}['x']\n",
    "parts/__init__.py": "",
    "parts/rewards.py": "import json\ndef score(completion, answer):\n"
    "    return float(json.loads(completion) == answer)\n",
    "workflows.py": "from dataclasses import dataclass\n"
    "from areal import GRPOConfig\nfrom areal.workflows.base import RolloutWorkflow\n"
    "@dataclass\nclass MyConfig(GRPOConfig):\n    tau: float = 1.5\n"
    "class Mine(RolloutWorkflow):\n    def __init__(self, reward):\n        self.reward = reward\n"
    "    async def arun_episode(self, engine, data):\n        return self.reward('1', 1)\n",
    "__pycache__/x.pyc": "no",
    "runs/big.txt": "no",
    ".hidden": "no",
}


def written(folder: Path, **files: str) -> Path:
    for name, text in {**FILES, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_folder.tempfile, "gettempdir", lambda: str(tmp_path))


def test_load_when_the_recipe_is_a_folder_then_its_files_are_there(tmp_path) -> None:
    recipe = Recipe.read(written(tmp_path / "mine"))
    module = load_recipe(recipe.source, recipe.file_name)
    # Its own json, which hides Python's from no one: the rewards use that.
    assert module.main([]) == ("Add.", "mine")
    assert find_function(module, "score")('{"a": 1}', {"a": 1}) == 1.0
    assert find_config_class(module, GRPOConfig).__name__ == "MyConfig"
    assert "json" in sys.modules
    assert not hasattr(sys.modules["json"], "NAME")
    # Loaded again, in place of a process that has only the source, under another name.
    (tmp_path / "mine").rename(tmp_path / "gone")
    again = load_recipe(recipe.source, "/etc/areal/recipe/recipe.py")
    assert again.main([]) == ("Add.", "mine")


def test_digest_when_files_are_the_same_then_is_equal_wherever_they_lie(tmp_path) -> None:
    first = Recipe.read(written(tmp_path / "a"))
    second = written(tmp_path / "b", **{".hidden": "other", "runs/big.txt": "other"})
    os.utime(second / "json.py", (1, 1))
    assert Recipe.read(second).digest == first.digest
    (second / "prompts" / "system.txt").write_text("Subtract.")
    assert Recipe.read(second).digest != first.digest
    one_file = tmp_path / "one.py"
    one_file.write_text(ENTRY)
    assert Recipe.read(one_file).source == ENTRY.encode()


def test_workflow_when_its_parts_are_in_helpers_then_is_built_again_elsewhere(tmp_path) -> None:
    recipe = Recipe.read(written(tmp_path / "mine"))
    module = load_recipe(recipe.source, recipe.file_name)
    workflow = module.Mine(module.score)
    assert recipe_of(workflow).digest == recipe.digest
    spec = describe_workflow(workflow)
    assert (spec.name, spec.recipe_digest) == ("workflows:Mine", recipe.digest)
    assert function_reference(module.score) == (recipe.digest, "parts.rewards:score")
    rebuilt = build_workflow(spec, load_recipe(recipe.source, recipe.file_name))
    assert asyncio.run(rebuilt.arun_episode(None, {})) == 1.0
    for name in ("os:getcwd", "parts..rewards:score", "parts.rewards:__class__", "none:x"):
        with pytest.raises(InvalidInput, match="no function"):
            find_function(module, name)


def test_load_when_a_helper_fails_then_the_line_is_that_of_the_authors_file(tmp_path) -> None:
    folder = written(tmp_path / "mine", **{"json.py": "NAME = 1 / 0\n"})
    recipe = Recipe.read(folder)
    with pytest.raises(InvalidInput) as caught:
        load_recipe(recipe.source, recipe.file_name)
    assert str(caught.value) == (
        f"recipe {folder / 'json.py'}:1: ZeroDivisionError: division by zero"
    )
    broken = Recipe.read(written(tmp_path / "broken", **{"json.py": "def (\n"}))
    with pytest.raises(InvalidInput, match=r"broken/json\.py:1: invalid syntax"):
        load_recipe(broken.source, broken.file_name)
    plain = Recipe.read(
        written(tmp_path / "plain", **{"recipe.py": "import my_sums\n", "my_sums.py": ""})
    )
    with pytest.raises(InvalidInput, match=r"plain/recipe\.py:1.*from \. import my_sums"):
        load_recipe(plain.source, plain.file_name)


def test_fault_when_a_helper_raises_then_is_the_recipes(tmp_path) -> None:
    folder = written(tmp_path / "mine")
    recipe = Recipe.read(folder)
    module = load_recipe(recipe.source, recipe.file_name)
    with pytest.raises(KeyError) as caught:
        module.fails()
    assert fault_of_recipe(caught.value, folder) == f"KeyError: 'x' ({folder / 'json.py'}:3)"


def test_experiment_when_the_recipe_is_a_folder_then_its_file_is_recipe_yaml(tmp_path) -> None:
    folder = written(tmp_path / "mine")
    config, module = read_experiment(folder, None, ["tau=2.0"])
    assert (config.model.path, config.tau, config.recipe) == ("tiny", 2.0, str(folder))
    assert module.main([])[0] == "Add."


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"recipe.py": None}, "expected a folder with recipe.py"),
        ({"data.bin": os.urandom(1_000_000).hex()}, "bytes when packed: expected at most 1048576"),
        ({"data.bin": "0" * (17 << 20)}, "'data.bin': expected at most"),
        ({"link": "->"}, "a symbolic link"),
        ({"caf\udce9.txt": "x"}, r"/caf\\udce9\.txt': .*expected a name in UTF-8"),
        ({"a\\b.txt": "x"}, r"/a\\\\b\.txt': .*without a backslash"),
        ({"recipe/__init__.py": ""}, "recipe/__init__.py: expected only one of them"),
    ],
    ids=[
        *("no recipe.py", "too large", "too large unpacked", "a link"),
        *("not UTF-8", "a backslash", "a package recipe"),
    ],
)
def test_read_when_a_folder_cannot_travel_then_one_line_says_why(tmp_path, files, said) -> None:
    folder = written(tmp_path / "mine")
    for name, text in files.items():
        if text is None:
            (folder / name).unlink()
        elif text == "->":
            (folder / name).symlink_to("/etc/passwd")
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    with pytest.raises(InvalidInput, match=said):
        Recipe.read(folder)


@pytest.mark.parametrize("name", ["caf\udce9", "caf\udce9/mine", "caf\udce9.py"])
def test_read_when_the_path_is_not_utf8_then_one_line_says_so(tmp_path, name) -> None:
    path = tmp_path / name
    if path.suffix:
        path.write_text("")
    else:
        written(path)
    with pytest.raises(InvalidInput, match=r"/caf\\udce9.*: expected a path in UTF-8"):
        Recipe.read(path)


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return recipe_folder._MARK + b"# " + base64.b64encode(buffer.getvalue()) + b"\n"


CONTENT = base64.b64decode(
    packed({"recipe.py": b"x = 1\n" * 30, "a/b.txt": b"text"}).split(b"# ")[-1].strip()
)


@pytest.mark.parametrize(
    "source",
    [
        packed({"../outside.py": b""}),
        packed({"/tmp/outside.py": b""}),
        packed({"recipe.py": b"", "zeros": b"0" * (17 << 20)}),
        packed({f"{number}.py": b"" for number in range(501)}),
        recipe_folder._MARK + b"# not base64!\n",
        recipe_folder._MARK + b"# " + base64.b64encode(b"no zip") + b"\n",
        packed({"recipe.py": b""})[:-40],
        packed({"x.py": b"", "x.py/y.py": b""}),
    ],
    ids=["above", "absolute", "bomb", "many", "text", "no zip", "cut off", "file and folder"],
)
def test_load_when_a_strangers_folder_is_damaged_then_refused_and_nothing_is_outside(
    tmp_path, source
) -> None:
    with pytest.raises(InvalidInput, match="its folder is damaged"):
        load_recipe(source, "strange.py")
    assert not list(tmp_path.rglob("outside.py"))


def test_forget_when_a_recipe_was_loaded_then_nothing_of_it_is_left(tmp_path) -> None:
    recipe = Recipe.read(written(tmp_path / "mine"))
    module = load_recipe(recipe.source, recipe.file_name)
    forget_recipe(module)
    left = [each for each in sys.meta_path if isinstance(each, recipe_folder.Files)]
    assert not [each for each in left if recipe.digest[:16] in each.package]
    assert not [name for name in sys.modules if recipe.digest[:16] in name]


def test_unpack_when_there_is_no_place_then_it_is_this_machines_fault(tmp_path) -> None:
    source = Recipe.read(written(tmp_path / "mine")).source
    place = tmp_path / f"areal-recipes-{os.getuid()}"
    place.write_text("a file")
    with pytest.raises(Unavailable, match="cannot be unpacked"):
        load_recipe(source, "mine")
    place.unlink()
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    with pytest.raises(InvalidInput, match="only this user can write"):
        load_recipe(source, "mine")


@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
@example(place=0.46484375, value=12)  # another method of compression
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_unpack_when_any_byte_is_another_then_it_is_a_folder_or_one_line(place, value) -> None:
    content = bytearray(CONTENT)
    content[int(place * len(content))] = value
    source = recipe_folder._MARK + b"# " + base64.b64encode(content) + b"\n"
    with contextlib.suppress(InvalidInput):
        recipe_folder.unpack(source, hashlib.sha256(source).hexdigest())


def test_two_folders_when_their_helpers_have_one_name_then_each_has_its_own(tmp_path) -> None:
    modules = []
    for name in ("one", "two"):
        folder = written(tmp_path / name, **{"json.py": f"NAME = {name!r}\n"})
        recipe = Recipe.read(folder)
        modules.append(load_recipe(recipe.source, recipe.file_name))
    assert [module.main([])[1] for module in modules] == ["one", "two"]


def test_load_when_another_process_changed_its_copy_then_the_files_are_the_digests(
    tmp_path,
) -> None:
    recipe = Recipe.read(written(tmp_path / "mine"))
    first = load_recipe(recipe.source, recipe.file_name)
    copy = Path(first.__file__).parent
    (copy / "json.py").write_text("NAME = 'poisoned'\n")
    (copy / "prompts" / "system.txt").unlink()
    second = load_recipe(recipe.source, recipe.file_name)
    assert second.main([]) == ("Add.", "mine")
    # And the other way round: the first one's files stay as it has left them.
    assert (copy / "json.py").read_text() == "NAME = 'poisoned'\n"


def test_copy_when_its_process_has_ended_then_the_next_load_removes_it(tmp_path) -> None:
    recipe = Recipe.read(written(tmp_path / "mine"))
    code = (
        "import sys; from pathlib import Path; from areal.recipe import *; import tempfile\n"
        "tempfile.gettempdir = lambda: sys.argv[2]\n"
        "recipe = Recipe.read(Path(sys.argv[1]))\n"
        "print(load_recipe(recipe.source, recipe.file_name).__file__, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "mine"), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().decode().strip())
        assert theirs.is_file()
        ours = Path(load_recipe(recipe.source, recipe.file_name).__file__)
        assert theirs.is_file()
        process.kill()
    again = Path(load_recipe(recipe.source, recipe.file_name).__file__)
    assert not theirs.parent.exists()
    assert again.is_file()
    assert ours != again


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (("x.py", "x/data.txt"), "x.py"),
        (("x.py", "x/__init__.py"), "x/__init__.py"),
        (("x/data.txt",), None),
        (("x.py", "recipe/data.txt"), "x.py"),
    ],
    ids=["a folder of data", "a package", "only a folder", "a folder named recipe"],
)
def test_import_when_a_folder_has_a_modules_name_then_as_in_python(tmp_path, files, found) -> None:
    texts = {name: f"NAME = {name!r}\n" for name in files}
    entry = "from . import x\ndef main(argv):\n    return getattr(x, 'NAME', None)\n"
    recipe = Recipe.read(written(tmp_path / "mine", **texts, **{"recipe.py": entry}))
    assert load_recipe(recipe.source, recipe.file_name).main([]) == found


@pytest.mark.filterwarnings("ignore:can't resolve package:ImportWarning")
def test_load_when_it_is_a_file_of_a_folder_then_the_error_names_the_folder(tmp_path) -> None:
    recipe = Recipe.read(written(tmp_path / "mine") / "recipe.py")
    with pytest.raises(
        InvalidInput, match=r"no known parent package \(expected the folder"
    ) as told:
        load_recipe(recipe.source, recipe.file_name)
    assert str(told.value).endswith(f"(expected the folder: {str(tmp_path / 'mine')!r})")
