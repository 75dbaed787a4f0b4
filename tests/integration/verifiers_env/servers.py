"""Run by the interpreter in which verifiers and openenv are installed: either of two servers.

python servers.py world PORT            an OpenEnv server; the reward is the share of letters
python servers.py env PORT WORLD LOG    verifiers' own EnvServer for its task set `openenv`;
                                        LOG gets the ids that verifiers has of each branch
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


async def log_tokens(task, trace):
    """A metric beside the environment's own: what verifiers knows of the tokens."""
    for branch in trace.branches:
        row = [branch.token_ids, branch.sampled_mask, branch.logprobs]
        write(json.dumps(row) + "\n")
    return 0.0


def write(line: str) -> None:
    with Path(os.environ["TOKEN_LOG"]).open("a") as file:
        file.write(line)


def world(port: int) -> None:
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Said(Action):
        message: Any

    class Seen(Observation):
        text: str

    class Letters(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state = State()

        def reset(self, seed=None, episode_id=None, **more):
            self._state = State()
            return Seen(text=f"letters, please ({seed})")

        def step(self, action, timeout_s=None, **more):
            self._state.step_count += 1
            said = str(action.message)
            letters = sum(character.isascii() and character.isalpha() for character in said)
            done = self._state.step_count == 2
            return Seen(text="more", reward=letters / max(1, len(said)), done=done)

        @property
        def state(self):
            return self._state

    app = create_fastapi_app(Letters, Said, Seen, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def env(port: int, world_url: str, log: str) -> None:
    os.environ["TOKEN_LOG"] = log
    from verifiers.v1.serve import serve_env

    metrics = {"log_tokens": {"fn": f"{Path(__file__).resolve()}:log_tokens"}}
    config = {
        "taskset": {"id": "openenv", "base_url": world_url, "task": {"metrics": metrics}},
        "player": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    serve_env(max_workers=1, address=f"tcp://127.0.0.1:{port}", config_data=config)


if __name__ == "__main__":
    what, port, *more = sys.argv[1:]
    {"world": world, "env": env}[what](int(port), *more)
