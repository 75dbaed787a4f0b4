"""An exported folder has what servers read beside weights, and renders chats as its source."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.tokenizer import Tokenizer
from areal_torch.engines.export.directory import write_directory
from areal_torch.models.tiny import CHAT_TEMPLATE, save_tokenizer

MODEL = SimpleNamespace(config=SimpleNamespace(to_dict=dict))


def test_export_when_templates_are_named_then_tools_are_shown_as_before(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tokenizer(source)
    named = source / "additional_chat_templates" / "tool_use.jinja"
    named.parent.mkdir()
    named.write_text("{{ tools[0].name }}" + CHAT_TEMPLATE)
    (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for _ in range(2):
        write_directory(tmp_path / "export", [], MODEL, source)
    text = Tokenizer.load(tmp_path / "export").render_chat(
        [{"role": "user", "content": "?"}], tools=[{"name": "weather"}]
    )
    assert text.startswith("weather<|user|>")


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.txt",
        "merges.txt", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    ],
)  # fmt: skip
def test_export_when_its_source_has_a_file_for_servers_then_it_has_it_too(
    tmp_path: Path, name: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    stale = ("generation_config.json", "model.safetensors.index.json")
    (source / "folder.json").mkdir()
    for file in (name, *stale, "pytorch_model.bin"):
        (source / file).write_text('{"from": "source"}')
    write_directory(tmp_path / "export", [], MODEL, source)
    assert (tmp_path / "export" / name).read_text() == '{"from": "source"}'
    there = {file.name for file in (tmp_path / "export").iterdir()}
    assert there == {name, "config.json"}
