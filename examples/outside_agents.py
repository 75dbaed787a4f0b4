"""Trains a model with agents that the run does not start: they open sessions at the gateway.

    areal run examples/outside_agents.py                                  # waits for agents
    python examples/outside_agents.py http://127.0.0.1:PORT $(areal token)   # the agents

`areal run` prints the gateway's address, which is also the dashboard's. `attempt` stands for
code that you already have: it calls a model with the `openai` package. `play` opens a session for
each attempt and ends it with the attempt's reward, the share of digits in the answers.
"""

import asyncio
import sys
import uuid
from pathlib import Path

# -- outside the run: agents that import nothing from areal ----------------------------------------


async def attempt(base_url: str, api_key: str) -> float:
    """Makes one attempt of two calls and returns its reward."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=10) as client:
        messages = [{"role": "user", "content": "digits"}]
        first = (await client.chat.completions.create(model="any", messages=messages)).choices[0]
        messages += [first.message, {"role": "user", "content": "more"}]
        second = (await client.chat.completions.create(model="any", messages=messages)).choices[0]
    text = (first.message.content or "") + (second.message.content or "")
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


async def play(gateway: str, token: str, attempts: int) -> None:
    """Opens a group of sessions, makes an attempt in each, and ends each with its reward."""
    import httpx

    async def ask(path: str, key: str, body: dict) -> httpx.Response:
        """Sends a request; repeats it while no session is free or the gateway cannot be reached."""
        # With this key, a request that is repeated because its answer was lost opens nothing new.
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
        while True:
            try:
                reply = await http.post(gateway + path, json=body, headers=headers)
            except httpx.TransportError:
                await asyncio.sleep(1.0)
                continue
            if reply.status_code not in (429, 502, 503, 504):
                return reply.raise_for_status()
            await asyncio.sleep(float(reply.headers.get("Retry-After", 1)))

    async def one(session: dict[str, str]) -> None:
        reward = await attempt(session["base_url"], session["api_key"])
        await ask(f"/sessions/{session['id']}/end", session["api_key"], {"reward": reward})

    async with httpx.AsyncClient(timeout=60.0) as http:
        opened = (await ask("/v1/sessions", token, {"n": attempts})).json()
        await asyncio.gather(*(one(session) for session in opened["sessions"]))


async def play_on(gateway: str, token: str, at_once: int = 8, attempts: int = 4) -> None:
    """Plays groups, several at once, until the process is stopped."""
    import httpx
    import openai

    async def player() -> None:
        while True:
            try:
                await play(gateway, token, attempts)
            except (openai.APIStatusError, httpx.HTTPStatusError) as error:
                if error.response.status_code != 410:
                    raise
                print(error, flush=True)  # the session has ended, or the run is over

    await asyncio.gather(*(player() for _ in range(at_once)))


# -- what trains them ------------------------------------------------------------------------------


def main(argv):
    from areal import (
        FSDPPPOActor,
        GRPOConfig,
        RemoteSGLangEngine,
        WeightUpdateMeta,
        load_expr_config,
    )

    config, _ = load_expr_config(argv, GRPOConfig)
    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    for _ in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(None)  # no rows: sessions of outside agents
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())


def prepare_model(config) -> None:
    """Creates an untrained Qwen2 of 0.6 M parameters."""
    from areal_torch.models.tiny import make_tiny_model

    if not (Path(config.model.path) / "model.safetensors").exists():
        make_tiny_model(Path(config.model.path), seed=config.seed)


if __name__ == "__main__":
    asyncio.run(play_on(sys.argv[1].rstrip("/"), sys.argv[2] if len(sys.argv) > 2 else ""))
