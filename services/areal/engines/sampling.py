"""Whether a workflow samples at the temperature that the trainer compares logprobs at."""

from __future__ import annotations

from areal.errors import InvalidInput
from areal.types import GenerationHyperparameters
from areal.workflows.base import RolloutWorkflow


def check_sampling(workflow: RolloutWorkflow, temperature: float) -> None:
    """Refuses a workflow all of whose generation settings have another temperature.

    The workflow's attributes are looked at: settings that it makes only while an episode runs are
    not seen. Of several (a policy's and a judge's, say) one has to fit.

    Args:
        workflow: Of a batch to train on.
        temperature: The trainer's.

    Raises:
        InvalidInput: One line with both temperatures.
    """
    found = {
        name: 0.0 if value.greedy else value.temperature
        for name, value in vars(workflow).items()
        if isinstance(value, GenerationHyperparameters)
    }
    if found and temperature not in found.values():
        name, other = next(iter(found.items()))
        raise InvalidInput(
            f"{type(workflow).__name__}.{name} samples at temperature {other}: expected the "
            f"trainer's, {temperature}, or importance weights compare different distributions "
            f"(make the workflow with config.gconfig, or set gconfig.temperature={other})"
        )
