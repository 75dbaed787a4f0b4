r"""GRPO on a task of reasoning-gym, from easy questions to hard ones.

    pip install reasoning-gym==0.1.25
    areal run examples/reasoning_gym.py                    # short words, spelled backward, on a CPU
    areal run examples/reasoning_gym.py control=true       # control run: shuffled rewards
    areal run examples/reasoning_gym.py model.path=hf://Qwen/Qwen2.5-1.5B-Instruct \
        task=basic_arithmetic options={} model.context_length=2048 gconfig.max_new_tokens=512

The library reasoning-gym creates the questions and scores the answers. Any of its tasks works. The
function `difficulty` decides which questions come first.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal import (
    EnvWorkflow,
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    RemoteSGLangEngine,
    WeightUpdateMeta,
    load_expr_config,
    shuffle_rewards,
)
from areal.datasets.difficulty import CurriculumLoader
from areal.workflows.gyms import reasoning_gym_rows


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    control: bool = False
    """Control run: shuffle the rewards of each batch, so that the reward cannot rise."""
    task: str = "spell_backward"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, as reasoning-gym names them."""
    train_questions: int = 1500
    heldout_questions: int = 200
    warm_start_loss: float = 1.2
    """The warm-up ends at this loss; the model then knows the format."""
    warm_start_steps: int = 400
    """The warm-up ends after this many steps at the latest."""


def rows_of(config: Config) -> tuple[list[dict], list[dict]]:
    """Returns train and held-out rows; no question is in both lists."""
    return reasoning_gym_rows(
        config.task,
        train=config.train_questions,
        heldout=config.heldout_questions,
        seed=config.seed,
        **config.options,
    )


def difficulty(row: dict) -> float:
    """Returns the length of the question: longer questions are assumed to be harder."""
    return len(row["prompt"])


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = rows_of(config)

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    environment = f"reasoning_gym:{config.task}"
    workflow = EnvWorkflow(environment, config.gconfig)
    once = GenerationHyperparameters(max_new_tokens=config.gconfig.max_new_tokens)
    dataloader = CurriculumLoader(train, difficulty, seed=config.seed)

    rollout.evaluate(heldout, EnvWorkflow(environment, once), name="heldout_before")
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        if config.control:
            shuffle_rewards(batch, seed=step)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, EnvWorkflow(environment, once), name="heldout_after")


# -- model: created once, at the start ----------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters and teaches it what an answer looks like."""
    import random

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = make_tiny_model(Path(f"{config.model.path}-fresh"), seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.07)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer = Tokenizer.load(fresh)
    examples = [
        (
            tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}]),
            [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id],
        )
        for row in rows_of(config)[0]
    ]
    rng, loss = random.Random(config.seed), 5.0
    for step in range(config.warm_start_steps):
        loss += 0.1 * (engine.train_lm(pack_examples(rng.sample(examples, 64)))["loss"] - loss)
        if step % 25 == 0:
            print(
                f"warm start, step {step}: loss {loss:.2f} (until {config.warm_start_loss})",
                flush=True,
            )
        if loss <= config.warm_start_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
