"""GRPO on two-digit addition: a tiny model, created at the start, learns to add on a laptop's CPU.

    areal run examples/arithmetic_grpo.py                  # learns
    areal run examples/arithmetic_grpo.py control=true     # control run: shuffled rewards

One file is the whole experiment. `prepare_model` creates the model and warms it up with supervised
steps; `reward_fn` scores one answer; `AdditionWorkflow` turns a problem into a group of samples;
`main` is the training loop. Rollout and reward workers import this file too, so torch is imported
only where it is used.
"""

from dataclasses import dataclass
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
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    control: bool = False
    """Control run: shuffle the rewards of each batch, so that accuracy cannot rise."""
    train_problems: int = 6000
    heldout_problems: int = 500
    warm_start_loss: float = 0.4
    """The warm-up ends at this loss, at which about 2 of 5 sampled answers are right."""
    warm_start_steps: int = 600
    """The warm-up ends after this many steps at the latest."""


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Disjoint train and held-out rows: {"messages": "94+27=", "answer": "121"}."""
    return addition(
        2, train=config.train_problems, heldout=config.heldout_problems, seed=config.seed
    )


# -- reward: what is right --------------------------------------------------------------------


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the right sum (leading zeros allowed), else 0. Runs in a reward worker."""
    return float(completions.strip().lstrip("0") == answer)


# -- workflow: how a problem becomes trajectories ----------------------------------------------


class AdditionWorkflow(RolloutWorkflow):
    """Samples a group of answers to one problem and scores them. Runs in a rollout worker."""

    def __init__(self, gconfig: GenerationHyperparameters):
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        """Turns one problem into one group of scored trajectories."""
        prompt_ids = engine.tokenizer.apply_chat_template(data["messages"])
        responses = await engine.agenerate_group(LLMRequest(prompt_ids, self.gconfig))
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
    examples = [  # with leading zeros, so that each digit has a fixed place, which is easy to learn
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
