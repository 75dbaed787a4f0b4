"""The documented workflow of two turns, and a server that samples what no tokenizer writes."""

import asyncio
import inspect
import textwrap
from pathlib import Path

import pytest
from tests.fake_sglang import FakeSGLang
from tests.integration.generation_rig import serving
from tests.unit.areal_rollout.fakes import Rig, lease

import areal
from areal.types import GenerationHyperparameters
from areal.workflows import base
from areal_torch.models.tiny import END_ID, USER_ID

ROOT = Path(__file__).resolve().parents[2]
EPISODES = 40
# As a user's turn; half of a character; ended; cut.
NASTY = [[*b"4", USER_ID, *b"6"], [0xC3], [*b"46", END_ID], [*b"46"]]


def documented_workflow(where):
    """The class in the docstring of `areal.workflows.base`, or on the page about workflows."""
    if where == "docstring":
        text = inspect.getdoc(base).split("as a recipe writes it:\n")[1].split("\nAn instance")[0]
        source = textwrap.dedent(text)
    else:
        page = (ROOT / "docs" / "workflows.md").read_text()
        blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
        [source] = [block for block in blocks if "class TwoTries" in block]
    names = {name: getattr(areal, name) for name in areal.__all__ if name in source}
    exec(source, names)
    return names["TwoTries"]


class Sampler:
    """Answers `NASTY` in turn, with finish reasons as SGLang gives them."""

    def __init__(self):
        self.requests = 0

    def __call__(self, body):
        ids = NASTY[self.requests % len(NASTY)]
        self.requests += 1
        finish = {"type": "stop", "matched": END_ID} if ids[-1] == END_ID else {"type": "length"}
        return {
            "output_ids": ids,
            "text": "",
            "meta_info": {
                "finish_reason": finish,
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
                "weight_version": "0",
            },
        }


@pytest.mark.parametrize("where", ["docstring", "page"])
async def test_documented_workflow_when_nasty_tokens_are_sampled_then_no_group_is_lost(where):
    server = FakeSGLang(behave=Sampler())
    gconfig = GenerationHyperparameters(max_new_tokens=3)
    async with serving(server, vocab_size=261, eos=END_ID) as client:
        rig = Rig(generation=client)
        rig.workflows["rlvr"] = documented_workflow(where)("math", gconfig)
        rig.scorer.outcome = 0.0  # always a second try
        async with rig:
            rig.ledger.add(*(lease(f"t{i}", question="12+34=") for i in range(EPISODES)))
            async with asyncio.timeout(60):
                await rig.ended(EPISODES)
    assert rig.ledger.returned == {}
    assert (len(rig.ledger.completed), rig.observer.drifts) == (EPISODES, 0)
    for group in rig.ledger.completed.values():
        [trajectory] = group.trajectories
        sampled = trajectory.input_ids[trajectory.loss_mask].tolist()
        assert sampled in [a + b for a in NASTY for b in NASTY]
        assert (trajectory.token_versions[trajectory.loss_mask] == 0).all()
