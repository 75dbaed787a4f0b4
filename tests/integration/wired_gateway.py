"""A gateway whose sessions a given engine answers, and what that engine says it sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.buffer_client import BufferClient
from tests.integration.engine_wire import Sampled, Wire, recorded
from tests.integration.gateway_agents import agents_stack, request

from areal.config.experiment import GRPOConfig
from areal.types import Trajectory


@dataclass
class WiredGateway:
    """The gateway's URL, the buffer's address, and the wire to the engine."""

    url: str
    buffer: str
    wire: Wire

    async def open(self, question: str, ttl_s: float = 900.0) -> dict[str, Any]:
        """A session that is only recorded."""
        body = {"task": {"question": question}, "purpose": "serve", "ttl_s": ttl_s}
        opened: dict[str, Any] = await request([self.url], "POST", "/v1/sessions", body=body)
        return opened

    async def end(self, opened: dict[str, Any], reward: float) -> list[Trajectory]:
        """Ends a session; returns what was recorded of it."""
        path, key = f"/sessions/{opened['id']}/end", opened["api_key"]
        ended = await request([self.url], "POST", path, key, {"reward": reward})
        assert ended["state"] == "delivered"
        ledger = BufferClient(self.buffer)
        [record] = await ledger.get_tasks([opened["task_id"]], include_groups=True)
        await ledger.close()
        assert record.group is not None
        assert {each.reward for each in record.group.trajectories} == {reward}
        return record.group.trajectories


@contextmanager
def wired_gateway(
    engine: str, model: Path, folder: Path, *, context: int, most: int
) -> Iterator[WiredGateway]:
    """Starts all services but the engine.

    Args:
        engine: URL of a server that serves `model`.
        model: The folder with its tokenizer.
        folder: For files, stores and logs.
        context: Longest sequence, in tokens.
        most: Tokens of one answer, at most.
    """
    with recorded(engine) as wire:

        def adjust(config: GRPOConfig) -> None:
            config.model.path, config.model.context_length = str(model), context
            config.gconfig.max_new_tokens = most
            config.endpoints.inference.append(wire.url)

        with agents_stack(folder, 1, servers=0, adjust=adjust) as (stack, [url]):
            yield WiredGateway(url, stack.config.endpoints.buffer, wire)


def check_sampled(trajectories: Sequence[Trajectory], sampled: Sequence[Sampled]) -> None:
    """The masks cover each answer once, after its own prompt, and nothing else."""
    unseen = list(sampled)
    for trajectory in trajectories:
        ids, mask = trajectory.input_ids.tolist(), trajectory.loss_mask
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        for start, end in edges.reshape(-1, 2).tolist():
            logprobs = trajectory.behavior_logprobs[start:end].tolist()
            # By content: calls may have run at once.
            match = next(
                each
                for each in unseen
                if each.prompt == ids[:start]
                and each.ids == ids[start:end]
                and logprobs == [np.float32(p) for p in each.logprobs]
            )
            unseen.remove(match)
        assert (trajectory.token_versions >= 0).tolist() == mask.tolist()
    assert unseen == []
