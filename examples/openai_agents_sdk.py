"""Trains an agent on two-digit addition. The agent is written with OpenAI's Agents SDK.

    pip install openai-agents==0.24.0                       # where the rollout workers run
    areal run examples/openai_agents_sdk.py                 # trains on a laptop's CPU
    areal run examples/openai_agents_sdk.py control=true    # control run: shuffled rewards

`agent` stands for code that you already have: it asks the model through the SDK's Runner, and asks
again if the answer is wrong. `run` gives it a base URL and a key, and returns the reward. Every
call is recorded with the token ids that the model sampled, and training uses exactly these ids. To
use /v1/responses, replace `OpenAIChatCompletionsModel` with `OpenAIResponsesModel`.
"""

from dataclasses import dataclass
from pathlib import Path

import openai
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner

from areal import (
    AgentWorkflow,
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    RemoteSGLangEngine,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
    shuffle_rewards,
)
from areal.datasets.arithmetic import addition


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    control: bool = False
    """Control run: shuffle the rewards of each batch, so that accuracy cannot rise."""
    train_problems: int = 6000
    heldout_problems: int = 300
    warm_start_loss: float = 0.4
    """The warm-up ends at this loss, at which about 2 of 5 sampled answers are right."""
    warm_start_steps: int = 600
    """The warm-up ends after this many steps at the latest."""


# -- the agent: imports nothing from areal ------------------------------------------------------


async def agent(client: openai.AsyncOpenAI, question: str, right: str) -> int:
    """Asks at most twice; returns 1 or 2, the number of the right try, or 0 if both were wrong."""
    adder = Agent("adder", model=OpenAIChatCompletionsModel("any", client))
    quiet = RunConfig(tracing_disabled=True)  # the SDK would send traces to OpenAI
    said = [{"role": "user", "content": question}]
    for attempt in (1, 2):
        result = await Runner.run(adder, said, run_config=quiet)
        if result.final_output.strip().lstrip("0") == right:
            return attempt
        said = [*result.to_input_list(), {"role": "user", "content": "no"}]
    return 0


# -- what trains it ----------------------------------------------------------------------------


async def run(task, base_url, api_key):
    """Makes one attempt at a row and returns its reward. Runs in a rollout worker."""
    # The URL is plain HTTP: loading certificates would only cost 50 ms of CPU per attempt.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        attempt = await agent(client, task["messages"][0]["content"], task["answer"])
    return {0: 0.0, 1: 1.0, 2: 0.5}[attempt]


def problems(config):
    """Disjoint train and held-out rows: {"messages": "94+27=", "answer": "121"}."""
    return addition(
        2, train=config.train_problems, heldout=config.heldout_problems, seed=config.seed
    )


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = problems(config)

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = AgentWorkflow(run, config.gconfig)
    one_run = AgentWorkflow(run, GenerationHyperparameters(max_new_tokens=8))
    dataloader = StatefulLoader(train, seed=config.seed)

    rollout.evaluate(heldout, one_run, name="heldout_before")
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        if config.control:
            shuffle_rewards(batch, seed=step)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, one_run, name="heldout_after")


# -- model: created once, at the start ----------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters and teaches it the format and some of the sums."""
    import random

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = Path(f"{config.model.path}-fresh")
    make_tiny_model(fresh, seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.07)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer = Tokenizer.load(fresh)
    examples = [
        (
            tokenizer.apply_chat_template(row["messages"]),
            [*tokenizer.encode(row["answer"].zfill(3)), tokenizer.eos_token_id],
        )
        for row in problems(config)[0]
    ]
    rng, loss = random.Random(config.seed), 5.0
    for step in range(config.warm_start_steps):
        loss += 0.1 * (engine.train_lm(pack_examples(rng.sample(examples, 128)))["loss"] - loss)
        if step % 25 == 0:
            print(
                f"warm start, step {step}: loss {loss:.2f} (until {config.warm_start_loss})",
                flush=True,
            )
        if loss <= config.warm_start_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
