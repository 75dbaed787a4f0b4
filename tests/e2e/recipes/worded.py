"""Two steps on rows of a JSON Lines file, whose texts are outside ASCII and hold U+2028."""

from pathlib import Path

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    WeightUpdateMeta,
    load_expr_config,
)
from areal.datasets.rows import load_rows

HERE = Path(__file__).parent


def reward_fn(completions, word, **row):
    assert word == "é数\u2028😀", ascii(word)
    print("rewarded", word)
    return float(len(completions) % 2)


def prepare_model(config):
    from areal_torch.models.tiny import make_tiny_model

    make_tiny_model(config.model.path, seed=config.seed)


def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    with open(HERE / "word.txt") as file:  # noqa: PTH123 - as most people write it
        word = file.read()
    rows = load_rows(HERE / "rows.jsonl")
    assert [row["word"] for row in rows] == [word] * len(rows)
    print("training on", word)
    rollout, actor = RemoteSGLangEngine(config.rollout), FSDPPPOActor(config.actor)
    workflow = RLVRWorkflow(reward_fn, config.gconfig)
    for _ in range(actor.get_version(), config.total_train_steps):
        batch = rollout.rollout_batch(rows, workflow=workflow)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
