"""Kept rollouts as a log of inspect_ai: roles, scores, causes; read by its own reader."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.areal.runs.test_kept_discarded import EQUAL, NOTHING, discard
from tests.unit.areal.runs.test_kept_rollouts import kept_run, writer_of
from tests.unit.areal.workflows.chat_families import FAMILIES, end_of_turn, tokenizer

from areal.errors import InvalidInput
from areal.runs.rollouts.reader import Kept
from areal.workflows.rendering import TemplateRenderer
from areal_launch.commands.inspect_logs import Messages
from areal_launch.commands.rollouts import export

# inspect_ai pins what it needs: an environment of its own. AREAL_INSPECT_PYTHON names its Python.
READER = os.environ.get("AREAL_INSPECT_PYTHON") or (
    sys.executable if importlib.util.find_spec("inspect_ai") else ""
)


@pytest.fixture
def log(tmp_path: Path, tiny_model: Path) -> Path:
    run = kept_run(tmp_path, tiny_model)
    writer = writer_of(run, model=str(tiny_model))
    discard(writer, 2, [EQUAL, NOTHING])
    writer.close()
    to = tmp_path / "log.json"
    assert export(str(run), to, "inspect", None, None) == 0
    return to


def test_a_log_when_exported_then_each_sample_has_its_turns_scores_and_cause(log: Path) -> None:
    found = json.loads(log.read_text())
    assert (found["version"], found["status"]) == (2, "success")
    assert (found["eval"]["task"], found["eval"]["dataset"]["samples"]) == ("x", 5)
    samples = {(each["id"], each["epoch"]): each for each in found["samples"]}
    assert len(samples) == found["results"]["total_samples"] == 9
    odd = samples["odd", 2]
    assert odd["messages"][-1]["content"] == odd["output"]["completion"] == "BB"
    assert odd["scores"]["reward"] == {"value": 1, "answer": "text of odd.1", "explanation": None}
    assert odd["metadata"]["outcome"] == "trained"
    easy = samples["easy", 1]
    assert easy["scores"]["reward"]["explanation"] == f"rejected: {EQUAL.reason}"
    broken = samples["broken", 1]
    assert broken["error"]["message"] == f"dead_lettered: {NOTHING.reason}"
    assert "scores" not in broken


@pytest.mark.skipif(
    not READER,
    reason="needs inspect_ai: pip install inspect_ai in an environment of its own, and "
    "AREAL_INSPECT_PYTHON=its python",
)
def test_a_log_when_inspect_reads_it_then_it_has_every_sample(log: Path) -> None:
    program = (
        "import json, sys; from inspect_ai.log import read_eval_log, read_eval_log_samples; "
        "log = read_eval_log(sys.argv[1]); "
        "print(json.dumps([log.status, log.results.scores[0].metrics['mean'].value, "
        "[[s.id, s.epoch, s.messages[-1].text if s.messages else '', "
        "s.scores['reward'].value if s.scores else s.error.message] for s in log.samples]]))"
    )
    done = subprocess.run(
        [READER, "-c", program, str(log)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    status, mean, samples = json.loads(done.stdout.splitlines()[-1])
    assert (status, len(samples), round(mean, 3)) == ("success", 9, 0.75)
    assert ["odd", 2, "BB", 1.0] in samples
    assert ["broken", 1, "", f"dead_lettered: {NOTHING.reason}"] in samples


def kept(ids: list[int], mask: list[bool]) -> Kept:
    zeros: list[float] = np.zeros(len(ids)).tolist()
    versions = [0 if each else -1 for each in mask]
    return Kept(
        1, 1, "a", "a.1.0", 0, 1.0, "stop", "", ids, mask, zeros, versions, zeros, None
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_turns_when_a_template_is_known_then_messages_have_their_roles(name: str) -> None:
    model = tokenizer(name)
    renderer = TemplateRenderer(model)
    opening: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is on page 7?"},
    ]
    end = end_of_turn(name)
    ids = renderer.render(opening)
    mask = [False] * len(ids)
    for answer, following in (
        ("let me look", [{"role": "user", "content": "go on"}]),
        ("a cat", []),
    ):
        said = [*model.encode(answer, add_special_tokens=False), end]
        ids, mask = [*ids, *said], [*mask, *[True] * len(said)]
        if following:
            given = renderer.bridge(ids, following)
            ids, mask = [*ids, *given], [*mask, *[False] * len(given)]
    one = kept(ids, mask)
    turns = [{"sampled": sampled, "text": model.decode(part)} for sampled, part in one.segments()]
    found = [(each["role"], each["content"]) for each in Messages(model).of(one, turns)]
    assert found[-4:] == [
        ("user", "What is on page 7?"),
        ("assistant", "let me look"),
        ("user", "go on"),
        ("assistant", "a cat"),
    ]
    assert found[0][0] == "system"
    assert "Be brief." in found[0][1]


def test_export_for_inspect_when_the_name_is_not_json_then_one_line(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = kept_run(tmp_path, tiny_model)
    with pytest.raises(InvalidInput, match=r"--to .*expected a name that ends in \.json"):
        export(str(run), tmp_path / "x.parquet", "inspect", None, None)
