"""One server's part in broadcasts, in SGLang's words.

    join: init_weights_update_group ──> receive: begin, update (a bucket each), end ──> …
                 any failure, or another group: destroy_weights_update_group

What fails is left at once: the connections close, and neither the trainer nor another server waits
for this one any longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from areal.weights.broadcast import DTYPES, MEMBER_ANSWER_S, Seat, buckets
from areal.weights.manifest import PolicyVersion, WeightTensor
from areal_weight_sync.engine.base import EngineError

_LEAVE_S = 5.0


class BroadcastGroup:
    """The group that a server is in.

    Example:
        >>> async with membership.failing():
        ...     await membership.join(seat)
    """

    def __init__(self, command: Callable[[str, dict[str, Any], float], Awaitable[None]]) -> None:
        self._command = command
        self._group = ""
        self.expected: PolicyVersion | None = None
        """The version that the group was joined for and that has still to be received."""
        self._tensors: Sequence[WeightTensor] = ()

    async def join(self, seat: Seat) -> None:
        """Waits for all the others, unless it is in that group already."""
        self._tensors = seat.tensors
        if self._group == seat.group:
            return
        self._group = (
            self._group or seat.offer.group
        )  # joined in this service's previous incarnation
        await self._leave()
        self._group = seat.group  # from here on there may be something to leave
        request = {
            "master_address": seat.offer.address,
            "master_port": seat.offer.port,
            "rank_offset": seat.rank,
            "world_size": seat.world_size,
            "group_name": seat.group,
            "backend": seat.offer.backend,
        }
        await self._command("/init_weights_update_group", request, MEMBER_ANSWER_S)

    def request(self, tensors: Sequence[WeightTensor]) -> dict[str, Any]:
        """Returns what to receive."""
        return {
            "group_name": self._group,
            "names": [tensor.name for tensor in tensors],
            "dtypes": [DTYPES[tensor.dtype] for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }

    async def receive(self, version: PolicyVersion, flush_cache: bool, timeout: float) -> None:
        """Receives into the parameters, bucket by bucket; the server must be paused."""
        self.expected = None
        flags = {"flush_cache": flush_cache, "weight_version": version.name}
        async with self.failing():
            await self._command("/begin_weight_update", {}, timeout)
            try:
                for bucket in buckets(self._tensors):
                    request = self.request(bucket) | flags
                    await self._command("/update_weights_from_distributed", request, timeout)
            except EngineError:
                with contextlib.suppress(EngineError):  # the first cause is the one to tell
                    await self._command("/end_weight_update", {}, _LEAVE_S)
                raise
            await self._command("/end_weight_update", {}, timeout)

    @contextlib.asynccontextmanager
    async def failing(self) -> AsyncIterator[None]:
        """Leaves the group when what happens inside fails."""
        try:
            yield
        except EngineError:
            await self._leave()
            raise

    async def _leave(self) -> None:
        group, self._group, self.expected = self._group, "", None
        if group:
            with contextlib.suppress(EngineError):
                await self._command(
                    "/destroy_weights_update_group", {"group_name": group}, _LEAVE_S
                )
