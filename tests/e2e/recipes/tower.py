"""Every second row has one sample that writes a tower of powers, which no reward can evaluate."""

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    LLMRequest,
    RemoteSGLangEngine,
    RolloutWorkflow,
    WeightUpdateMeta,
    load_expr_config,
    make_trajectory,
)
from areal.datasets.arithmetic import addition


class Towers(RolloutWorkflow):
    def __init__(self, gconfig):
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        prompt = engine.tokenizer.apply_chat_template(data["messages"])
        responses = await engine.agenerate_group(LLMRequest(prompt, self.gconfig))
        texts = [f"#### {place}" for place in range(len(responses))]
        if data["tower"]:
            texts[0] = r"\boxed{9^{9^{9^{9}}}}"
        rewards = await engine.score("math", completions=texts, data={"answer": "1"})
        rows = zip(responses, rewards, texts, strict=True)
        return [make_trajectory(response, reward, text) for response, reward, text in rows]


def prepare_model(config):
    from areal_torch.models.tiny import make_tiny_model

    make_tiny_model(config.model.path, seed=config.seed)


def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    rows = addition(1, train=4, heldout=0, seed=0)[0]
    rows = [{**row, "tower": place % 2 == 0} for place, row in enumerate(rows)]
    rollout, actor = RemoteSGLangEngine(config.rollout), FSDPPPOActor(config.actor)
    for _ in range(actor.get_version(), config.total_train_steps):
        batch = rollout.rollout_batch(rows, workflow=Towers(config.gconfig))
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
