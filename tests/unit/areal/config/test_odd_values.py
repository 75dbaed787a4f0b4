"""Values that YAML or OmegaConf read in their own way: taken as meant, or refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest

from areal.config.experiment import GRPOConfig, build_config, load_service_config
from areal.errors import ConfigError

REFUSED = [
    # override, what the line says
    ("seed=???", "seed '???': expected a value"),
    ("model.path=???", "model.path '???': expected a value"),
    ("model.path=${nope}", "model.path: Interpolation key 'nope' not found"),
    ("seed=${seed}", "seed: "),
    ("seed=${oc.env:NO_SUCH_VARIABLE_HERE}", "NO_SUCH_VARIABLE_HERE"),
    ("seed=${", "seed=${"),
    ("model.path=", "model.path null: expected a value"),
    ("actor=null", "actor null: expected a value"),
    ("=3", "expected key=value"),
    ("model=foo", "model: expected a section"),
    ("actor.optimizer=3", "actor.optimizer: expected a section"),
    ("gconfig.stop_token_ids=3", "gconfig.stop_token_ids: expected a list"),
    ("gconfig.stop_token_ids=[a]", "gconfig.stop_token_ids[0]: Value 'a'"),
    ("gconfig.stop_token_ids={a: 1}", "gconfig.stop_token_ids: expected a list"),
    ("endpoints.inference=http://a:1", "endpoints.inference: expected a list"),
    ("model.path={a", "expected YAML after '='"),
    ("experiment_name=" + "a" * 64, "at most 63"),
    ("gconfig.top_k=-7", "gconfig.top_k -7: expected 1 or more, or -1"),
    ("gconfig.top_k=0", "gconfig.top_k 0: expected 1 or more, or -1"),
]


@pytest.mark.parametrize(("override", "said"), REFUSED)
def test_value_when_it_cannot_be_meant_then_one_line_names_the_key(
    override: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(GRPOConfig, None, [override])
    line = str(caught.value)
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize("text", ["seed: ???", "model: {path: '???'}", 'model: {path: "${nope}"}'])
def test_file_when_it_has_such_a_value_then_it_is_refused_with_its_name(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text + "\n")
    for build in (lambda: build_config(GRPOConfig, file), lambda: load_service_config(file)):
        with pytest.raises(ConfigError) as caught:
            build()
        assert "\n" not in str(caught.value)
        assert "seed" in str(caught.value) or "model.path" in str(caught.value)


def test_file_when_a_key_refers_to_another_then_it_has_its_value(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("seed: 7\nmodel: {path: 'models/${seed}'}\n")
    assert build_config(GRPOConfig, file).model.path == "models/7"


@pytest.mark.parametrize(
    "text", ["0777", "1:30", "1-000", "12e45", "1e5", "010", "007", "0x10", "1", "yes", "no", "on"]
)
def test_name_when_yaml_would_read_a_number_then_the_text_is_kept(
    tmp_path: Path, text: str
) -> None:
    for override in (f"model.path={text}", f"model={{path: {text}}}"):
        assert build_config(GRPOConfig, None, [override]).model.path == text
    file = tmp_path / "recipe.yaml"
    file.write_text(f"base: &base\n  path: {text}\nmodel:\n  path: {text}  # a name\n")
    assert load_service_config(file).model.path == text
    file.write_text(f"\ufeffmodel: {{path: {text}}}\r\n")
    assert build_config(GRPOConfig, file).model.path == text
    if ":" not in text:
        assert build_config(GRPOConfig, None, [f"trial_name={text}"]).trial_name == text


def test_name_when_it_is_quoted_then_the_quotes_are_not_part_of_it() -> None:
    assert build_config(GRPOConfig, None, ["model.path='0777'"]).model.path == "0777"
    assert build_config(GRPOConfig, None, ['model.path=" a b"']).model.path == " a b"


def keys_of(kind: Any, numbers: set[type], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section whose values are of these types."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        if item.metadata.get("omegaconf_ignore"):
            continue
        for option in (hints[item.name], *get_args(hints[item.name])):
            if is_dataclass(option):
                yield from keys_of(cast("Any", option), numbers, f"{prefix}{item.name}.")
            elif option in numbers:
                yield prefix + item.name


@pytest.mark.parametrize("key", sorted(keys_of(GRPOConfig, {float})))
@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_number_when_it_is_not_finite_then_it_is_refused(key: str, value: str) -> None:
    sections = [f"{key.partition('.')[0]}={{}}"] if key.startswith(("ref.", "critic.")) else []
    with pytest.raises(ConfigError) as caught:
        build_config(GRPOConfig, None, [*sections, f"{key}={value}"])
    assert key.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize("key", sorted(keys_of(GRPOConfig, {int})))
def test_integer_when_it_is_far_below_zero_then_it_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        build_config(GRPOConfig, None, [f"{key}=-1000000"])
