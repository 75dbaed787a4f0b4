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

    target_loss: float = 0.5
    """Stop there: about every third sampled answer is right."""
    max_steps: int = 600
    batch_size: int = 128
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
        request = LLMRequest(prompt_ids, self.gconfig)
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
    """Makes the 0.6 M parameter Qwen2 and teaches it the form, and some of the sums."""
    import random

    from areal.config import OptimizerConfig, TrainEngineConfig
    from areal.engines.sft import FSDPLMEngine, pack_examples
    from areal.models.tiny import make_tiny_model
    from areal.tokenizer import Tokenizer

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    warm, fresh = config.warm_start, Path(f"{config.model.path}-fresh")
    make_tiny_model(fresh, seed=config.seed)
    optimizer = OptimizerConfig(
        lr=warm.lr, beta2=0.95, weight_decay=0.0, warmup_steps_proportion=0.07
    )
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=warm.max_steps)
    tokenizer = Tokenizer.load(fresh)
    examples = [
        (
            tokenizer.apply_chat_template(row["messages"]),
            [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id],
        )
        for row in problems(config)[0]
    ]
    rng, loss = random.Random(config.seed), 5.0
    for step in range(warm.max_steps):
        stats = engine.train_lm(pack_examples(rng.sample(examples, warm.batch_size)))
        loss += 0.1 * (stats["loss"] - loss)
        if step % 20 == 0 or loss <= warm.target_loss:
            print(f"warm start, step {step + 1}: loss {loss:.3f}", flush=True)
        if loss <= warm.target_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
