"""Vision: a tiny vision-language model learns to count squares in pictures, with GRPO.

    areal run examples/clevr_count.py                      # up to 2 squares, on a laptop's CPU
    areal run examples/clevr_count.py control=true         # control run: shuffled rewards
    areal run examples/clevr_count.py model.path=hf://Qwen/Qwen2.5-VL-3B-Instruct most=5 \
        model.context_length=2048 gconfig.max_new_tokens=256

Rows have `images`. Servers and trainer get the same files and turn them into the same patches, and
gradients reach the vision tower. 150 steps raise held-out accuracy from 0.81 to 0.96 (seed 1).
"""

from dataclasses import dataclass
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
    shuffle_rewards,
)
from areal.datasets.counting import counting


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    control: bool = False
    """Control run: shuffle the rewards of each batch, so that accuracy cannot rise."""
    most: int = 2
    """Maximum number of squares in a picture."""
    train_pictures: int = 4000
    heldout_pictures: int = 300
    warm_start_loss: float = 0.2
    """The warm-up ends at this loss. Above 0.23 the model cannot yet tell one square from two, and
    reinforcement learning would settle on one answer for both."""
    warm_start_steps: int = 600
    """The warm-up ends after this many steps at the latest."""


def rows_of(config: Config) -> tuple[list[dict], list[dict]]:
    """Train and held-out rows: {"prompt": "squares?", "images": [PNG], "answer": "2"}.

    There is one picture without squares, and few with one: these are in both parts.
    """
    rows = counting(
        config.train_pictures + config.heldout_pictures, most=config.most, seed=config.seed
    )
    return rows[config.heldout_pictures :], rows[: config.heldout_pictures]


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the right count, else 0. Runs in a reward worker."""
    return float(completions.strip() == answer)


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = rows_of(config)

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = RLVRWorkflow(reward_fn, config.gconfig)
    one_sample = RLVRWorkflow(reward_fn, GenerationHyperparameters(max_new_tokens=4))
    dataloader = StatefulLoader(train, seed=config.seed)

    rollout.evaluate(heldout, one_sample, name="heldout_before")
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        if config.control:
            shuffle_rewards(batch, seed=step)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, one_sample, name="heldout_after")


# -- model: created once, at the start ----------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Creates a Qwen2-VL of 0.8 M parameters and trains it on some pictures and their counts."""
    import random

    import numpy as np

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal.types import Trajectory, TrajectoryGroup
    from areal_torch.engines.images import pack_groups_with_images
    from areal_torch.engines.sft import FSDPLMEngine
    from areal_torch.models.tiny import make_tiny_seeing_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = make_tiny_seeing_model(f"{config.model.path}-fresh", seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.07)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer = Tokenizer.load(fresh)

    def example(row: dict) -> TrajectoryGroup:
        asked = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": asked}])
        answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        mask = np.array([False] * len(prompt) + [True] * len(answer))
        zeros = np.zeros(len(mask), np.float32)
        ids = np.array([*prompt, *answer], np.int32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        one = Trajectory("", ids, mask, zeros, versions, zeros, images=tuple(row["images"]))
        return TrajectoryGroup("", [one])

    examples = [example(row) for row in rows_of(config)[0]]
    rng, loss = random.Random(config.seed), 3.0
    for step in range(config.warm_start_steps):
        batch = pack_groups_with_images(rng.sample(examples, 64), fresh)
        loss += 0.1 * (engine.train_lm(batch)["loss"] - loss)
        if step % 25 == 0:
            print(
                f"warm start, step {step}: loss {loss:.2f} (until {config.warm_start_loss})",
                flush=True,
            )
        if loss <= config.warm_start_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
