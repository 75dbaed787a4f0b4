"""Summaries scored by a reward model: GRPO with learned preferences instead of a rule.

    areal run examples/tldr.py                             # two tiny models, on a laptop's CPU
    areal run examples/tldr.py model.path=… judge=runs/reward-model/trial0/model

`prepare_model` creates two models. The writer knows the format of a summary. The judge is a reward
model, trained on pairs as in examples/reward_model.py. The loop trains the writer on the judge's
scores only. Before and after training, the recipe measures how many summaries are right, on posts
that neither model has read.
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
)
from areal.datasets.summaries import posts, preferred


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    judge: str = ""
    """Folder of the reward model."""
    train_posts: int = 4000
    heldout_posts: int = 300
    warm_start_loss: float = 0.5
    """The writer's warm-up ends at this loss, at which about 3 of 4 summaries are right."""
    warm_start_steps: int = 300
    """The warm-up ends after this many steps at the latest."""
    judge_steps: int = 500
    """Number of steps that train the judge on pairs."""


def rows_of(config: Config) -> tuple[list[dict], list[dict]]:
    """Train and held-out posts: {"messages": […"sea oak fox oak…"], "summary": "oak"}."""
    rows = posts(config.train_posts + config.heldout_posts, config.seed)
    return rows[config.heldout_posts :], rows[: config.heldout_posts]


def is_right(prompt, completions, prompt_ids, completion_ids, summary, **data) -> float:
    """1 for the right summary, else 0. Used only on held-out posts."""
    return float(completions.strip() == summary)


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = rows_of(config)
    asked = [{"messages": row["messages"]} for row in train]  # without the right summary

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    # The writer before training: staying close to it keeps the writer from exploiting the judge.
    reference = FSDPPPOActor(config.ref)
    workflow = RLVRWorkflow("reward_model", config.gconfig, reward_kwargs={"path": config.judge})
    once = GenerationHyperparameters(max_new_tokens=12)
    judged = RLVRWorkflow("reward_model", once, reward_kwargs={"path": config.judge})
    truth = RLVRWorkflow(is_right, once)
    dataloader = StatefulLoader(asked, seed=config.seed)

    unseen = [{"messages": row["messages"]} for row in heldout]
    rollout.evaluate(heldout, truth, name="heldout_before")
    rollout.evaluate(unseen, judged, name="score_before")
    for _ in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        batch["reference_logprobs"] = reference.compute_logprobs(batch)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, truth, name="heldout_after")
    rollout.evaluate(unseen, judged, name="score_after")


# -- models: created once, at the start ---------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Creates two Qwen2 models of 0.6 M parameters: the judge and the writer."""
    from areal_torch.models.tiny import make_tiny_model

    for path, teach in ((config.judge, teach_judge), (config.model.path, teach_writer)):
        if not (Path(path) / "model.safetensors").exists():
            fresh = make_tiny_model(Path(f"{path}-fresh"), seed=config.seed)
            teach(config, fresh, path)


def teach_judge(config: Config, fresh: Path, path: str) -> None:
    """Trains a reward model on pairs of summaries (Bradley-Terry)."""
    import random

    import torch

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.datasets.chats import pair_unit
    from areal.tokenizer import Tokenizer
    from areal_torch.algorithms import packing
    from areal_torch.engines.fsdp import FSDPEngine
    from areal_torch.engines.reward_model import train_reward_model

    optimizer = OptimizerConfig(lr=1e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.1)
    engine = FSDPEngine(TrainEngineConfig(path=str(fresh), scalar=True, optimizer=optimizer))
    engine.initialize(total_train_steps=config.judge_steps)
    tokenizer, rng = Tokenizer.load(fresh), random.Random(config.seed)
    pairs = [pair_unit(tokenizer, row) for row in preferred(rows_of(config)[0], config.seed)]
    for step in range(config.judge_steps):
        units = rng.sample(pairs, 48)
        batch = packing.pack([each for unit in units for each in unit], [n // 2 for n in range(96)])
        batch["chosen"] = torch.arange(96) % 2 == 0
        stats = train_reward_model(engine, batch)
        if step % 50 == 0:
            print(f"judge, step {step}: accuracy {stats['accuracy']:.2f}", flush=True)
    engine.save(path)
    engine.destroy()


def teach_writer(config: Config, fresh: Path, path: str) -> None:
    """Takes a few supervised steps that teach the writer what a summary looks like."""
    import random

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples

    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.07)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer, rng = Tokenizer.load(fresh), random.Random(config.seed)
    examples = [
        (
            tokenizer.apply_chat_template(row["messages"]),
            [*tokenizer.encode(row["summary"]), tokenizer.eos_token_id],
        )
        for row in rows_of(config)[0]
    ]
    loss = 5.0
    for step in range(config.warm_start_steps):
        loss += 0.1 * (engine.train_lm(pack_examples(rng.sample(examples, 64)))["loss"] - loss)
        if step % 25 == 0:
            print(
                f"writer, step {step}: loss {loss:.2f} (until {config.warm_start_loss})", flush=True
            )
        if loss <= config.warm_start_loss:
            break
    engine.save(path)
    engine.destroy()
