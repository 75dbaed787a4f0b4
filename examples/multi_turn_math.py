"""Several tries: a tiny model adds, reads whether its sum was too low or too high, and tries again.

    areal run examples/multi_turn_math.py                  # on a laptop's CPU
    areal run examples/multi_turn_math.py control=true     # control run: shuffled rewards
    areal run examples/multi_turn_math.py turn_discount=1  # no discount for a second try

A right sum at the first try has the reward 1; each earlier wrong try multiplies the reward by
`turn_discount`. The loss covers the answers, not the feedback between them.
"""

from dataclasses import dataclass
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    MultiTurnWorkflow,
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
    """Control run: shuffle the rewards of each batch, so that the reward cannot rise."""
    tries: int = 2
    turn_discount: float = 0.7
    """Factor on the reward for each earlier try."""
    train_problems: int = 6000
    heldout_problems: int = 500
    warm_start_loss: float = 0.4
    """The warm-up ends at this loss, at which about 2 of 5 first answers are right."""
    warm_start_steps: int = 800
    """The warm-up ends after this many steps at the latest."""


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Disjoint train and held-out rows: {"messages": "94+27=", "answer": "121"}."""
    return addition(
        2, train=config.train_problems, heldout=config.heldout_problems, seed=config.seed
    )


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the right sum (leading zeros allowed), else 0. Runs in a reward worker."""
    return float(completions.strip().lstrip("0") == answer)


def feedback(completion, reward, answer, **data) -> str:
    """Returns what the model reads after a wrong answer. Runs in a rollout worker."""
    said = completion.strip()
    if not (said.isascii() and said.isdecimal()):
        return "number?"
    return "more" if int(said) < int(answer) else "less"


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = problems(config)

    def tries(gconfig: GenerationHyperparameters) -> MultiTurnWorkflow:
        return MultiTurnWorkflow(
            reward_fn,
            gconfig,
            max_turns=config.tries,
            feedback=feedback,
            turn_discount=config.turn_discount,
        )

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = tries(config.gconfig)
    one_sample = tries(GenerationHyperparameters(max_new_tokens=config.gconfig.max_new_tokens))
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


def warm_prompt(row: dict, draw) -> list[dict]:
    """The messages before the right answer: the problem, half of the time with a wrong try."""
    if draw.random() < 0.5:
        return row["messages"]
    right = int(row["answer"])
    wrong = str(max(0, right + draw.choice([-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20])))
    said = feedback(wrong, 0.0, row["answer"])
    return [
        *row["messages"],
        {"role": "assistant", "content": wrong.zfill(3)},
        {"role": "user", "content": said},
    ]


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters and teaches it the format and some of the sums."""
    import random

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = make_tiny_model(f"{config.model.path}-fresh", seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.07)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer, draw = Tokenizer.load(fresh), random.Random(config.seed)
    rows, loss = problems(config)[0], 5.0
    for step in range(config.warm_start_steps):
        examples = [  # the loss covers only the last answer, so no wrong answer is taught
            (
                tokenizer.apply_chat_template(warm_prompt(row, draw)),
                [*tokenizer.encode(row["answer"].zfill(3)), tokenizer.eos_token_id],
            )
            for row in draw.sample(rows, min(128, len(rows)))
        ]
        loss += 0.1 * (engine.train_lm(pack_examples(examples))["loss"] - loss)
        if step % 25 == 0:
            print(
                f"warm start, step {step}: loss {loss:.2f} (until {config.warm_start_loss})",
                flush=True,
            )
        if loss <= config.warm_start_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
