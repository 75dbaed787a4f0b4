"""Each workflow that a recipe gives is described as it is, also if it lives for one step only."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from areal.workflows.multi_turn import MultiTurnWorkflow
from areal_torch.engines.rollout import RemoteSGLangEngine


def test_describe_when_each_step_has_a_workflow_of_its_own_then_none_is_taken_for_another() -> None:
    engine: Any = object.__new__(RemoteSGLangEngine)
    engine._specs, engine.session = {}, SimpleNamespace()
    for turns in range(1, 300):
        spec = engine._describe(MultiTurnWorkflow("math", max_turns=turns))
        assert json.loads(spec.kwargs_json)["max_turns"] == turns
    assert len(engine._specs) <= 64
    workflow = MultiTurnWorkflow("math")
    assert engine._describe(workflow) is engine._describe(workflow)
