"""An exported folder renders chats as the folder that it came from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from areal.tokenizer import Tokenizer
from areal_torch.engines.export.directory import write_directory
from areal_torch.models.tiny import CHAT_TEMPLATE, save_tokenizer


def test_export_when_templates_are_named_then_tools_are_shown_as_before(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tokenizer(source)
    named = source / "additional_chat_templates" / "tool_use.jinja"
    named.parent.mkdir()
    named.write_text("{{ tools[0].name }}" + CHAT_TEMPLATE)
    (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    hf = SimpleNamespace(config=SimpleNamespace(to_dict=dict))
    for _ in range(2):
        write_directory(tmp_path / "export", [], hf, source)
    text = Tokenizer.load(tmp_path / "export").render_chat(
        [{"role": "user", "content": "?"}], tools=[{"name": "weather"}]
    )
    assert text.startswith("weather<|user|>")
