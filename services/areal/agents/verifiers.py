"""Unmodified `verifiers` environments: the package's own EnvServer runs the episodes.

rollout worker                                   EnvServer, in an environment of its own
run(task_data, base_url, key)           ──>      harness, tools, users, sandboxes
tokens sampled and recorded             <──      model calls, each with its trace's id
rewards of each trace                   <──      the finished episode
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import Any, ClassVar

from areal.agents.calls import Calls
from areal.agents.endpoint import KEY_HEADER, Endpoint
from areal.agents.env_server import EnvServer, check_address, host_towards
from areal.agents.session import Model, Session
from areal.errors import InvalidInput, WorkflowError
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, Score, Trajectory
from areal.workflows.base import InferenceEngine, RolloutWorkflow
from areal.workflows.rendering import TemplateRenderer

_ROWS = """
import itertools, json, sys
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
config = json.loads(sys.argv[1])
taskset = load_taskset(taskset_config_type(config["id"]).model_validate(config))
for task in itertools.islice(taskset, int(sys.argv[2])):
    print("row " + task.data.model_dump_json())
"""
ROWS_WITHIN_S = 600.0


def verifiers_rows(python: str, taskset: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Returns the first tasks of a task set, as rows for `VerifiersWorkflow`.

    Args:
        python: The interpreter of the environment in which the task set is installed.
        taskset: The settings of the task set, including `id`, as in the server's configuration.
        count: Maximum number of rows.

    Raises:
        InvalidInput: The task set cannot be loaded; the message ends with the interpreter's error.
    """
    command = [python, "-c", _ROWS, json.dumps(taskset), str(count)]
    try:
        done = subprocess.run(  # noqa: S603 - the recipe names the interpreter
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONUTF8": "1"},
            timeout=ROWS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInput(f"taskset {taskset.get('id')!r}: {error}") from None
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise InvalidInput(f"taskset {taskset.get('id')!r}: {python}: {said}")
    lines = done.stdout.split("\n")  # not at U+2028, which JSON may contain
    return [json.loads(line[4:]) for line in lines if line.startswith("row ")]


class VerifiersWorkflow(RolloutWorkflow):
    """Runs episodes of an unmodified `verifiers` environment.

    For each row, EnvServer, the package's server, runs `gconfig.n_samples` episodes, which call the
    model being trained. Here, *episode* has the package's meaning: one attempt at the row. An
    episode has one or more traces; each trace is the record of one agent. If the environment marks
    an agent as trainable, the agent's trace becomes trajectories with the trace's reward. The
    trajectories' `reward_parts` are the values of the environment's reward functions before
    weighting.

    Example:
        >>> from areal.agents.verifiers import verifiers_rows
        >>> rows = verifiers_rows("/opt/verifiers/bin/python", {"id": "my-env"}, count=2000)
        >>> VerifiersWorkflow("tcp://127.0.0.1:5000", config.gconfig)
    """

    replayable: ClassVar[bool] = False

    def __init__(
        self,
        server: str,
        gconfig: GenerationHyperparameters | None = None,
        tokenizer: str | None = None,
        timeout_s: float = 600.0,
        template: dict[str, Any] | None = None,
    ) -> None:
        """Checks the arguments; `arun_episode` connects to the server later.

        Args:
            server: Address of EnvServer, `tcp://HOST:PORT`.
            gconfig: Sampling parameters, which override the environment's own. `max_new_tokens`
                limits each model call. None means the defaults of `GenerationHyperparameters`.
            tokenizer: Name or folder of the model's tokenizer on EnvServer's machine. If given,
                EnvServer itself uses the package `renderers` to turn messages into token ids, and
                EnvServer's traces have ids and logprobs. If None, AReaL applies the model's chat
                template.
            timeout_s: Time limit of each episode, in seconds.
            template: Variables for the chat template, such as `{"enable_thinking": False}`.

        Raises:
            InvalidInput: The address is malformed, the package `pyzmq` or `msgpack` is missing, or
                `timeout_s` is not above 0.
        """
        check_address(server)
        if timeout_s <= 0:
            raise InvalidInput(f"timeout_s {timeout_s:g}: expected above 0")
        self.server = server
        self.gconfig = gconfig or GenerationHyperparameters()
        self.tokenizer = tokenizer
        self.timeout_s = timeout_s
        self.template = template or {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Returns one group: the trajectories of `n_samples` runs of the environment."""

        async def generate(request: LLMRequest) -> list[LLMResponse]:
            return await engine.agenerate_group(request)

        renderer = TemplateRenderer(engine.tokenizer, **self.template)
        model = Model("areal", generate, engine.tokenizer, renderer, self.gconfig)
        async with (
            Endpoint(host_towards(self.server)) as endpoint,
            EnvServer(self.server) as server,
            asyncio.TaskGroup() as group,
        ):
            runs = [
                group.create_task(self._episode(model, endpoint, server, data))
                for _ in range(self.gconfig.n_samples)
            ]
        return [trajectory for one in runs for trajectory in one.result()]

    async def _episode(
        self, model: Model, endpoint: Endpoint, server: EnvServer, data: dict[str, Any]
    ) -> list[Trajectory]:
        sessions: dict[str, tuple[Session, Calls]] = {}  # by trace

        def find(trace: str) -> Session:
            if trace not in sessions:
                calls = Calls()
                sessions[trace] = Session(trace, model, calls), calls
            return sessions[trace][0]

        request = self._request(endpoint.base_url, endpoint.open_each(find), data)
        try:
            head, traces = await server.run(request, self.timeout_s)
        finally:
            # An environment fails where the model could not answer: that is not its fault.
            failures = [session.failure for session, _ in sessions.values() if session.failure]
            if failures:
                raise failures[0]
        for part in (head, *traces):
            if not part.get("ok"):
                error = (part.get("errors") or [{"type": "unknown", "message": "no reason"}])[-1]
                raise WorkflowError(f"{self.server}: {error['type']}: {error['message']}")
        found = []
        for trace in traces:
            if trace["agent"]["trainable"] and trace["id"] in sessions:
                found += sessions[trace["id"]][1].merged(_reward(trace)).trajectories
        if not found:
            raise WorkflowError(f"{self.server}: no trainable agent called the model")
        return found

    def _request(self, base_url: str, key: str, data: dict[str, Any]) -> dict[str, Any]:
        client: dict[str, Any] = {
            "type": "eval" if self.tokenizer is None else "train",
            "base_url": base_url,
            "api_key_var": "AREAL_NO_KEY",  # the server's own keys are not for us
            "headers": {KEY_HEADER: key},
        }
        if self.tokenizer is not None:
            client["renderer_model_name"] = self.tokenizer
        sampling = {
            "temperature": self.gconfig.temperature,
            "max_tokens": self.gconfig.max_new_tokens,
        }
        return {"task_data": data, "client": client, "model": "areal", "sampling": sampling}


def _reward(trace: dict[str, Any]) -> Score:
    rewards = {name: each for name, each in trace["rewards"].items() if each is not None}
    value = sum(float(each["score"]) * float(each["weight"]) for each in rewards.values())
    return Score(value, {name: float(each["score"]) for name, each in rewards.items()})
