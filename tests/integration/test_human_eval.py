"""HumanEval's 164 solutions pass in a box; the same, broken, fail."""

import ast
import asyncio
import gzip
import json
from importlib import resources

import pytest
from tests.integration.test_sandbox import REASON

from areal.datasets.human_eval import human_eval_row
from areal.errors import InvalidInput
from areal.rewards.code import run_tests
from areal.sandbox import Limits, Sandbox

# Problem 65 takes four seconds of a quiet core.
LIMITS = Limits(seconds=120)


def rows() -> list[dict]:
    data = resources.files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(data).splitlines()]


def broken(row: dict) -> str:
    """The solution, but what the asked function returns is wrapped in a list."""
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    (function,) = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == row["entry_point"]
    ]

    class Wrap(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> ast.Return:
            return ast.Return(ast.List([node.value or ast.Constant(None)], ast.Load()))

    Wrap().visit(function)
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.skipif(bool(REASON), reason=REASON or "boxes work")
@pytest.mark.timeout(900)
async def test_the_solutions_of_human_eval_pass_and_broken_ones_fail():
    sandbox, problems = Sandbox(), rows()
    assert len(problems) == 164

    async def judge(code: str, row: dict) -> bool:
        return (await run_tests(sandbox, code, human_eval_row(row)["tests"], LIMITS))[1]

    right = await asyncio.gather(
        *[judge(r["prompt"] + r["canonical_solution"], r) for r in problems]
    )
    wrong = await asyncio.gather(*[judge(broken(r), r) for r in problems])
    await sandbox.close()
    assert [r["task_id"] for r, passed in zip(problems, right, strict=True) if not passed] == []
    assert [r["task_id"] for r, passed in zip(problems, wrong, strict=True) if passed] == []


def test_a_row_is_a_question_with_tests():
    row = {"prompt": "def f():\n", "test": "def check(f): pass\n", "entry_point": "f"}
    made = human_eval_row(row, instruction="Write it.")
    assert made["messages"][0]["content"] == "Write it.\n\n```python\ndef f():\n```"
    assert made["tests"] == "def check(f): pass\n\ncheck(f)"
    with pytest.raises(InvalidInput, match="field 'test' is missing"):
        human_eval_row({"prompt": "", "entry_point": "f"})
