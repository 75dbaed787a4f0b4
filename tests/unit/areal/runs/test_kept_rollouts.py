"""Kept rollouts: written whole, replaced by a replay, forgotten by age, read back exactly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from areal.errors import InvalidInput, NotFound
from areal.runs.rollouts import writer as writer_module
from areal.runs.rollouts.reader import RolloutFolder, export_rows
from areal.runs.rollouts.records import file_name, table_of
from areal.runs.rollouts.writer import RolloutWriter
from areal.types import StopReason, Trajectory, TrajectoryGroup
from areal_launch.commands.rollouts import _title, export, show


def trajectory(name: str, prompt: int, answer: list[int], reward: float) -> Trajectory:
    size = prompt + len(answer)
    mask = np.arange(size) >= prompt
    rewards = np.zeros(size, np.float32)
    rewards[-1] = reward
    return Trajectory(
        name,
        np.array([*range(1, prompt + 1), *answer], np.int32),
        mask,
        np.where(mask, -0.5, 0).astype(np.float32),
        np.where(mask, 7, -1).astype(np.int32),
        rewards,
        StopReason.LENGTH,
        f"text of {name}",
    )


def group(task: str, *rewards: float) -> TrajectoryGroup:
    return TrajectoryGroup(
        task, [trajectory(f"{task}.{i}", 3, [65 + i, 66], r) for i, r in enumerate(rewards)]
    )


def keep(writer: RolloutWriter, step: int, *groups: TrajectoryGroup, incarnation: int = 1) -> None:
    total = sum(len(t.input_ids) for g in groups for t in g.trajectories)
    writer.keep(
        groups,
        step=step,
        incarnation=incarnation,
        advantages=lambda: np.arange(total, dtype=np.float32),
    )


def writer_of(
    run: Path, rank: int = 0, keep_bytes: int = 1 << 30, model: str = ""
) -> RolloutWriter:
    return RolloutWriter(run / "rollouts", rank, keep_bytes, model)


def test_a_step_when_kept_then_it_is_read_back_as_it_was(tmp_path):
    writer = writer_of(tmp_path)
    keep(writer, 12, group("a", 1.0, 0.0), group("b", 0.5))
    writer.close()
    first, second, third = RolloutFolder(tmp_path).read()
    assert (first.task_id, first.trajectory_id, first.sample) == ("a", "a.0", 0)
    assert (second.sample, third.task_id, third.sample) == (1, "b", 0)
    assert (first.step, first.incarnation, first.reward) == (12, 1, 1.0)
    assert (first.finish_reason, first.completion) == ("length", "text of a.0")
    assert first.input_ids == [1, 2, 3, 65, 66]
    assert first.loss_mask == [False] * 3 + [True] * 2
    assert first.logprobs == [0, 0, 0, -0.5, -0.5]
    assert first.versions == [-1, -1, -1, 7, 7]
    assert first.rewards == [0, 0, 0, 0, 1]
    assert second.advantages == [5, 6, 7, 8, 9]
    assert (second.advantage, second.sampled, second.head_version) == (8.5, 2, 7)
    assert list(second.segments()) == [(False, [1, 2, 3]), (True, [66, 66])]
    assert not list((tmp_path / "rollouts").glob("*.tmp"))


def test_advantages_when_the_recipe_changed_its_batch_then_they_are_null(tmp_path):
    writer = writer_of(tmp_path)
    writer.keep(
        [group("a", 1.0)], step=1, incarnation=1, advantages=lambda: np.zeros(99, np.float32)
    )
    writer.keep([group("b", 1.0)], step=2, incarnation=1, advantages=None)
    writer.close()
    assert [each.advantages for each in RolloutFolder(tmp_path).read()] == [None, None]
    assert RolloutFolder(tmp_path).read()[0].advantage is None


def test_parts_of_rewards_when_kept_then_read_and_shown_and_older_files_have_none(tmp_path):
    writer = writer_of(tmp_path)
    several = group("a", 1.5, 0.0)
    several.trajectories[0].reward_parts.update({"correct": 1.0, "short": 2.5})
    keep(writer, 1, several)
    writer.close()
    first, second = RolloutFolder(tmp_path).read()
    assert first.parts == [{"name": "correct", "value": 1.0}, {"name": "short", "value": 2.5}]
    assert second.parts == []
    assert "sample 0: reward 1.5 (correct 1, short 2.5), advantage" in _title(first)
    assert "sample 1: reward 0, advantage" in _title(second)
    path = tmp_path / "rollouts" / file_name(1, 0)
    parquet.write_table(parquet.read_table(path, partitioning=None).drop_columns("parts"), path)
    assert [each.parts for each in RolloutFolder(tmp_path).read()] == [[], []]


def test_a_replayed_step_when_kept_again_then_its_groups_are_there_once(tmp_path):
    before = writer_of(tmp_path)
    for step in (1, 2, 3):
        keep(before, step, group(f"t{step}", 1.0))
    before.close()
    (tmp_path / "rollouts" / f".{file_name(3, 1)}.tmp").write_bytes(b"half a file")
    after = writer_of(tmp_path)
    after.resume(1)
    assert [each.task_id for each in RolloutFolder(tmp_path).read()] == ["t1"]
    keep(after, 2, group("t2", 1.0), incarnation=2)
    after.close()
    kept = RolloutFolder(tmp_path).read()
    assert [(each.task_id, each.incarnation) for each in kept] == [("t1", 1), ("t2", 2)]
    assert len(list((tmp_path / "rollouts").iterdir())) == 2


def test_a_process_when_killed_while_it_writes_then_the_folder_is_still_read(tmp_path):
    writer = writer_of(tmp_path)
    keep(writer, 1, group("a", 1.0))
    writer.close()
    source = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        import numpy as np
        from pyarrow import parquet
        from areal.runs.rollouts.writer import RolloutWriter
        from areal.types import Trajectory, TrajectoryGroup

        def die(writer, table):
            really(writer, table)
            os.kill(os.getpid(), signal.SIGKILL)

        really, parquet.ParquetWriter.write_table = parquet.ParquetWriter.write_table, die
        ones = np.ones(2, np.int32)
        one = Trajectory("b.0", ones, ones > 0, ones * 0.5, ones, ones * 0.5)
        writer = RolloutWriter(Path({str(tmp_path / "rollouts")!r}), 0, 1 << 30, "")
        writer.keep([TrajectoryGroup("b", [one])], step=2, incarnation=1, advantages=None)
        writer.settle()
        """
    )
    dead = subprocess.run([sys.executable, "-c", source], timeout=60, check=False)
    assert dead.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "rollouts").iterdir())) == 2
    assert parquet.read_table(tmp_path / "rollouts")["task_id"].to_pylist() == ["a"]
    assert [each.task_id for each in RolloutFolder(tmp_path).read()] == ["a"]
    writer_of(tmp_path).resume(1)
    assert len(list((tmp_path / "rollouts").iterdir())) == 1


def test_two_ranks_when_they_keep_a_step_then_both_parts_are_read(tmp_path):
    for rank in (0, 1):
        writer = writer_of(tmp_path, rank)
        keep(writer, 5, group(f"of-{rank}", 0.0, 1.0))
        writer.close()
    assert set(RolloutFolder(tmp_path).groups(5)) == {"of-0", "of-1"}


def test_space_when_it_is_used_up_then_the_oldest_steps_go(tmp_path):
    writer = writer_of(tmp_path)
    keep(writer, 1, group("a", 1.0))
    writer.settle()
    size = (tmp_path / "rollouts" / file_name(1, 0)).stat().st_size
    small = writer_of(tmp_path, keep_bytes=3 * size + size // 2)
    for step in range(2, 9):
        keep(small, step, group("a", 1.0))
    small.settle()
    assert RolloutFolder(tmp_path).steps == [6, 7, 8]
    other = writer_of(tmp_path, rank=1)
    keep(other, 7, group("b", 1.0))
    other.close()
    keep(small, 9, group("a", 1.0))
    small.close()
    assert RolloutFolder(tmp_path).steps == [8, 9]  # a step goes with all its files
    tiny = writer_of(tmp_path, keep_bytes=1)
    keep(tiny, 10, group("a", 1.0))
    tiny.close()
    assert RolloutFolder(tmp_path).steps == [10]  # the newest stays, whatever its size


def test_nothing_when_switched_off_then_no_folder_is_made(tmp_path):
    writer = writer_of(tmp_path, keep_bytes=0)
    keep(writer, 1, group("a", 1.0))
    writer.close()
    assert not (tmp_path / "rollouts").exists()
    with pytest.raises(NotFound, match=r"no rollouts; .*checkpoint\.rollouts_gib above 0"):
        RolloutFolder(tmp_path)


def test_a_disk_when_full_then_it_is_said_once_and_training_continues(
    tmp_path, monkeypatch, capsys
):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    writer = writer_of(tmp_path)
    monkeypatch.setattr(parquet.ParquetWriter, "write_table", full)
    for step in (1, 2):
        keep(writer, step, group("a", 1.0))
        writer.settle()
    assert capsys.readouterr().out.count("rollouts_not_kept") == 1
    assert not list((tmp_path / "rollouts").iterdir())
    monkeypatch.undo()
    keep(writer, 3, group("a", 1.0))
    writer.close()
    assert RolloutFolder(tmp_path).steps == [3]


def test_a_disk_when_it_hangs_then_it_is_waited_for_once(tmp_path, monkeypatch, capsys):
    really, moves = parquet.ParquetWriter.write_table, threading.Event()

    def hang(*values: object, **options: object) -> None:
        assert moves.wait(60.0)
        really(*values, **options)

    writer = writer_of(tmp_path)
    monkeypatch.setattr(parquet.ParquetWriter, "write_table", hang)
    monkeypatch.setattr(writer_module, "PATIENCE_S", 1.0)
    began = time.monotonic()
    for step in range(1, 16):
        keep(writer, step, group("a", 1.0))
        writer.settle()
    assert time.monotonic() - began < 10.0
    assert capsys.readouterr().out.count("rollouts_not_kept") == 1
    moves.set()
    for written in list(writer._writing):
        written.result(60.0)
    keep(writer, 16, group("a", 1.0))
    writer.close()
    assert RolloutFolder(tmp_path).steps == [1, 2, 3, 4, 16]


def test_resume_when_there_are_files_of_others_then_they_stay(tmp_path):
    (tmp_path / "rollouts").mkdir()
    mine = tmp_path / "rollouts" / "notes.parquet"
    mine.write_bytes(b"")
    writer = writer_of(tmp_path, keep_bytes=1)
    writer.resume(0)
    keep(writer, 1, group("a", 1.0))
    writer.close()
    assert mine.exists()
    assert RolloutFolder(tmp_path).steps == [1]


def test_the_writer_when_behind_then_no_more_than_a_few_steps_wait(tmp_path, monkeypatch):
    writer = writer_of(tmp_path)
    for step in range(1, 20):
        keep(writer, step, group("a", 1.0))
        assert len(writer._writing) <= writer_module.BEHIND
    writer.close()
    assert len(RolloutFolder(tmp_path).steps) == 19


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_any_groups_when_made_a_table_then_each_token_is_there(shapes):
    groups = [
        TrajectoryGroup(
            f"t{i}",
            [trajectory(f"{i}.{j}", p, list(range(a + 1)), 1.0) for j, (p, a) in enumerate(shape)],
        )
        for i, shape in enumerate(shapes)
    ]
    table = table_of(groups, step=1, incarnation=1, advantages=None, model="")
    rows = table.to_pylist()
    members = [each for one in groups for each in one.trajectories]
    assert [row["input_ids"] for row in rows] == [each.input_ids.tolist() for each in members]
    assert [row["loss_mask"] for row in rows] == [each.loss_mask.tolist() for each in members]


# -- as a user sees them ------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, tiny_model) -> Path:
    return kept_run(tmp_path, tiny_model)


def kept_run(tmp_path: Path, model: Path) -> Path:
    """A run of two steps; groups `even`, `odd` and `late`."""
    run = tmp_path / "runs" / "x" / "y"
    run.mkdir(parents=True)
    (run / "stack.json").write_text("{}")
    writer = writer_of(run, model=str(model))
    keep(writer, 1, group("even", 1.0, 1.0), group("odd", 0.0, 1.0))
    keep(writer, 2, group("late", 0.25, 0.75))
    writer.close()
    return run


def test_show_when_no_task_is_named_then_the_newest_step_as_a_table(run, capsys):
    assert show(str(run), "", None, as_json=False) == 0
    out = capsys.readouterr().out
    assert "late" in out
    assert "0.50" in out
    assert "step 2: 1 groups, 0 of them with equal rewards; kept: steps 1 to 2" in out
    show(str(run), "", 1, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(g["task_id"], g["reward_mean"]) for g in found["groups"]] == [
        ("even", 1),
        ("odd", 0.5),
    ]
    with pytest.raises(NotFound, match="step 3: not kept; kept: 1 to 2"):
        show(str(run), "", 3, as_json=False)


def test_show_when_it_goes_into_a_pipe_then_long_task_ids_are_on_one_line(
    tmp_path, tiny_model, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    run, task = tmp_path / "x" / "y", "train/arithmetic-with-carry/" + "0123456789abcdef" * 5
    run.mkdir(parents=True)
    (run / "stack.json").write_text("{}")
    writer = writer_of(run, model=str(tiny_model))
    keep(writer, 1, group(task, 0.0, 1.0))
    writer.close()
    show(str(run), "", None, as_json=False)
    assert f"{task}  2 " in capsys.readouterr().out
    show(str(run), task, None, as_json=False)
    assert f"{task}, step 1\n" in capsys.readouterr().out


def test_show_when_a_task_is_named_then_its_texts_and_rewards(run, capsys):
    assert show(str(run), "odd", None, as_json=False) == 0
    out = capsys.readouterr().out
    assert "sample 1: reward 1, advantage +" in out
    assert "2 of 5 tokens sampled by version 7" in out
    assert "BB" in out  # ids 66, 66
    show(str(run), "odd", None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [turn["sampled"] for turn in found[1]["turns"]] == [False, True]
    assert found[1]["turns"][1]["text"] == "BB"
    with pytest.raises(NotFound, match=r"task 'lat': not among the groups of steps 1 to 2.*'late'"):
        show(str(run), "lat", None, as_json=False)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_export_when_rows_are_wanted_then_one_file_that_others_read(run, tmp_path, suffix):
    to = tmp_path / f"out{suffix}"
    assert export(str(run), to, "rows", None, None) == 0
    rows = (
        [json.loads(line) for line in to.read_text().splitlines()]
        if suffix == ".jsonl"
        else parquet.read_table(to).to_pylist()
    )
    assert [row["trajectory_id"] for row in rows] == [
        *("even.0", "even.1", "odd.0", "odd.1", "late.0", "late.1")
    ]
    assert rows[3]["response"] == "BB"
    with pytest.raises(InvalidInput, match="exists"):
        export(str(run), to, "rows", None, None)


def test_export_when_a_column_is_null_at_first_then_later_values_are_there(run, tmp_path):
    writer = writer_of(
        run,
        model=str(
            parquet.read_schema(run / "rollouts" / file_name(1, 0))
            .metadata[b"areal.model"]
            .decode()
        ),
    )
    writer.keep([group("first", 1.0)], step=1, incarnation=1, advantages=None)
    writer.close()
    export(str(run), tmp_path / "out.parquet", "rows", None, None)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table["advantages"].to_pylist() == [None, [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert table.schema.field("advantages").type == pa.list_(pa.float32())


def test_export_when_for_sft_or_preferences_then_groups_of_equal_rewards_are_left_out(run):
    folder = RolloutFolder(run)
    sft = list(export_rows(folder, "sft", folder.steps))
    assert [(row["task_id"], row["completion"]) for row in sft] == [("odd", "BB"), ("late", "BB")]
    (odd, late) = export_rows(folder, "preferences", folder.steps)
    assert (odd["chosen"], odd["rejected"], odd["prompt"]) == ("BB", "AB", sft[0]["prompt"])
    assert late["step"] == 2


def test_export_when_asked_wrongly_then_one_line(run, tmp_path):
    with pytest.raises(InvalidInput, match=r"expected a name that ends in \.parquet or \.jsonl"):
        export(str(run), tmp_path / "x.csv", "rows", None, None)
    with pytest.raises(
        InvalidInput, match="steps 5 to 2: none is kept, expected steps from 1 to 2"
    ):
        export(str(run), tmp_path / "x.jsonl", "rows", 5, None)
    with pytest.raises(NotFound):
        export(str(tmp_path / "nowhere"), tmp_path / "x.jsonl", "rows", None, None)
    assert not list(tmp_path.glob("x.*"))


def test_show_when_pyarrow_is_not_installed_then_one_line(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match="pyarrow is not installed: pip install pyarrow"):
        show(str(run), "", None, as_json=False)


def test_the_files_when_another_tool_opens_them_then_types_are_plain(run):
    schema = parquet.read_schema(run / "rollouts" / file_name(1, 0))
    assert schema.field("reward").type == pa.float32()
    assert schema.field("input_ids").type == pa.list_(pa.int32())
    assert schema.field("loss_mask").type == pa.list_(pa.bool_())
