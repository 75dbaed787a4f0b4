"""Brings an adapter (LoRA) to a server, and shows that the server computes with it.

    base confirmed ─> load v beside v - 1 ─> probe v ─> SERVING v ─> abort ─> unload v - 2
                      (requests run on)                 (announced)  (they continue with v)

A server with adapters holds version 0's weights, which are loaded and confirmed like any weights,
once in each of its lives, and it reports version 0 as its `weight_version`.
Requests name their adapter, so nothing pauses: those that run end with the tokens they have, and
their callers continue with the new name. See decision 29.

An engine may accept an adapter and compute without it. So a prompt's logprobs are asked for by the
new name, without a name, and by the name before. A server that answers two of them with the same
bits computes the same thing for both: an adapter that it applies changes some bit.
"""

from __future__ import annotations

from collections.abc import Collection

from areal.chassis.logging import get_logger
from areal.weights.manifest import PolicyVersion, parse_version_dir
from areal_weight_sync.confirmation import probe_prompt
from areal_weight_sync.engine.base import Engine, EngineError, Fault

# Below it, rounding to 16 bits may hide all that an adapter adds to a small model.
_VISIBLE = 1e-5
# Beside running requests, a GPU may round the same sums differently.
_TRIES = 3
_UNLOAD_S = 10.0


async def load_adapter(
    engine: Engine, target: PolicyVersion, base: PolicyVersion, *, timeout: float
) -> list[float]:
    """Loads an adapter unless the server has it, and probes it.

    Args:
        engine: A server whose weights are version 0's.
        target: The adapter's version.
        base: Version 0.
        timeout: For the load, in seconds.

    Returns:
        The probe's logprobs with the adapter.

    Raises:
        EngineError: It was refused, or has no effect.
    """
    name = target.adapter_name
    loaded = await engine.adapters()
    if name not in loaded:
        await engine.load_adapter(target, timeout=timeout)
        if name not in await engine.adapters():
            raise EngineError(
                Fault.WRONG_WEIGHTS,
                f"version {target.version}: the server took adapter {name} and does not list it",
            )
    return await _probe(engine, target, base, loaded)


async def _probe(
    engine: Engine, target: PolicyVersion, base: PolicyVersion, loaded: Collection[str]
) -> list[float]:
    info, prompt = target.adapter, probe_prompt(base)
    assert info is not None, "of an adapter"
    others = {}
    if info.size >= _VISIBLE:
        others[""] = "the model without any adapter"
    if info.change >= _VISIBLE and info.before in loaded and info.before != target.adapter_name:
        others[info.before] = f"the adapter {info.before}"
    own = await engine.logprobs(prompt, target.adapter_name, target.adapter_name)
    for other, what in others.items():
        for _ in range(_TRIES):
            if await engine.logprobs(prompt, f"probe-{other}", other) == own:
                raise EngineError(
                    Fault.WRONG_WEIGHTS,
                    f"version {target.version}: the server ignores adapter "
                    f"{target.adapter_name}: its logprobs of the probe are those of {what}",
                )
    return own


async def unload_others(engine: Engine, keep: Collection[str], server_id: str) -> None:
    """Unloads versions' adapters that no request needs any more; others' adapters stay.

    Each one that stayed would take memory until the server has none. A failure is logged: the next
    version tries again.
    """
    log = get_logger("areal.weight_sync.adapting").bind(server=server_id)
    try:
        for name in await engine.adapters():
            if name not in keep and parse_version_dir(name) is not None:
                await engine.unload_adapter(name, timeout=_UNLOAD_S)
    except EngineError as error:
        log.warning("adapter_not_unloaded", cause=str(error)[:300])
