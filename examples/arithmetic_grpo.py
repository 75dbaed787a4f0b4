"""GRPO on two-digit addition: a tiny model, made on the spot, learns to add on a laptop's CPU.

    areal run examples/arithmetic_grpo.py                  # learns
    areal run examples/arithmetic_grpo.py control=true     # rewards dealt at random: must not learn

One file is the whole experiment. `prepare_model` makes the model and warms it up with a few
supervised steps; `reward_fn` scores one answer; `AdditionWorkflow` turns a problem into a group of
samples; `main` is the training loop. Rollout and reward workers load this same file, without torch.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    LLMRequest,
    RemoteSGLangEngine,
    RolloutWorkflow,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
    make_trajectory,
    shuffle_rewards,
)
from areal.datasets.arithmetic import addition


@dataclass
class WarmStart:
    """A short supervised start: reinforcement needs some right answers to reinforce."""

    steps: int = 170
    batch_size: int = 256
    lr: float = 2e-3


@dataclass
class Config(GRPOConfig):
    """The experiment file's schema: GRPOConfig and what this recipe adds."""

    control: bool = False
    """Deal each batch's rewards at random: held-out accuracy must then stay where it was."""
    train_problems: int = 6000
    heldout_problems: int = 500
    warm_start: WarmStart = field(default_factory=WarmStart)


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Disjoint train and held-out rows: {"messages": "94+27=", "answer": "121"}."""
    return addition(
        2, train=config.train_problems, heldout=config.heldout_problems, seed=config.seed
    )


# -- reward: what is right --------------------------------------------------------------------


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the exact sum, else 0. Runs in a sandboxed reward worker."""
    return float(completions.strip() == answer)


# -- workflow: how a problem becomes trajectories ----------------------------------------------


class AdditionWorkflow(RolloutWorkflow):
    """Samples a group of answers to one problem and scores them. Runs in a rollout worker."""

    def __init__(self, gconfig: GenerationHyperparameters):
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        prompt_ids = engine.tokenizer.apply_chat_template(data["messages"])
        request = LLMRequest(prompt_ids, self.gconfig, affinity_key=engine.new_affinity_key())
        responses = await asyncio.gather(
            *[engine.agenerate(request) for _ in range(self.gconfig.n_samples)]
        )
        outputs = [response.output_tokens for response in responses]
        texts = engine.tokenizer.decode_batch(outputs, skip_special_tokens=True)
        rewards = await engine.score(reward_fn, completions=texts, data=data)
        return [
            make_trajectory(response, reward, text)
            for response, reward, text in zip(responses, rewards, texts, strict=True)
        ]


# -- loop: how trajectories become a better policy ---------------------------------------------


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = problems(config)

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = AdditionWorkflow(config.gconfig)
    one_sample = AdditionWorkflow(GenerationHyperparameters(max_new_tokens=8))
    dataloader = StatefulLoader(train, seed=config.seed)
    weight_update_meta = WeightUpdateMeta.from_disk()

    rollout.evaluate(heldout, one_sample, name="heldout_before")
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        if config.control:
            shuffle_rewards(batch, seed=step)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(weight_update_meta)
    rollout.evaluate(heldout, one_sample, name="heldout_after")


# -- model: made on the spot, once -------------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Makes the 0.6 M parameter Qwen2 and teaches it the form (and some of the sums)."""
    from areal.engines.sft import warm_start
    from areal.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = make_tiny_model(Path(config.model.path).with_suffix(".fresh"), seed=config.seed)
    train, _ = problems(config)
    warm_start(
        fresh,
        config.model.path,
        examples=[[*row["messages"], {"role": "assistant", "content": row["answer"]}] for row in train],
        steps=config.warm_start.steps,
        batch_size=config.warm_start.batch_size,
        lr=config.warm_start.lr,
        seed=config.seed,
    )
