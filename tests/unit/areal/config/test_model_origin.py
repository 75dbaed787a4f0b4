"""What `model.path` means."""

from pathlib import Path

import pytest

from areal.config.model_origin import find_model
from areal.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("models/tiny", ("models/tiny", "")),
        ("here/tiny", ("here/tiny", "")),
        ("/data/models/tiny", ("/data/models/tiny", "")),
        ("tiny", ("tiny", "")),
        ("", (".", "")),
        ("lab/tiny", ("models/lab--tiny", "hf://lab/tiny")),
        ("lab/tiny@v1", ("models/lab--tiny@v1", "hf://lab/tiny@v1")),
        ("hf://here/tiny", ("models/here--tiny", "hf://here/tiny")),
        ("s3://bucket/a/tiny/", ("models/bucket--a--tiny", "s3://bucket/a/tiny/")),
    ],
)
def test_find_model_when_asked_then_a_folder_wins_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: tuple[str, str]
) -> None:
    (tmp_path / "here" / "tiny").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    folder, source = find_model(path, made=False)
    assert (str(folder), source) == expected


def test_find_model_when_it_is_below_models_then_it_is_a_folder_though_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is downloaded goes below models/, so the name must not change its meaning then."""
    monkeypatch.chdir(tmp_path)
    assert find_model("models/tiny", made=False) == (Path("models/tiny"), "")
    assert find_model("hf://models/tiny", made=False)[1] == "hf://models/tiny"


def test_find_model_when_the_recipe_creates_it_then_a_name_that_may_be_the_hubs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run with the name of a real model trains the recipe's tiny one instead."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"expected hf://lab/tiny or \./lab/tiny"):
        find_model("lab/tiny", made=True)
    assert find_model("hf://lab/tiny", made=True)[1] == "hf://lab/tiny"
    for folder in ("./lab/tiny", "models/tiny", "tiny", "runs/models/tiny"):
        assert find_model(folder, made=True) == (Path(folder), "")
    (tmp_path / "lab").mkdir()
    assert find_model("lab/tiny", made=True) == (Path("lab/tiny"), "")
