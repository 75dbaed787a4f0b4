"""What models and strangers write is shown on a terminal, and never obeyed by it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal_launch.commands import inspect as inspect_command
from areal_launch.commands import rollouts
from areal_launch.view.display import PlainDisplay
from areal_launch.view.output import print_table, say, visible, warn
from areal_launch.view.terminal import Visible, make_console

CLIPBOARD, TITLE, CLEAR = "\x1b]52;c;aGk=\x07", "\x1b]0;root\x07", "\x1b[2J"
HOSTILE = f"ok {CLIPBOARD}{TITLE}{CLEAR}\x9b2J\u202eevil\u2066\r\x08\x7f\u200b\ufeff\u2028end"
OBEYED = (
    "\x1b\x9b\x07\x08\r\x7f\u202a\u202e\u2066\u2069\u200b\u200f\u061c\ufeff\u2028\u2029\x90\x9d"
)


@given(st.text(alphabet=st.characters() | st.sampled_from(OBEYED + "\ud800\n\t")))
def test_visible_when_given_any_text_then_it_can_be_printed_and_is_only_shown(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert not set(shown) & (set(map(chr, range(32))) - {"\n", "\t"})
    assert not set(shown) & set(map(chr, range(0x7F, 0xA0)))
    assert not set(shown) & set(OBEYED)
    assert visible(shown) == shown


@pytest.mark.parametrize(
    "text", ["héllo 你好 🙂👩‍👩‍👧 שלום مرحبا", "a\tb\nc", "[bold]x[/] [/nothing]", ""]
)
def test_visible_when_a_person_wrote_it_then_it_is_as_it_was(text: str) -> None:
    assert visible(text) == text


def test_visible_when_characters_are_obeyed_then_each_is_written_out() -> None:
    assert visible("\x1b[2J\x9b\u202e\U000e0041\ud83d") == (
        "\\x1b[2J\\x9b\\u202e\\U000e0041\\ud83d"
    )


def harmless(text: str) -> None:
    assert not set(text) & set(OBEYED), repr(text)
    assert "\\x1b]52;c;aGk=" in text.replace("\n", "")


def test_say_and_warn_when_the_text_is_hostile_then_it_is_only_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(HOSTILE)
    warn(HOSTILE)
    print_table(("task",), [(HOSTILE,), (Text(HOSTILE),)])
    printed = capsys.readouterr()
    harmless(printed.out)
    harmless(printed.err)


@pytest.mark.parametrize("kind", ["text", "styled", "panel", "table", "live"])
def test_console_when_the_text_is_hostile_then_it_is_only_shown(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = make_console()
    console.file, console.width = io.StringIO(), 400
    table = Table("column")
    table.add_row(HOSTILE)
    if kind == "live":
        with Live(Visible(Text(HOSTILE)), console=console, auto_refresh=False):
            pass
    else:
        console.print(
            {"text": HOSTILE, "styled": Text(HOSTILE, "bold"), "panel": Panel(HOSTILE)}.get(
                kind, table
            )
        )
    harmless(console.file.getvalue())


def test_console_when_text_looks_like_markup_then_it_is_text() -> None:
    console = make_console()
    console.file = io.StringIO()
    console.print("[red]x[/] [/nothing] :smile:")
    assert console.file.getvalue() == "[red]x[/] [/nothing] :smile:\n"


def test_events_when_a_worker_says_something_hostile_then_it_is_only_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = PlainDisplay(make_console())
    display._event(SimpleNamespace(level="warning", process="reward", text=HOSTILE))  # type: ignore[arg-type]
    harmless(capsys.readouterr().out)


class Kept:
    """One hostile completion of one task."""

    steps = (1,)

    def __init__(self) -> None:
        self.one = SimpleNamespace(
            task_id="t",
            outcome="rejected",
            cause=HOSTILE,
            sampled=1,
            head_version=0,
            reward=1.0,
            completion=HOSTILE,
            step=1,
            advantage=None,
            sample=0,
            parts=[{"name": HOSTILE, "value": 1.0}],
            versions=[0],
            generation_s=1.0,
            servers=[HOSTILE],
            input_ids=[1],
            finish_reason="stop",
            split=f"messages[0].{HOSTILE}",
            episode_s=0.0,
            attempt=1,
            token=1,
        )

    def groups(self, _: object) -> object:
        return {"t": [self.one]}

    def discarded(self, _: object = None) -> object:
        return [self.one]

    def task(self, _: str) -> object:
        return [self.one]

    def turns(self, _: object) -> object:
        return [{"text": HOSTILE, "sampled": True}, {"text": HOSTILE, "sampled": False}]


@pytest.mark.parametrize("of", ["step", "task", "discarded"])
@pytest.mark.parametrize("as_json", [False, True])
def test_show_when_a_completion_is_hostile_then_it_is_only_shown(
    of: str, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    monkeypatch.setattr(rollouts, "_folder", lambda _: kept)
    monkeypatch.setattr(rollouts, "by_attempt", lambda group: {1: group})
    monkeypatch.setenv("COLUMNS", "300")
    rollouts.show(
        "run", "t" if of == "task" else "", None, discarded=of == "discarded", as_json=as_json
    )
    printed = capsys.readouterr().out
    assert not set(printed) & set(OBEYED), repr(printed)
    assert "52;c;aGk=" in printed


def test_logs_when_a_line_is_hostile_then_it_is_only_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "stack.json").write_text("{}")
    (tmp_path / "logs" / "reward.log").write_bytes(
        HOSTILE.replace("\r", "").replace("\u2028", "").replace("\u2028", "").encode() + b"\n"
    )
    inspect_command.show_logs(tmp_path, None, follow=False, lines=10)
    harmless(capsys.readouterr().out)
