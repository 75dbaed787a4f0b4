"""Brings an adapter (LoRA) to a server, and shows that the server computes with it.

    base confirmed ─> load v, beside v - 1 ─> SYNCING, abort ─> probe v ─> SERVING v ─> unload v - 2
                       requests run on         they end           they continue with v

A server with adapters holds version 0's weights, which are loaded and confirmed like any weights,
once after each of its starts, and it reports version 0 as its `weight_version`. Requests name their
adapter, so the server is not paused: it leaves the traffic for as long as the probe takes, which is
then not behind other requests in its queue. See decision 30.

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
# If another request runs as well, a GPU may round the same sums differently.
_TRIES = 2
_UNLOAD_S = 10.0


async def load_adapter(engine: Engine, target: PolicyVersion, *, timeout: float) -> None:
    """Loads an adapter unless the server has it; requests continue.

    Args:
        engine: A server whose weights are version 0's.
        target: The adapter's version.
        timeout: For the load, in seconds.

    Raises:
        EngineError: It was refused, or is not listed.
    """
    name = target.adapter_name
    if name in await engine.adapters():
        return
    await engine.load_adapter(target, timeout=timeout)
    if name not in await engine.adapters():
        raise EngineError(
            Fault.WRONG_WEIGHTS,
            f"version {target.version}: the server took adapter {name} and does not list it",
        )


async def probe_adapter(engine: Engine, target: PolicyVersion, base: PolicyVersion) -> list[float]:
    """Returns a prompt's logprobs with an adapter, which a server has loaded.

    Args:
        engine: The server.
        target: The adapter's version.
        base: Version 0.

    Raises:
        EngineError: They are those of version 0, or of the adapter before.
    """
    info, prompt = target.adapter, probe_prompt(base)
    assert info is not None, "of an adapter"
    others = {}
    if info.size >= _VISIBLE:
        others[""] = "the model without any adapter"
    if info.change >= _VISIBLE and info.before in await engine.adapters():
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
    log = get_logger(__name__).bind(server=server_id)
    try:
        for name in await engine.adapters():
            if name not in keep and parse_version_dir(name) is not None:
                await engine.unload_adapter(name, timeout=_UNLOAD_S)
    except EngineError as error:
        log.warning("adapter_not_unloaded", cause=str(error)[:300])
