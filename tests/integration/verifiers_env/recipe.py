"""Three steps on episodes that an EnvServer plays."""

from dataclasses import dataclass
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    StatefulLoader,
    VerifiersWorkflow,
    WeightUpdateMeta,
    load_expr_config,
)
from areal.agents.verifiers import verifiers_rows


@dataclass
class Config(GRPOConfig):
    server: str = ""
    python: str = ""
    world: str = ""
    """URL of the OpenEnv server that the task set connects to."""


def prepare_model(config):
    from areal_torch.models.tiny import make_tiny_model

    if not (Path(config.model.path) / "model.safetensors").exists():
        make_tiny_model(config.model.path, seed=config.seed)


def main(argv):
    config, _ = load_expr_config(argv, Config)
    taskset = {
        "id": "openenv",
        "base_url": config.world,
        "resets": [{"seed": n} for n in range(40)],
    }
    rows = verifiers_rows(config.python, taskset, count=32)
    assert [row["reset"] for row in rows] == taskset["resets"][:32]
    tokenizer = str(Path(config.model.path).resolve())
    workflow = VerifiersWorkflow(config.server, config.gconfig, tokenizer=tokenizer, timeout_s=240)
    rollout, actor = RemoteSGLangEngine(config.rollout), FSDPPPOActor(config.actor)
    dataloader = StatefulLoader(rows, seed=config.seed)
    for _ in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
