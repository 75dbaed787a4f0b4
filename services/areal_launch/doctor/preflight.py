"""What would end a run later, found before anything starts. Looks, and changes nothing.

Each check returns one line naming the key, the value and what was expected; "" when all is well.
`areal run` stops at the first; `areal doctor` shows them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.config.transports import in_object_store
from areal.datasets.rows import READERS
from areal.errors import CannotStart, ConfigError, InvalidInput
from areal.model_directory import refuse_quantized
from areal.types import GenerationHyperparameters
from areal.weights.objects import ObjectStore
from areal.weights.publisher import TransportError
from areal_launch.processes.free_ports import port_is_free
from areal_launch.processes.supervisor import LEAST_BYTES, free_bytes

# A dataset's path that ends so is a file; any other may be a name that the recipe understands.
# Recipes read .csv files themselves.
_FILES = (*READERS, ".csv")


def check_start(
    config: BaseExperimentConfig, *, will_prepare: bool, with_trainer: bool = True
) -> None:
    """Refuses a stack that could not work.

    Args:
        config: Valid, and its model is there or will be made.
        will_prepare: The recipe makes the model, and its tokenizer, first.
        with_trainer: False: nothing is trained, so rows and answers are the clients' business.

    Raises:
        CannotStart: Something is missing or in the way; the first problem, in one line.
        ConfigError: Two values that contradict each other.
    """
    checks: tuple[Callable[[], str], ...] = (
        lambda: run_root_problem(config),
        lambda: weights_problem(config),
        lambda: tokenizer_problem(config, will_prepare=will_prepare),
        lambda: gateway_problem(config),
    )
    if with_trainer:
        checks += (lambda: quantization_problem(config), lambda: dataset_problem(config))
    for check in checks:
        if why := check():
            raise CannotStart(why)
    if with_trainer and (why := answers_problem(config)):
        raise ConfigError(why)


def run_root_problem(config: BaseExperimentConfig) -> str:
    """Returns why the run's folder cannot be created, or would not hold the first files."""
    why = _unwritable(config.run_dir) or _full(config.run_dir)
    return f"run_root {config.run_root!r}: {why}; choose a folder with run_root=DIR" if why else ""


def weights_problem(config: BaseExperimentConfig) -> str:
    """Returns why versions cannot be published."""
    path = config.weight_sync.path
    if in_object_store(path):
        try:
            ObjectStore(path).check_access()
        except TransportError as error:
            return f"weight_sync.path {path!r}: cannot write, list and delete there: {error}"
        return ""
    why = _unwritable(Path(path)) or _full(Path(path)) if path else ""
    return f"weight_sync.path {path!r}: {why}; versions are published there" if why else ""


def tokenizer_problem(config: BaseExperimentConfig, *, will_prepare: bool) -> str:
    """Returns why rollout workers would not find a tokenizer."""
    if (
        will_prepare
        or config.endpoints.rollout
        or (config.tokenizer_dir / "tokenizer.json").is_file()
    ):
        return ""
    return f"model.path {config.model.path!r}: no tokenizer.json there; copy it next to the model"


def quantization_problem(config: BaseExperimentConfig) -> str:
    """Returns why a trainer would not read the model's weights; "" if the model is not there."""
    folder = Path(config.model.path)
    if not config.model.path or not (folder / "config.json").is_file():
        return ""
    try:
        refuse_quantized(folder)
    except InvalidInput as error:
        return str(error)
    return ""


def dataset_problem(config: BaseExperimentConfig) -> str:
    """Returns why rows cannot be read; a name that only the recipe understands is fine."""
    path = config.train_dataset.path if isinstance(config, GRPOConfig) else ""
    if not path.endswith(_FILES) or Path(path).is_file():
        return ""
    return f"train_dataset.path {path!r}: no such file (relative paths start at {Path.cwd()})"


def answers_problem(config: BaseExperimentConfig) -> str:
    """Returns why answers would be cut off long before the configured limit."""
    if not isinstance(config, GRPOConfig):
        return ""
    longest, room = config.gconfig.max_new_tokens, config.model.context_length
    # The default means: as many as fit. An explicit number is checked.
    if longest < room or longest == GenerationHyperparameters().max_new_tokens:
        return ""
    return (
        f"gconfig.max_new_tokens {longest}: expected less than model.context_length {room}, "
        "which prompt and answer share"
    )


def gateway_problem(config: BaseExperimentConfig) -> str:
    """Returns why the dashboard cannot have the configured port."""
    port = config.stack.gateway_port
    if not port or config.endpoints.gateway or port_is_free(port):
        return ""
    return (
        f"stack.gateway_port {port}: something listens there already; choose another, "
        "or 0 for any free one"
    )


def _unwritable(folder: Path) -> str:
    """Returns why a folder, which may not exist yet, cannot be written; "" if it can."""
    try:
        nearest = _nearest(folder)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if not nearest.is_dir():
        return f"{nearest} is a file, expected a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"this user may not write in {nearest}"
    return ""


def _full(folder: Path) -> str:
    """Returns why the folder's disk would be full at once; "" if it would not."""
    nearest = _nearest(folder)
    if (free := free_bytes(nearest)) >= LEAST_BYTES:
        return ""
    least = LEAST_BYTES >> 20
    return f"{nearest} has {free >> 20} MiB of free disk space, expected at least {least} MiB"


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    return nearest
