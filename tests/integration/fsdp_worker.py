"""What each rank of test_fsdp_ranks.py does: train on its share of seeded batches.

Arguments: a folder where ranks meet, a JSON list of [ranks, jobs], a job being {config, seeds,
groups, out, save_at?, save_to?, resume?, gradients?, background?, one_token?, hub?, critic?}. Each
is run by a fresh engine. With `critic`, its settings, there is one beside the actor, whose weights
come out, too. With `one_token` the batch begins with a sequence of one token, which is in no loss.
With `hub` the trained weights are saved in that folder, and what is loaded from it again is what
comes out.
"""

import json
import sys
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from tests.integration.forked_ranks import run_launches
from tests.unit.areal_torch.engines.hub_families import scatter
from tests.unit.areal_torch.engines.train_fixtures import gradients, make_batch

from areal.config.training import CriticConfig, PPOActorConfig
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.ppo import PPOActor
from areal_torch.engines.ppo_value import PPOCritic
from areal_torch.training.ranks import gather_json


def share_of(batch, rank, world_size):
    """Return the groups of a batch that belong to a rank."""
    units = packing.group_units(batch)
    lengths = packing.sequence_lengths(batch).tolist()
    chosen = packing.assign_groups([sum(lengths[i] for i in u) for u in units], world_size)[rank]
    return packing.select(batch, [i for number in chosen for i in units[number]])


def batch_of(job, seed):
    batch = make_batch(seed, groups=job["groups"])
    if job.get("one_token"):
        first = {key: value[:1] for key, value in packing.unpack(batch)[0].items()}
        groups = [-1, *batch["group_index"].tolist()]
        batch = packing.pack([first, *packing.unpack(batch)], groups)
    return batch


def run(job):
    config = TypeAdapter(PPOActorConfig).validate_python(job["config"])
    engine = FSDPEngine(config)
    engine.initialize(total_train_steps=len(job["seeds"]))
    actor = PPOActor(config, engine)
    critic = None
    if "critic" in job:
        values = FSDPEngine(CriticConfig(**job["critic"]).engine(config))
        values.initialize(total_train_steps=len(job["seeds"]))
        engine.attach("critic", values)
        critic = PPOCritic(values, config.ppo_n_minibatches)
    begin = 0
    torch.manual_seed(len(job["seeds"]))
    if "resume" in job:
        begin = engine.load_checkpoint(job["resume"])["step"]
        assert engine.get_version() == begin
        if critic is not None:
            engine.load_attached("critic", job["resume"])
    rows = []
    for step, seed in enumerate(job["seeds"]):
        if step < begin:
            continue
        batch = share_of(batch_of(job, seed), engine.rank, engine.world_size)
        if critic is not None:
            batch["values"] = critic.compute_values(batch)
        actor.compute_advantages(batch)
        if job.get("one_token"):
            batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        if job.get("gradients"):
            found, stats = gradients(engine, batch, actor._loss)
            if engine.rank == 0:
                save_file({k: v.contiguous() for k, v in found.items()}, job["out"])
        else:
            stats = actor.ppo_update(batch)
            if critic is not None:
                told = critic.ppo_update(batch)
                stats |= {f"critic/{name}": value for name, value in told.items()}
        rows.append(stats)
        engine.set_version(step + 1)
        if job.get("save_at") == step + 1:
            background = bool(job.get("background"))
            saved = engine.save_checkpoint(
                job["save_to"], {"step": step + 1}, background=background
            )
    if "save_at" in job:
        saved.result(timeout=60)
    # Rank 0's statistics speak for all ranks.
    everyone = gather_json(
        [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in rows]
    )
    assert all(other == everyone[0] for other in everyone)
    if "hub" in job:
        engine.save(job["hub"])
        scatter(engine.model.hf)
        engine.load(job["hub"])
    if not job.get("gradients"):
        tensors = dict(engine.iter_full_tensors())
        if critic is not None:
            own = critic.engine.iter_full_tensors()
            tensors |= {f"critic.{name}": tensor for name, tensor in own}
        assert bool(tensors) == (engine.rank == 0)
        if engine.rank == 0:
            save_file(tensors, job["out"])
    if engine.rank == 0:
        Path(job["out"] + ".json").write_text(json.dumps(rows))
    if critic is not None:
        critic.engine.destroy()
    engine.destroy()


if __name__ == "__main__":
    run_launches(sys.argv[1], json.loads(sys.argv[2]), run)
