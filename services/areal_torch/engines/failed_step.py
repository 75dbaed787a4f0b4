"""Keeps the batch of a step whose gradient was not finite, and repeats that step.

    failed_step_<k>/
        failure.json             step, policy version, cause, task ids by rank, and the settings of
                                 the model that failed: `actor` or `critic`
        recipe                   the recipe, if the loss is its own
        rank_<r>.safetensors     the batch of rank r's last optimizer step

`python -m areal_torch.engines.failed_step FOLDER --model DIRECTORY` takes that optimizer step
again, rank by rank, with the weights in DIRECTORY, and says what is not finite.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from areal.config.training import PPOActorConfig, RefConfig, TrainEngineConfig
from areal.errors import InvalidInput, TrainingDiverged
from areal.recipe import find_function, load_recipe, reference, source_of
from areal.runs.run_files import write_atomically
from areal_torch.algorithms import losses
from areal_torch.algorithms.packing import Batch, check_batch
from areal_torch.engines.formulas import Formula
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.ppo import PPOActor
from areal_torch.engines.ppo_value import PPOCritic
from areal_torch.training.ranks import gather_json

if TYPE_CHECKING:
    from areal_torch.training.session import TrainerSession

_MOST_NAMED = 5
_RECIPE = "recipe"


def keep(
    error: TrainingDiverged,
    session: TrainerSession,
    *,
    actor: Mapping[str, Any] | None = None,
    critic: TrainEngineConfig | RefConfig | None = None,
) -> TrainingDiverged:
    """Saves the batch of the failed step in the run folder; collective.

    Args:
        error: The error that ends the run.
        session: Around the recipe.
        actor: `settings_of` the model that failed, if it is the actor.
        critic: Its engine's configuration, if it is the critic.

    Returns:
        The error that also says where the batch is.
    """
    step = session.step + 1
    folder = session.config.run_dir / f"failed_step_{step}"
    loss = (actor or {}).get("loss")
    source = b"" if loss is None else loss["source"]
    if loss is not None:
        actor = {**(actor or {}), "loss": {k: v for k, v in loss.items() if k != "source"}}
    info = {
        "step": step,
        "incarnation": session.incarnation,
        "policy_version": step - 1,
        "ranks": session.world_size,
        "cause": error.cause,
        **({"actor": actor} if critic is None else {"critic": asdict(critic)}),
    }
    where = save_failed_batch(
        folder,
        error.batch,
        info,
        rank=session.rank,
        tasks=session.batch_tasks,
        blamed=error.groups,
        recipe=source,
    )
    return TrainingDiverged(
        f"step {step}: {'' if critic is None else 'critic: '}{error}; {where}; the run ends; "
        f"version {session.step} is the last published one",
        cause=error.cause,
        batch=error.batch,
        groups=error.groups,
    )


def save_failed_batch(
    folder: Path,
    batch: Batch,
    info: Mapping[str, Any],
    *,
    rank: int,
    tasks: Sequence[str],
    blamed: Sequence[int],
    recipe: bytes = b"",
) -> str:
    """Writes what a replay needs; collective.

    Args:
        folder: Created if missing; files of an earlier failure are replaced.
        batch: This rank's batch.
        info: JSON for `failure.json`; rank 0's is written.
        rank: This process's rank.
        tasks: Task of each group, by `group_index`; empty where they are not known.
        blamed: Values of `group_index` of the tasks to name.
        recipe: Source of the recipe whose loss failed; rank 0's is written.

    Returns:
        The end of a sentence, equal on all ranks: where the batch is and which tasks caused the
        failure, or why it could not be written.
    """
    problem = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.detach().cpu().contiguous() for key, value in batch.items()}
        save_file(tensors, folder / f"rank_{rank}.safetensors")
    except (OSError, SafetensorError) as error:
        problem = f"rank {rank}: {error}"
    known = dict(enumerate(tasks))
    present = sorted(set(batch["group_index"].tolist()))
    used = [known[g] for g in present if g in known]
    everyone = gather_json({"task_ids": used, "blamed": [known[g] for g in blamed if g in known]})
    if rank == 0:
        content = {**info, "task_ids": [each["task_ids"] for each in everyone]}
        try:
            if recipe:
                write_atomically(folder / _RECIPE, recipe)
            text = json.dumps(content, indent=2, default=repr)
            write_atomically(folder / "failure.json", text.encode())
        except OSError as error:
            problem = f"rank 0: {error}"
    # No one leaves before the last file is there: a rank that ends takes the others along.
    problems = [each for each in gather_json(problem) if each]
    if problems:
        return f"its batch could not be saved: {problems[0]}"
    named = [task for each in everyone for task in each["blamed"]]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    at_fault = f" (not finite: tasks {', '.join(named[:_MOST_NAMED])}{more})" if named else ""
    return f"its batch is in {folder}{at_fault}"


def load_failed_batch(folder: Path) -> tuple[list[Batch], dict[str, Any]]:
    """Reads the files of a failed step.

    Returns:
        Each rank's batch, and the content of `failure.json`.

    Raises:
        InvalidInput: `folder` is not one, or a file in it is damaged.
    """
    try:
        info: dict[str, Any] = json.loads((folder / "failure.json").read_text("utf-8"))
        files = [folder / f"rank_{rank}.safetensors" for rank in range(int(info["ranks"]))]
        batches = [load_file(file) for file in files]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InvalidInput(
            f"{str(folder)!r}: expected a complete failed_step_<k> folder of a run: {error}"
        ) from None
    for batch in batches:
        check_batch(batch)
    return batches, info


def settings_of(
    config: PPOActorConfig, temperature: float, loss: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The actor's settings as `failure.json` keeps them."""
    own = {} if loss is None else {"loss": loss}
    return {**asdict(config), "temperature": temperature, **own}


def describe_loss(actor: PPOActor, loss: Callable[..., Any] | None = None) -> dict[str, Any] | None:
    """Returns how a replay finds a recipe's own loss; None: it is a built-in one.

    Args:
        actor: Has one, if `loss` is None.
        loss: The one that the failed call was given.
    """
    formula = actor.loss if loss is None else Formula(loss, "loss")
    if formula is actor.builtin_loss:
        return None
    plain = formula.plain
    recipe = source_of(plain)
    of = getattr(plain, "__self__", None)
    found_again = hasattr(plain, "__qualname__") and (of is None or inspect.isclass(of))
    return {
        "name": reference(plain) if found_again else f"<{type(of or plain).__qualname__} object>",
        "arguments": getattr(formula.function, "args", ()),
        "constants": getattr(formula.function, "keywords", {}),
        "file": "" if recipe is None else recipe.file_name,
        "source": b"" if recipe is None else recipe.source,
    }


def _own_loss(folder: Path, said: Mapping[str, Any]) -> Callable[..., Any]:
    """The loss that `describe_loss` described; raises InvalidInput where it cannot be found."""
    name = str(said["name"])
    module: ModuleType = losses
    if said["file"]:
        module = load_recipe((folder / _RECIPE).read_bytes(), str(said["file"]))
    if "<" in name:
        raise InvalidInput(
            f"{str(folder)!r}: the loss {name} of {said['file']}: expected one at the top level of "
            "the recipe, which can be found again"
        )
    return partial(find_function(module, name), *said.get("arguments", ()), **said["constants"])


def replay(folder: Path, model: Path) -> list[str]:
    """Takes the failed optimizer step again, rank by rank, in this process.

    Args:
        folder: `failed_step_<k>`.
        model: A Hugging Face directory: the run's version <policy_version>, or any other of the
            same architecture. A critic's head is 0 if the directory has none.

    Returns:
        For each rank what is not finite, or the loss and the gradient norm. The weights are not
        kept.

    Raises:
        InvalidInput: `folder` or `model` has different content than described.
    """
    from pydantic import TypeAdapter

    batches, info = load_failed_batch(folder)
    is_critic = "critic" in info
    settings = {**info["critic" if is_critic else "actor"], "path": str(model)}
    settings["optimizer"] = {**settings["optimizer"], "max_skipped_steps": 1}
    kind = TrainEngineConfig if is_critic else PPOActorConfig
    config = TypeAdapter(kind).validate_python(settings)
    said = []
    for rank, batch in enumerate(batches):
        engine = FSDPEngine(config)
        engine.initialize()
        engine.set_version(int(info["policy_version"]))
        learner: PPOActor | PPOCritic = PPOCritic(engine, n_minibatches=1)
        if isinstance(config, PPOActorConfig):
            own = _own_loss(folder, settings["loss"]) if settings.get("loss") else None
            learner = PPOActor(config, engine, float(settings["temperature"]), loss=own)
        try:
            stats = learner.take_step(batch)
            said.append(
                f"rank {rank}: finite here: loss {stats['loss']:.6g}, "
                f"gradient norm {stats['grad_norm']:.6g}"
            )
        except TrainingDiverged as error:
            said.append(f"rank {rank}: {error.cause.removeprefix('rank 0: ')}")
        finally:
            engine.destroy()
    return said


def _main() -> None:
    import typer

    from areal.chassis.logging import configure_logging

    def command(folder: Path, model: Path = typer.Option(...)) -> None:  # noqa: B008
        """Takes a failed step again and says what is not finite."""
        configure_logging("failed_step", folder.name, text=True)
        try:
            for line in replay(folder, model):
                typer.echo(line)
        except InvalidInput as error:
            typer.echo(f"failed_step: {error}", err=True)
            raise typer.Exit(2) from None

    typer.run(command)


if __name__ == "__main__":
    _main()
