"""The terminal view of a running stack: one screen, drawn twice a second from a snapshot."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal.types import TaskState
from areal.weights.servers import ServerState
from areal_launch.view.output import pause_words, state_word
from areal_launch.view.poller import Snapshot
from areal_launch.view.rows import WINDOW, column, mean, mismatch_alarm, recent_mean

if TYPE_CHECKING:
    from areal_launch.processes.usage import UsageSampler
    from areal_launch.view.display import Stack

_SPARKS = "▁▂▃▄▅▆▇█"
_MUTED = "bright_black"
HOST = "127.0.0.1"
_STATE_STYLE = {
    "up": "green",
    "finished": "green",
    "starting": "yellow",
    "backoff": "yellow",
    "failed": "bold red",
    "stopped": _MUTED,
}
_SERVER_STYLE = {
    ServerState.SERVING: "green",
    ServerState.SYNCING: "cyan",
    ServerState.JOINING: "yellow",
    ServerState.DRAINING: "yellow",
    ServerState.QUARANTINED: "bold red",
}


def sparkline(values: list[float], width: int) -> str:
    """Values as at most `width` block characters; neighbors are averaged."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(_SPARKS[round((v - low) / span * (len(_SPARKS) - 1))] for v in values)


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def count(number: float) -> str:
    """A few digits: 987, 4.1k, 2.3M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e6 if unit == 'M' else 1e3):.1f}{unit}"
    return f"{number:,.0f}"


def eta_s(snapshot: Snapshot) -> float | None:
    """Seconds to the last step at the pace of the last 20; None before there is a pace."""
    pace = recent_mean(snapshot.rows, "step_seconds")
    if snapshot.trainer is None or not pace:
        return None
    return (snapshot.trainer.total_steps - snapshot.trainer.step) * pace


class LiveView:
    """Renders a stack from the latest snapshot."""

    def __init__(self, stack: Stack, usage: UsageSampler | None) -> None:
        """`usage`: None where the processes run elsewhere."""
        self._stack = stack
        self._usage = usage
        self.snapshot = Snapshot()

    def __rich__(self) -> RenderableType:
        config = self._stack.config
        body = Group(
            self._progress(),
            Text(),
            self._figures(),
            Text(),
            self._tables(),
            *self._messages(),
        )
        return Panel(
            body,
            title=f"[bold]areal[/] · {config.experiment_name}/{config.trial_name}",
            title_align="left",
            subtitle=self._where() + self._stack.interrupt_hint,
            subtitle_align="left",
            box=box.ROUNDED,
            border_style=_MUTED,
            padding=(1, 2),
        )

    def _where(self) -> str:
        if not dashboard_listens(self._stack):
            return "dashboard is starting   "
        address = self._stack.config.endpoints.gateway
        return f"dashboard [link={address}]{address}[/link]{login_hint(self._stack)}   "

    def _progress(self) -> RenderableType:
        trainer = self.snapshot.trainer
        elapsed = duration(time.time() - self._stack.started)
        if trainer is None:
            doing = str(self._stack.state)
            if doing == "ready":
                has_one = "trainer" in self._stack.processes
                doing += ", the trainer is starting" if has_one else ", no trainer"
            return Text.assemble((doing, "bold"), ("   " + elapsed, _MUTED))
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        left = eta_s(self.snapshot)
        tail = f"{elapsed} elapsed" + (f"   ETA {duration(left)}" if left is not None else "")
        grid.add_row(
            Text.assemble(("step ", _MUTED), (f"{trainer.step}/{trainer.total_steps}", "bold")),
            ProgressBar(total=max(1, trainer.total_steps), completed=trainer.step),
            Text(tail, _MUTED),
        )
        doing = trainer.state + (f": {trainer.detail}" if trainer.detail else "")
        grid.add_row(Text("trainer", _MUTED), Text(doing, no_wrap=True, overflow="ellipsis"), "")
        return grid

    def _figures(self) -> RenderableType:
        snapshot, ledger = self.snapshot, self.snapshot.ledger
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style=_MUTED, no_wrap=True)
        grid.add_column(no_wrap=True)
        rewards = column(snapshot.rows, "reward_mean")
        if rewards:
            grid.add_row(
                "reward",
                Text.assemble(
                    (f"{rewards[-1]:.3f}", "bold cyan"),
                    (f"   mean of {WINDOW}: {mean(rewards[-WINDOW:]):.3f}   ", ""),
                    (sparkline(rewards, 48), "cyan"),
                ),
            )
        speed = (
            f"{count(snapshot.samples_per_s)} samples/s   {count(snapshot.tokens_per_s)} tokens/s"
        )
        times = {
            key: recent_mean(snapshot.rows, f"{key}_seconds")
            for key in ("step", "wait", "train", "publish")
        }
        if times["step"]:
            speed += (
                f"   step {times['step']:.2f} s: wait {times['wait']:.2f}, "
                f"train {times['train']:.2f}, publish {times['publish']:.2f}"
            )
        grid.add_row("generated", speed)
        if ledger is not None:
            if snapshot.rows:
                now = recent_mean(snapshot.rows, "staleness_mean")
                grid.add_row(
                    "staleness",
                    f"mean {now:.2f}   max {ledger.staleness_max} "
                    f"(bound {ledger.max_head_offpolicyness})",
                )
            grid.add_row("queue", self._queue(ledger.counts))
            ended = [
                f"{ledger.counts[s]:,} {state_word(s)}"
                for s in TaskState
                if not s.live and ledger.counts.get(s)
            ]
            grid.add_row("ended", "   ".join(ended) or "none yet")
        return grid

    @staticmethod
    def _queue(counts: Mapping[TaskState, int]) -> Text:
        stages = (TaskState.QUEUED, TaskState.RUNNING, TaskState.COMPLETED, TaskState.BATCHED)
        text = Text()
        for stage in stages:
            text.append(f"{counts.get(stage, 0):,}", "bold")
            text.append(f" {state_word(stage)}", _MUTED)
            if stage is not stages[-1]:
                text.append("  →  ", _MUTED)
        return text

    def _tables(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        names = list(self._stack.processes)
        half = (len(names) + 1) // 2
        columns = [self._process_table(names[:half]), self._process_table(names[half:])]
        grid.add_row(self._server_table(), *columns)
        return grid

    def _server_table(self) -> RenderableType:
        table = _table("server", "version", "state")
        for server in sorted(self.snapshot.servers, key=lambda s: s.server_id):
            state = Text(server.state.value, _SERVER_STYLE.get(server.state, ""))
            table.add_row(server.server_id.removeprefix(HOST), str(server.version), state)
        sync = self.snapshot.sync
        if sync is None:
            return table
        note = f"version {sync.current_version} on {sync.confirmed_servers} of {sync.servers}"
        if sync.updates:
            note += f"\n{sync.updates} updates, {pause_words(sync.update_seconds_mean)}"
        return Group(table, Text(note, _MUTED))

    def _process_table(self, names: list[str]) -> RenderableType:
        table = _table("process", "state", "MiB")
        memory = self._usage.now_mb if self._usage is not None else {}
        for name in names:
            process = self._stack.processes[name]
            state = Text(process.state.value, _STATE_STYLE.get(process.state.value, ""))
            if process.restarts:
                state.append(f" {process.restarts} restart{'s'[: process.restarts > 1]}", "yellow")
            table.add_row(
                name,
                state,
                f"{memory.get(name, 0):,.0f}",
            )
        return table

    def _messages(self) -> list[RenderableType]:
        shown = {"warning", "error"}
        if self._stack.state == "starting":
            shown.add("info")
        # Failures of the recipe have lines of their own.
        events = [
            e for e in self._stack.events.recent if e.level in shown and e.process != "recipe"
        ][-3:]
        lines: list[RenderableType] = [
            Text(f"{failure} ({failure.attempts:,} attempts)", "bold red")
            for failure in self.snapshot.failures[:2]
        ]
        if self.snapshot.failures:
            lines.append(Text("areal dead-letters list shows failed tasks", _MUTED))
        if alarm := mismatch_alarm(self.snapshot.rows):
            lines.append(Text(alarm, "bold red", overflow="fold"))
        lines += [
            Text(
                f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}",
                {"error": "bold red", "warning": "yellow"}.get(event.level, _MUTED),
                overflow="ellipsis",
                no_wrap=True,
            )
            for event in events
        ]
        lines += [
            Text(f"server {s.server_id}: {s.cause}", "yellow", overflow="ellipsis", no_wrap=True)
            for s in self.snapshot.servers
            if s.cause and s.state is not ServerState.SERVING
        ]
        return [Text(), *lines] if lines else []


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_MUTED)
    for header in headers:
        numeric = header in ("version", "MiB")
        table.add_column(header, justify="right" if numeric else "left", no_wrap=True)
    return table


def dashboard_listens(stack: Stack) -> bool:
    """Whether the address answers: the stack's own gateway is up, or all that it starts is."""
    gateway = stack.processes.get("gateway")
    return stack.state != "starting" if gateway is None else gateway.state.value == "up"


def login_hint(stack: Stack) -> str:
    """How to get past the dashboard's form, where a command knows the token."""
    return " (log in: areal token)" if stack.config.security.token_file else ""


def plain_line(stack: Stack, snapshot: Snapshot) -> str:
    """The stack in one line, for logs and pipes."""
    parts = [f"[{duration(time.time() - stack.started)}]"]
    trainer, ledger = snapshot.trainer, snapshot.ledger
    if trainer is not None:
        parts.append(f"step {trainer.step}/{trainer.total_steps} {trainer.state}")
    else:
        parts.append(str(stack.state))
    if rewards := column(snapshot.rows[-WINDOW:], "reward_mean"):
        parts.append(f"reward {rewards[-1]:.3f} ({WINDOW}: {mean(rewards):.3f})")
    parts.append(
        f"{count(snapshot.samples_per_s)} samples/s {count(snapshot.tokens_per_s)} tokens/s"
    )
    if ledger is not None:
        if snapshot.rows:
            stale = recent_mean(snapshot.rows, "staleness_mean")
            parts.append(
                f"staleness {stale:.2f} max {ledger.staleness_max}/{ledger.max_head_offpolicyness}"
            )
        counts = [f"{ledger.counts.get(s, 0)} {state_word(s)}" for s in TaskState if s.live]
        counts += [
            f"{ledger.counts[s]} {state_word(s)}"
            for s in (TaskState.REJECTED, TaskState.DEAD_LETTERED)
            if ledger.counts.get(s)
        ]
        parts.append(", ".join(counts))
    serving = sum(s.state is ServerState.SERVING for s in snapshot.servers)
    parts.append(f"{serving}/{len(snapshot.servers)} servers serving")
    left = eta_s(snapshot)
    if left is not None:
        parts.append(f"ETA {duration(left)}")
    return " | ".join(parts)
