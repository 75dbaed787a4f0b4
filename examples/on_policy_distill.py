r"""On-policy distillation: a student answers, and learns what its teacher would have said.

    areal run examples/on_policy_distill.py                # two tiny models, on a laptop's CPU
    areal run examples/on_policy_distill.py teacher=http://gpu-7:30000 \
        model.path=hf://Qwen/Qwen3-0.6B actor.optimizer.lr=1e-5 gconfig.max_new_tokens=1024

Servers sample the student's answers. At each token of an answer the student learns the
probabilities of the teacher's `k` likeliest tokens. `teacher` is a model folder, which the
trainer loads as a frozen model, or the URL of an SGLang server or of `areal serve`. Both models
must have the same vocabulary. No reward is needed: the sums are scored only to show progress.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from areal.datasets.arithmetic import addition


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    teacher: str = ""
    """A Hugging Face folder, or a server's URL."""
    k: int = 16
    """Number of teacher tokens that the student learns at each position."""
    direction: Literal["forward", "reverse"] = "reverse"
    train_problems: int = 6000
    heldout_problems: int = 300
    warm_start_loss: float = 0.5
    """The student's warm-up ends at this loss; it then knows the format and some of the sums."""
    teacher_loss: float = 0.06
    """The teacher's supervised training ends at this loss."""
    warm_start_steps: int = 1500
    """The warm-up and the teacher's training end after this many steps at the latest."""


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Train and held-out sums of two-digit numbers."""
    return addition(
        2, train=config.train_problems, heldout=config.heldout_problems, seed=config.seed
    )


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the right sum, else 0."""
    return float(completions.strip().lstrip("0") == answer)


def main(argv):
    config, _ = load_expr_config(argv, Config)
    from areal_torch.engines.distill import Distillation
    from areal_torch.engines.offline import frozen
    from areal_torch.engines.served_teacher import ServedTeacher

    train, heldout = problems(config)
    rollout = RemoteSGLangEngine(config.rollout)
    student = FSDPPPOActor(config.actor)
    served = "://" in config.teacher
    teacher = ServedTeacher(config.teacher) if served else frozen(config.actor, config.teacher)
    distillation = Distillation(config.k, config.direction)
    workflow = RLVRWorkflow(reward_fn, config.gconfig)
    one_sample = RLVRWorkflow(reward_fn, GenerationHyperparameters(max_new_tokens=8))
    dataloader = StatefulLoader(train, seed=config.seed)

    rollout.evaluate(heldout, one_sample, name="heldout_before")
    for _ in range(student.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        distillation.ask(teacher, batch)
        student.distill(batch, distillation)
        student.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, one_sample, name="heldout_after")


# -- models: created once, at the start ---------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Creates student and teacher, two Qwen2 of 0.6 M parameters; trains the teacher longer."""
    teach(config, config.model.path, config.warm_start_loss)
    if "://" not in config.teacher:
        teach(config, config.teacher, config.teacher_loss)


def teach(config: Config, path: str, until: float) -> None:
    """Takes supervised steps on the sums until the loss is low enough."""
    import random

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    if (Path(path) / "model.safetensors").exists():
        return
    fresh = make_tiny_model(Path(f"{path}-fresh"), seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.02)
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
        if step % 50 == 0:
            print(f"{path}, step {step}: loss {loss:.2f} (until {until})", flush=True)
        if loss <= until:
            break
    engine.save(path)
    engine.destroy()
