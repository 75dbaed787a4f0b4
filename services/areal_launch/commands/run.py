"""`areal run --on …`: runs an experiment on this machine or on a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

from areal.errors import InvalidInput
from areal_launch.clusters.base import Cluster
from areal_launch.commands.stack import Resolved, read_experiment, resolve_run, run_foreground
from areal_launch.doctor.gpus import refuse_unusable
from areal_launch.doctor.settle import settle_here
from areal_launch.stack.recipe_check import refuse_failing
from areal_launch.stack.trial_config import check_unchanged
from areal_launch.view.output import say


def run_on(
    on: str,
    recipe: Path,
    config: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
    keep: bool,
    accept_changes: bool = False,
) -> int:
    """Resolves the experiment and runs it; returns the exit code.

    `on`: local, slurm, ray or kubernetes.
    """
    if on == "kubernetes":
        from areal_launch.commands.kubernetes import run_on_kubernetes

        # The model is on the cluster's volume, so it need not be on this machine.
        experiment, _ = read_experiment(recipe, config, overrides)
        return run_on_kubernetes(experiment, as_json=as_json, keep=keep)
    resolved = resolve_run(recipe, config, overrides)
    if resolved.config.offline and on != "local":
        raise InvalidInput(
            f"--on {on} with allocation_mode {resolved.config.allocation_mode!r}, a trainer "
            "without servers: expected --on local"
        )
    if on == "local":
        return run_here(resolved, as_json=as_json, accept_changes=accept_changes)
    cluster: Cluster
    if on == "slurm":
        from areal_launch.clusters.slurm import SlurmCluster, in_allocation

        if not in_allocation():
            from areal_launch.commands.slurm import submit_and_follow

            # The job fetches the model, because only the job's nodes need it.
            resolved.config.model.path = resolved.source or resolved.config.model.path
            check_unchanged(resolved.config, accept=accept_changes)
            return submit_and_follow(resolved.config, as_json=as_json)
        cluster = SlurmCluster()
    else:
        from areal_launch.clusters.ray import RayCluster

        cluster = RayCluster()
    return run_foreground(
        resolved,
        with_trainer=True,
        as_json=as_json,
        cluster=cluster,
        accept_changes=accept_changes,
    )


def run_here(
    resolved: Resolved, *, as_json: bool, accept_changes: bool = False, only_evaluate: bool = False
) -> int:
    """Runs an experiment on this machine; returns the exit code.

    `only_evaluate`: the recipe ends when it asks for its first batch. Its first training row is
    not tried then, because no one needs it.
    """
    settled = settle_here(resolved.config, resolved.source)
    if settled.why and not as_json:
        say(settled.why)
    refuse_unusable(resolved.config)
    if not only_evaluate:
        asyncio.run(refuse_failing(resolved.config, model_later=resolved.model_later))
    return run_foreground(
        resolved,
        with_trainer=True,
        as_json=as_json,
        cluster=Cluster(settled.servers_part),
        accept_changes=accept_changes,
        only_evaluate=only_evaluate,
    )
