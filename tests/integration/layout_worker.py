"""Ranks of test_layouts.py: they train tiny models in one layout after the other.

Arguments: a folder where ranks meet, a JSON list of [ranks, jobs], a job being {config, out, seeds,
gradients?, save_to?, resume?, export?, kernel?, tested?, free?, images?, routed?}. All ranks of a
share get the same groups. An export of a model with adapters also writes them, to `out`.adapters.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tests.integration.forked_ranks import run_launches
from tests.integration.fsdp_worker import share_of
from tests.unit.areal_torch.engines.image_batches import image_batch
from tests.unit.areal_torch.engines.model.attention.flash_on_cpu import torch_kernels
from tests.unit.areal_torch.engines.train_fixtures import gradients, make_batch, routes_of

from areal.config.training import PPOActorConfig
from areal.weights.adapters import split_name
from areal_torch.algorithms.packing import ROUTES
from areal_torch.engines import step
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import self_test
from areal_torch.engines.model.attention import dispatch
from areal_torch.engines.ppo import PPOActor
from areal_torch.training.ranks import gather_json


def run(job):
    """One job: with a kernel of torch, over what it computes written out for a CPU; or after a
    self-test of some layers only, as of a big model; or with so much free memory.
    """
    with ExitStack() as changes:
        if "kernel" in job:
            changes.enter_context(patch.object(dispatch, "choose", lambda *_: job["kernel"]))
            changes.enter_context(torch_kernels())
        if "tested" in job:
            changes.enter_context(patch.multiple(self_test, WHOLE=0, _FEWEST_LAYERS=job["tested"]))
        if "free" in job:
            changes.enter_context(patch.object(step, "free_bytes", lambda _: job["free"]))
        train(job)


def train(job):
    config = TypeAdapter(PPOActorConfig).validate_python(job["config"])
    engine = FSDPEngine(config)
    engine.initialize(total_train_steps=10)
    actor = PPOActor(config, engine)
    begin = engine.load_checkpoint(job["resume"])["step"] if "resume" in job else 0
    rows = []
    for seed in job["seeds"][begin:]:
        made = {"groups": 5, "vocabulary": 96}
        whole = image_batch(seed) if job.get("images") else make_batch(seed, **made)
        if job.get("routed"):
            whole[ROUTES] = routes_of(whole, seed, **job["routed"])
        batch = share_of(whole, engine.mesh.share, engine.mesh.layout.data)
        actor.compute_advantages(batch)
        if job.get("gradients"):
            found, stats = gradients(engine, batch, actor._loss)
        else:
            stats = actor.ppo_update(batch)
            found = None
        rows.append({k: v for k, v in stats.items() if not k.endswith("seconds")})
        rows[-1]["gathers"] = engine.step._gathers_gradients
    if "save_to" in job:
        engine.save_checkpoint(job["save_to"], {"step": len(job["seeds"])}).result(timeout=60)
    if "export" in job:
        found = dict(engine.iter_full_tensors())
        if config.lora is not None:
            export_adapters(engine, config, found, job["out"] + ".adapters")
    if found is None:
        found = {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
            for name, p in engine.model.named_parameters()
        }
    everyone = gather_json(rows)
    assert all(other == everyone[0] for other in everyone), everyone
    if engine.rank == 0:
        save_file({k: v.detach().contiguous() for k, v in found.items()}, job["out"])
        Path(job["out"] + ".json").write_text(json.dumps(rows))
    engine.destroy()


def export_adapters(engine, config, merged, out):
    """What is published as adapters, gathered from all ranks, makes what is published merged."""
    work = engine.exporter.gathering(None, adapters=True)
    adapters = {name: t.clone() for bucket in work.buckets() for name, t in bucket}
    if engine.rank != 0:
        assert not adapters
        return
    start = load_file(f"{config.path}/model.safetensors")
    scale, adapted = config.lora.alpha / config.lora.rank, 0
    for name, down in adapters.items():
        if ".lora_A." in name:
            weight = f"{split_name(name)[0]}.weight"
            product = scale * adapters[name.replace("lora_A", "lora_B")] @ down
            whole = start[weight].to(product.dtype) + product
            assert (merged[weight] - whole).abs().max() < 1e-6, weight
            assert product.abs().max() > 1e-4, weight
            adapted += 1
    assert 2 * adapted == len(adapters) > 0
    save_file(adapters, out)


if __name__ == "__main__":
    run_launches(sys.argv[1], json.loads(sys.argv[2]), run)
