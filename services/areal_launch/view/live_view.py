"""The terminal view of a running stack: one screen, drawn twice a second from a snapshot."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal.config.learning_rules import WINDOW
from areal.runs.run_files import over_rows
from areal.types import TaskState
from areal.weights.servers import ServerState
from areal_launch.view.output import make_table, pause_words, state_word
from areal_launch.view.poller import Snapshot
from areal_launch.view.rows import column, mean, recent_mean

if TYPE_CHECKING:
    from areal_launch.processes.usage import UsageSampler
    from areal_launch.view.display import Stack

_SPARKS = "▁▂▃▄▅▆▇█"
_THREE_TABLES = 90
"""Columns that servers and two halves of the processes take beside each other."""
_MUTED = "bright_black"
_STYLES = {
    "up": "green",
    "finished": "green",
    "starting": "yellow",
    "backoff": "yellow",
    "failed": "bold red",
    "stopped": _MUTED,
    "serving": "green",
    "syncing": "cyan",
    "joining": "yellow",
    "draining": "yellow",
    "quarantined": "bold red",
}
"""Colors of processes and servers, by their state."""


def sparkline(values: list[float], width: int) -> str:
    """Draws values as at most `width` block characters; neighbors are averaged."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(_SPARKS[round((v - low) / span * (len(_SPARKS) - 1))] for v in values)


def duration(seconds: float) -> str:
    """Returns `m:ss`, or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def count(number: float) -> str:
    """Returns a number in a few digits: 987, 4.1k, 2.3M."""
    for limit, size, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{number / size:.1f}{unit}"
    return f"{number:,.0f}"


def eta_s(snapshot: Snapshot) -> float | None:
    """Returns the seconds to the last step at the pace of the last 20; None before that."""
    pace = recent_mean(snapshot.rows, "time/step")
    if snapshot.trainer is None or not pace:
        return None
    return (snapshot.trainer.total_steps - snapshot.trainer.step) * pace


def facts(snapshot: Snapshot) -> dict[str, str]:
    """Returns what is known of a run, by label: for the screen, log lines, and `areal status`."""
    rows, ledger, found = snapshot.rows, snapshot.ledger, {}
    if rewards := column(rows, "reward/mean"):
        found["reward"] = f"{rewards[-1]:.3f} (mean of {WINDOW}: {mean(rewards[-WINDOW:]):.3f})"
    elif losses := column(rows, "train/loss"):  # dataset rows only
        found["loss"] = f"{losses[-1]:.3f} (mean of {WINDOW}: {mean(losses[-WINDOW:]):.3f})"
        if column(rows, "train/accuracy"):
            found["accuracy"] = f"{recent_mean(rows, 'train/accuracy'):.3f}"
    if snapshot.trainer is not None and (measured := snapshot.trainer.evaluations):
        last = measured[-1]
        found["evaluated"] = f"{last['name']} {last['mean_reward']:.3f} {over_rows(last)}".rstrip()
    if snapshot.samples_per_s is not None and snapshot.tokens_per_s is not None:
        speeds = (snapshot.samples_per_s, "samples/s"), (snapshot.tokens_per_s, "tokens/s")
        found["generated"] = ", ".join(f"{count(speed)} {unit}" for speed, unit in speeds)
    if snapshot.generating is not None:
        running, speed = snapshot.generating
        found["generating"] = f"{count(speed)} tokens/s in {running:,} requests"
    if step := recent_mean(rows, "time/step"):
        parts = [p for p in ("wait", "train", "publish") if column(rows, f"time/{p}")]
        times = (f"{part} {recent_mean(rows, f'time/{part}'):.2f}" for part in parts)
        found["each step"] = f"{step:.2f} s: {', '.join(times)}"
    if speed := recent_mean(rows, "train/tokens_per_second"):
        mfu = f" ({recent_mean(rows, 'train/mfu'):.0%} MFU)" if column(rows, "train/mfu") else ""
        peak = (
            f", peak {column(rows, 'train/peak_gib')[-1]:.1f} GiB"
            if column(rows, "train/peak_gib")
            else ""
        )
        found["trained"] = f"{count(speed)} tokens/s{mfu}{peak}"
    if ledger is not None:
        if rows:
            bound = f"max {ledger.staleness_max} (bound {ledger.max_head_offpolicyness})"
            found["staleness"] = f"mean {recent_mean(rows, 'staleness/mean'):.2f}, {bound}"
        counts = {s: f"{ledger.counts.get(s, 0):,} {state_word(s)}" for s in TaskState}
        found["queue"] = " → ".join(text for state, text in counts.items() if state.live)
        ended = [counts[s] for s in TaskState if not s.live and ledger.counts.get(s)]
        found["ended"] = f"{', '.join(ended) or 'none'} of {ledger.submitted:,} submitted"
    return found


class LiveView:
    """Renders a stack from the latest snapshot."""

    def __init__(self, stack: Stack, usage: UsageSampler | None) -> None:
        """`usage` is None if the processes run elsewhere."""
        self._stack = stack
        self._usage = usage
        self.snapshot = Snapshot()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws with air where there is room; else what matters most comes first.

        The border with the footer is always on the screen.
        """
        airy = self._panel(options.max_width, airy=True)
        fits = len(console.render_lines(airy, pad=False)) <= options.size.height
        height = options.size.height
        yield airy if fits else self._panel(options.max_width, airy=False, height=height)

    def _panel(self, width: int, *, airy: bool, height: int | None = None) -> Panel:
        """Returns everything in a border; a given `height` cuts off what is below it."""
        config, sides = self._stack.config, 2 if airy else 1
        inner = width - 2 - 2 * sides
        progress, figures, tables = (
            self._progress(),
            self._figures(inner),
            self._tables(inner, airy),
        )
        messages = self._messages()
        body = [progress, figures, *messages, tables]
        if airy:
            gap = [Text()] if messages else []
            body = [progress, Text(), figures, Text(), tables, *gap, *messages]
        return Panel(
            Group(*body),
            title=f"[bold]areal[/] · {config.experiment_name}/{config.trial_name}",
            title_align="left",
            subtitle=self._footer(inner),
            subtitle_align="left",
            border_style=_MUTED,
            padding=(1 if airy else 0, sides),
            height=height,
        )

    def _footer(self, room: int) -> Text:
        """Returns where the dashboard is and what Ctrl-C does, in the words that fit."""
        hint, where = self._stack.interrupt_hint, self._stack.config.endpoints.gateway
        if self._stack.config.offline:
            return Text(hint)
        if not dashboard_listens(self._stack):
            return Text(f"dashboard is starting   {hint}")
        address, login = Text(where, f"link {where}"), login_hint(self._stack)
        for before, after in (("dashboard ", login), ("", login), ("", "")):
            footer = Text.assemble(before, address, f"{after}   {hint}")
            if footer.cell_len <= room:
                return footer
        return Text(hint)

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
        step = Text.assemble(("step ", _MUTED), (f"{trainer.step}/{trainer.total_steps}", "bold"))
        grid.add_row(
            step,
            ProgressBar(total=max(1, trainer.total_steps), completed=trainer.step),
            Text(tail, _MUTED),
        )
        doing = trainer.state + (f": {trainer.detail}" if trainer.detail else "")
        label = f"{'trainer':<{step.cell_len}} "
        line = Text.assemble((label, _MUTED), doing, no_wrap=True, overflow="ellipsis")
        return Group(grid, line)

    def _figures(self, room: int) -> RenderableType:
        found = facts(self.snapshot)
        labels = max(map(len, found), default=0)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style=_MUTED, no_wrap=True, min_width=labels)
        grid.add_column()
        for label, text in found.items():
            sparks = ("", "")
            if curve := {"reward": "reward/mean", "loss": "train/loss"}.get(label):
                left = min(48, room - labels - 2 - len(text) - 3)
                values = column(self.snapshot.rows, curve)
                sparks = (f"   {sparkline(values, left)}" if left > 0 else "", "cyan")
            grid.add_row(label, Text.assemble(text, sparks))
        return grid

    def _tables(self, room: int, airy: bool) -> RenderableType:
        processes = self._stack.processes
        # Those at the end may be cut off: a healthy one is missed least.
        names = (
            list(processes) if airy else sorted(processes, key=lambda n: processes[n].state == "up")
        )
        half = (len(names) + 1) // 2
        halves = [self._process_table(names[:half]), self._process_table(names[half:])]
        beside = room >= _THREE_TABLES
        servers = [] if self._stack.config.offline else [self._server_table(beside=beside)]
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_row(*servers * beside, *halves)
        return grid if beside else Group(*servers, grid)

    def _server_table(self, *, beside: bool) -> RenderableType:
        table = make_table("server", "version", "state", numeric=("version",))
        for server in sorted(self.snapshot.servers, key=lambda s: s.server_id):
            state = Text(server.state.value, _STYLES[server.state])
            table.add_row(
                server.server_id.removeprefix("127.0.0.1").removeprefix("[::1]"),
                str(server.version),
                state,
            )
        sync = self.snapshot.sync
        if sync is None:
            return table
        notes = [f"version {sync.current_version} on {sync.confirmed_servers} of {sync.servers}"]
        if sync.updates:
            notes.append(f"{sync.updates} updates, {pause_words(sync.update_seconds_mean)}")
        return Group(table, Text(("\n" if beside else ", ").join(notes), _MUTED))

    def _process_table(self, names: list[str]) -> RenderableType:
        table = make_table("process", "state", "MiB", numeric=("MiB",))
        memory = self._usage.now_mb if self._usage is not None else {}
        for name in names:
            process = self._stack.processes[name]
            state = Text(process.state.value, _STYLES[process.state])
            if process.restarts:
                state.append(f" {process.restarts} restart{'s'[: process.restarts > 1]}", "yellow")
            table.add_row(name, state, f"{memory.get(name, 0):,.0f}")
        return table

    def _messages(self) -> list[RenderableType]:
        shown = {"warning", "error"}
        if self._stack.state == "starting":
            shown.add("info")
        # Failures of the recipe, and servers, have lines of their own.
        apart = {"recipe", "servers"}
        events = [
            e for e in self._stack.events.recent if e.level in shown and e.process not in apart
        ][-3:]
        lines: list[RenderableType] = [
            Text(f"{failure} ({failure.attempts:,} attempts)", "bold red")
            for failure in self.snapshot.failures[:2]
        ]
        if self.snapshot.failures:
            lines.append(Text("areal dead-letters list shows failed tasks", _MUTED))
        lines += [
            Text(str(finding), "bold red", overflow="fold") for finding in self.snapshot.findings
        ]
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
        return lines


def dashboard_listens(stack: Stack) -> bool:
    """Whether the address answers: the stack's own gateway is up, or all that it starts is."""
    gateway = stack.processes.get("gateway")
    return stack.state != "starting" if gateway is None else gateway.state.value == "up"


def login_hint(stack: Stack) -> str:
    """Returns how to log in to the dashboard, if a command knows the token."""
    return " (log in: areal token)" if stack.config.security.token_file else ""


def plain_line(stack: Stack, snapshot: Snapshot) -> str:
    """Returns the stack in one line, for logs and pipes."""
    parts = [f"[{duration(time.time() - stack.started)}]"]
    if (trainer := snapshot.trainer) is not None:
        parts.append(f"step {trainer.step}/{trainer.total_steps} {trainer.state}")
    else:
        parts.append(str(stack.state))
    parts += [f"{label} {text}" for label, text in facts(snapshot).items()]
    if not stack.config.offline:
        serving = sum(s.state is ServerState.SERVING for s in snapshot.servers)
        parts.append(f"{serving}/{len(snapshot.servers)} servers serving")
    if (left := eta_s(snapshot)) is not None:
        parts.append(f"ETA {duration(left)}")
    return " | ".join(parts)
