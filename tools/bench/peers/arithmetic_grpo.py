"""The recipe of tools/bench/end_to_end.py: GRPO on addition, its model given, nothing evaluated."""

from dataclasses import dataclass, replace

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    LLMRequest,
    RemoteSGLangEngine,
    RolloutWorkflow,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
    make_trajectory,
)
from areal.datasets.arithmetic import addition


@dataclass
class Config(GRPOConfig):
    """The experiment file's schema."""

    whole_length: bool = False
    """Every sample has gconfig.max_new_tokens tokens."""
    save_every: int = 0
    """Every this many steps the model is saved for the bench; 0: never."""
    saved: str = ""
    """The folder with these models."""


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the right sum (leading zeros allowed), else 0."""
    return float(completions.strip().lstrip("0") == answer)


class AdditionWorkflow(RolloutWorkflow):
    """A group of answers to one problem."""

    def __init__(self, gconfig, whole_length):
        least = gconfig.max_new_tokens
        self.gconfig = replace(gconfig, min_new_tokens=least) if whole_length else gconfig

    async def arun_episode(self, engine, data):
        """One problem in, one group of scored trajectories out."""
        prompt_ids = engine.tokenizer.apply_chat_template(data["messages"])
        responses = await engine.agenerate_group(LLMRequest(prompt_ids, self.gconfig))
        outputs = [response.output_tokens for response in responses]
        texts = engine.tokenizer.decode_batch(outputs, skip_special_tokens=True)
        rewards = await engine.score(reward_fn, completions=texts, data=data)
        return [
            make_trajectory(response, reward, text)
            for response, reward, text in zip(responses, rewards, texts, strict=True)
        ]


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, _ = addition(2, train=6000, heldout=500, seed=config.seed)
    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = AdditionWorkflow(config.gconfig, config.whole_length)
    dataloader = StatefulLoader(train, seed=config.seed)
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
        if config.save_every and (step + 1) % config.save_every == 0:
            actor.engine.save(f"{config.saved}/{step + 1}")
