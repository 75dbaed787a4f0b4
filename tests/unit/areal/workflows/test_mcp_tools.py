"""Tools of real MCP servers: a program for each conversation, or a URL."""

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.integration.stack_tools import eventually
from tests.ports import free_port
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine
from tests.unit.areal.workflows.test_tool import ROW, call, multiply, scored

from areal.errors import InvalidInput, Unavailable, WorkflowError
from areal.types import GenerationHyperparameters, McpServer
from areal.workflows import mcp_tools
from areal.workflows.specs import build_workflow, describe_workflow
from areal.workflows.tool import ToolWorkflow

COUNTER = str(Path(__file__).parent / "mcp_counter.py")
PROGRAM = McpServer([sys.executable, COUNTER], environment={"PLACE": "a box"})

# The programs are started by a package, deep in its code.
pytestmark = [pytest.mark.timeout(120), pytest.mark.process]


def workflow(*tools, n=1, **options):
    return ToolWorkflow(list(tools), "math", GenerationHyperparameters(n_samples=n), **options)


class ByResults(ScriptedEngine):
    """Conversations run at the same time: the later answers depend on how many results are read."""

    def __init__(self, script, later):
        super().__init__(script, scored)
        self.later = later

    async def agenerate(self, request):
        text = self.tokenizer.decode(request.input_ids)
        self.script.insert(0, [self.later[text.count("<tool_response>\n")]])
        return await super().agenerate(request)


def read(engine, trajectory):
    """What the tools returned, in order."""
    text = engine.tokenizer.decode(trajectory.input_ids.tolist())
    parts = text.split("<tool_response>\n")[1:]
    return [part.partition("\n</tool_response>")[0] for part in parts]


async def test_program_when_called_then_state_is_of_one_conversation_and_results_are_context():
    twice = call("add", number=2) + "\n" + call("multiply", a=3)
    engine = ByResults([[twice, twice]], {2: call("process"), 3: "408"})
    group = await workflow(multiply, PROGRAM, n=2).arun_episode(engine, ROW)
    found = [read(engine, one) for one in group]
    assert [each[:2] for each in found] == [["2", "6"], ["2", "6"]]
    pids = [int(each[2]) for each in found]
    assert len(set(pids)) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids), "they end with the episode"
    assert engine.trained(group[0]) == [twice, call("process"), "408"]
    text = engine.tokenizer.decode(group[0].input_ids.tolist())
    assert '"name": "add", "description": "Adds to the total, which it returns."' in text


async def test_calls_when_they_fail_then_the_model_reads_why_and_others_are_not_delayed():
    asks = [
        call("divide", a=1, b=0),
        call("divide", a=1),
        call("wait", seconds=60),
        call("wait", seconds=0),
        call("divided", a=1),
    ]
    engine = ScriptedEngine([["\n".join(asks)], ["408"]], scored)
    [one] = await workflow(PROGRAM, tool_timeout_s=3.0).arun_episode(engine, ROW)
    by_zero, missing, late, waited, unknown = read(engine, one)
    assert by_zero.startswith("error: ")
    assert "division by zero" in by_zero
    assert missing.startswith("error: ")
    assert "b\n" in missing
    assert late == "error: no result within 3 s"
    assert waited == "waited in a box"
    assert unknown.startswith("error: no tool 'divided'; expected one of add, divide, wait")


async def test_program_when_it_dies_then_the_task_is_tried_again():
    engine = ScriptedEngine([[call("die")]], scored)
    with pytest.raises(Unavailable, match=r"mcp_counter.py: the connection is lost"):
        await workflow(PROGRAM).arun_episode(engine, ROW)


@pytest.fixture
def served():
    port = free_port()
    with subprocess.Popen([sys.executable, COUNTER, str(port)]) as process:
        eventually(lambda: listens(port), "the server listens", 60)
        yield McpServer(url=f"http://127.0.0.1:{port}/mcp")
        process.kill()


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


async def test_url_when_called_then_every_conversation_has_the_same_server(served):
    engine = ScriptedEngine([[call("add", number=1)] * 2, ["408"], ["408"]], scored)
    group = await workflow(served, n=2).arun_episode(engine, ROW)
    assert sorted(read(engine, one) for one in group) == [["1"], ["2"]]


async def test_url_when_it_does_not_answer_then_the_task_is_tried_again():
    url = f"http://127.0.0.1:{free_port()}/mcp"
    with pytest.raises(Unavailable, match=f"MCP server {url}: ConnectError"):
        await workflow(McpServer(url=url)).arun_episode(Engineless(), ROW)


async def test_program_when_it_cannot_start_then_the_error_names_it(monkeypatch):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(WorkflowError, match=r"MCP server no-such-program: FileNotFoundError"):
        await workflow(McpServer(["no-such-program"])).arun_episode(Engineless(), ROW)
    monkeypatch.setattr(mcp_tools, "START_TIMEOUT_S", 0.5)
    silent = McpServer([sys.executable, "-c", "import time; time.sleep(100)"])
    with pytest.raises(WorkflowError, match=r"time.sleep\(100\): no answer within 0.5 s"):
        await workflow(silent).arun_episode(Engineless(), ROW)
    assert set(psutil.Process().children(recursive=True)) <= before


class Engineless:
    """Nothing is sampled."""

    tokenizer = None


async def test_tools_when_two_have_one_name_then_refused():
    engine = ScriptedEngine([], scored)

    def add(number: int) -> int:
        return number

    with pytest.raises(InvalidInput, match="tools: add: expected one tool of that name"):
        await workflow(add, PROGRAM).arun_episode(engine, ROW)


@pytest.mark.parametrize("server", [McpServer(), McpServer(["x"], "http://y"), McpServer(url="x")])
def test_server_when_it_is_none_then_refused(server):
    with pytest.raises(InvalidInput, match="expected"):
        workflow(server)


def test_server_when_sent_to_workers_then_it_is_the_same():
    # Everything in it is the library's: no recipe is needed.
    built = build_workflow(describe_workflow(workflow(PROGRAM)), None)
    assert built.servers == [PROGRAM]
