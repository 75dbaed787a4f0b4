from __future__ import annotations

import re

from areal import errors
from areal.config.experiment import GRPOConfig
from areal.types import LIVE_STATES, TaskState
from areal_buffer.config import BufferConfig
from areal_buffer.scripts import NAMES, load_scripts
from areal_buffer.states import TRANSITIONS, transitions_as_lua


def test_table_when_read_then_every_state_is_there_and_reached_from_queued() -> None:
    assert set(TRANSITIONS) == set(TaskState)
    reached = {TaskState.QUEUED}
    while grown := {to for state in reached for to in TRANSITIONS[state]} - reached:
        reached |= grown
    assert reached == set(TaskState)


def test_table_when_a_state_has_ended_then_it_has_no_exit_but_being_asked_for_again() -> None:
    exits = {state: to for state, to in TRANSITIONS.items() if state not in LIVE_STATES and to}
    again = frozenset({TaskState.QUEUED})
    assert exits == {TaskState.DEAD_LETTERED: again, TaskState.DELIVERED: again}


def test_table_when_batched_then_only_training_follows() -> None:
    assert TRANSITIONS[TaskState.BATCHED] == {TaskState.TRAINED}
    into_batched = [state for state, to in TRANSITIONS.items() if TaskState.BATCHED in to]
    assert into_batched == [TaskState.COMPLETED]


def test_lua_table_when_generated_then_holds_exactly_the_transitions() -> None:
    text = transitions_as_lua()
    assert text.count("=true") == sum(len(targets) for targets in TRANSITIONS.values())
    assert '["queued>running"]=true' in text
    assert '"trained>' not in text


def test_scripts_when_loaded_then_each_starts_with_the_tables_and_has_its_own_digest() -> None:
    config = BufferConfig.from_experiment(GRPOConfig())
    scripts = load_scripts(config)
    assert set(scripts) == set(NAMES)
    assert len({script.sha for script in scripts.values()}) == len(NAMES)
    for script in scripts.values():
        assert script.text.startswith(f"local ALLOWED = {transitions_as_lua()}\n")
        assert f"local CONFIG = {config.as_lua()}\n" in script.text


def test_scripts_when_the_only_mover_is_move_then_no_other_line_writes_a_state() -> None:
    config = BufferConfig.from_experiment(GRPOConfig())
    for name, script in load_scripts(config).items():
        assert script.text.count("= 'state', to") == 1, name
        assert script.text.count("add(COUNTS, ") == 5, name


def test_scripts_when_they_refuse_then_with_a_class_of_ours() -> None:
    kinds: set[str] = set()
    for script in load_scripts(BufferConfig.from_experiment(GRPOConfig())).values():
        kinds |= set(re.findall(r"fail\('(\w+)'", script.text))
    assert {"NotFound", "LeaseLost", "WrongStep", "StaleIncarnation", "InvalidInput"} <= kinds
    for kind in kinds:
        assert issubclass(getattr(errors, kind), errors.ArealError)
