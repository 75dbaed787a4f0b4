"""SGLang's endpoints for weights that a trainer broadcasts, over gloo.

    init_weights_update_group ─> begin_weight_update ─> update_weights_from_distributed … ─>
    end_weight_update                                    destroy_weights_update_group

Unlike SGLang, which writes each tensor into its parameters as it comes, this engine collects and
swaps at the end: a set that is incomplete, unknown or not finite changes nothing. `/stage_weights`
with names instead of a path receives a whole set in one call; see `control`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from areal.chassis.logging import get_logger
from areal.errors import ArealError, InvalidInput
from areal.weights.broadcast import DTYPES, MEMBER_JOIN_S, bucket_s, buckets
from areal.weights.manifest import WeightTensor
from areal.weights.publisher import TransportError
from areal.weights.safetensors import TensorPlace
from areal_inference.api import RequestError, SchemaError
from areal_inference.http_api.requests import COMMON, json_response, read_object
from areal_inference.model.config import ServedModel
from areal_inference.model.sources import Stored, WeightError, one_by_one

if TYPE_CHECKING:
    from torch import Tensor

    from areal_inference.frontend import Frontend
    from areal_torch.publish.process_group import ProcessGroup

_T = TypeVar("_T")
_SAFETENSORS = {theirs: ours for ours, theirs in DTYPES.items()}


_GROUP: dict[str, type] = {**COMMON, "group_name": str}
_INIT_GROUP = {
    **_GROUP,
    "master_address": str,
    "master_port": int,
    "rank_offset": int,
    "world_size": int,
    "backend": str,
}
RECEIVE = {
    **_GROUP,
    "names": list,
    "dtypes": list,
    "shapes": list,
    "digests": list,
    "flush_cache": bool,
    "abort_all_requests": bool,
    "weight_version": str,
    "load_format": str,
    "selector": str,
    "torch_empty_cache": bool,
}
_BEGIN = {**COMMON, "selector": str}


class MemorySource:
    """See `sources.Source`; tensors that have been received."""

    def __init__(self) -> None:
        self.tensors: dict[str, Stored] = {}
        self._data: dict[str, Tensor] = {}

    def add(self, name: str, dtype: str, digest: str, tensor: Tensor) -> None:
        """Makes one more tensor readable."""
        place = TensorPlace(name, tuple(tensor.shape), dtype, 0, tensor.nbytes)
        self.tensors[name] = Stored("", place, digest)
        self._data[name] = tensor

    def read(self, stored: Stored) -> memoryview:
        """See `Source`; nothing is copied."""
        import torch

        data = self._data[stored.place.name]
        return data.view(-1).view(torch.uint8).numpy().data

    def together(self, names: Iterable[str]) -> list[list[str]]:
        """See `Source`."""
        return one_by_one(self, names)

    def close(self) -> None:
        """Closes the group and forgets the received tensors."""
        self._data.clear()


class Groups:
    """The process groups that this server is in, and what is coming over them.

    Example:
        >>> await groups.join({"master_address": "10.0.0.3", "master_port": 41873, ...})
        >>> source = await groups.receive({"names": [...], "group_name": "areal-7f3a91", ...})
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._groups: dict[str, ProcessGroup] = {}
        self._numbers = itertools.count(1)

    def location(self) -> str:
        """Returns a unique name for what was received last, which no folder has."""
        return f"broadcast:{next(self._numbers)}"

    async def join(self, body: dict[str, Any]) -> None:
        """Waits for all the other ranks.

        Raises:
            RequestError: Not a group this engine can be in, or not all came.
        """
        name = _group_name(body)
        backend = body.get("backend", "nccl")
        if backend != "gloo":
            raise RequestError(f"backend: {backend!r}, expected 'gloo': this engine has no GPU")
        address, port = _need(body, "master_address"), _need(body, "master_port")
        rank, size = _need(body, "rank_offset"), _need(body, "world_size")
        if not 0 < port < 2**16:
            raise SchemaError(f"master_port: {port}, expected 1 to 65535")
        if not 0 < rank < size:
            raise SchemaError(f"rank_offset: {rank}, expected 1 to {size - 1} (world_size - 1)")
        if name in self._groups:
            raise RequestError(f"group_name: {name!r} exists, destroy it first")

        def work() -> ProcessGroup:
            from areal_torch.publish.process_group import ProcessGroup

            return ProcessGroup.join(address, port, rank, size, name, backend, MEMBER_JOIN_S)

        self._groups[name] = await refusing(work)

    def leave(self, body: dict[str, Any]) -> None:
        """Drops a group, and with it the connections: the others notice at once.

        Raises:
            RequestError: There is none.
        """
        name = _group_name(body)
        if self._groups.pop(name, None) is None:
            raise RequestError(f"group_name: no group {name!r}")

    async def receive(self, body: dict[str, Any], source: MemorySource) -> None:
        """Takes part in the broadcast of the named tensors, all of them checked beforehand.

        Raises:
            RequestError: Unknown or misshapen tensors, no such group, or it has failed.
        """
        name = _group_name(body)
        expected = await refusing(lambda: _plan(body, self._model, source))
        group = self._groups.get(name)
        if group is None:
            raise RequestError(f"group_name: no group {name!r}")

        def work() -> list[Tensor]:
            import torch

            received: list[Tensor] = []
            for bucket in buckets(expected):
                tensors = [
                    torch.empty(tensor.shape, dtype=getattr(torch, DTYPES[tensor.dtype]))
                    for tensor in bucket
                ]
                group.broadcast(tensors, bucket_s(bucket))
                received += tensors
            return received

        try:
            tensors = await refusing(work)
        except BaseException:  # whatever it is, the others wait for this one
            self._groups.pop(name, None)
            raise
        for wanted, tensor in zip(expected, tensors, strict=True):
            source.add(wanted.name, wanted.dtype, wanted.digest, tensor)


def _plan(body: dict[str, Any], model: ServedModel, source: MemorySource) -> list[WeightTensor]:
    """The tensors of a request, if they are this model's."""
    from areal_inference.model.weights import model_shapes

    names, dtypes, shapes = (_need(body, key) for key in ("names", "dtypes", "shapes"))
    digests = body.get("digests") or [""] * len(names)
    if not len(names) == len(dtypes) == len(shapes) == len(digests):
        raise InvalidInput(
            f"names, dtypes, shapes: {len(names)}, {len(dtypes)}, {len(shapes)} entries, "
            "expected the same number of each"
        )
    if not all(type(text) is str for text in (*names, *dtypes, *digests)):
        raise InvalidInput("names, dtypes, digests: expected lists of strings")
    own, planned, seen = model_shapes(model), list[WeightTensor](), set(source.tensors)
    for name, dtype, shape, digest in zip(names, dtypes, shapes, digests, strict=True):
        if name not in own:
            raise WeightError(f"tensor {name!r:.200} is unknown to {model.architecture}")
        if shape != list(own[name]):
            raise WeightError(f"tensor {name} has shape {shape!r:.100}, expected {list(own[name])}")
        if dtype not in _SAFETENSORS:
            raise WeightError(
                f"tensor {name} has dtype {dtype!r:.50}, expected one of {sorted(_SAFETENSORS)}"
            )
        if name in seen:
            raise WeightError(f"tensor {name} is in the request twice")
        seen.add(name)
        planned.append(WeightTensor(name, own[name], _SAFETENSORS[dtype], str(digest)))
    return planned


def _group_name(body: dict[str, Any]) -> str:
    return str(body.get("group_name", "weight_update_group"))


def _need(body: dict[str, Any], name: str) -> Any:
    if name not in body:
        raise SchemaError(f"{name}: missing")
    return body[name]


async def refusing(work: Callable[[], _T]) -> _T:
    """Blocking work in a thread that a stopping process does not wait for; errors are refusals.

    What failed is released at once, and its connections with it: an error holds the frames that it
    went through, so only its words leave the thread.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[_T | None, str]] = loop.create_future()

    def settle(result: _T | None, refusal: str) -> None:
        if not ended.done():  # else the request was given up
            ended.set_result((result, refusal))

    def run() -> None:
        result, refusal = None, ""
        try:
            result = work()
        except Exception as error:
            refusal = str(error) or type(error).__name__
            if not isinstance(error, ArealError):
                get_logger(__name__).exception("broadcast_failed")
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, result, refusal)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    result, refusal = await ended
    if refusal:
        raise RequestError(refusal)
    return cast("_T", result)


class GroupRoutes:
    """The endpoints for process groups of weights."""

    def __init__(
        self,
        groups: Groups,
        frontend: Frontend,
        adopt: Callable[[MemorySource, dict[str, Any]], Awaitable[None]],
    ) -> None:
        """`adopt(source, flags)` swaps in a whole set of weights, or changes nothing."""
        self._groups = groups
        self._frontend = frontend
        self._adopt = adopt
        self._arriving: MemorySource | None = None  # between begin and end
        self._collected: dict[str, Any] = {}  # the last request between them

    async def join_group(self, http: HttpRequest) -> Response:
        """Joins a trainer's process group; returns once all members are there."""
        body = await read_object(http, _INIT_GROUP)
        self._frontend.check_ready()
        try:
            await self._groups.join(body)
        except RequestError as error:
            return done(str(error), success=False)
        return done("Succeeded to initialize custom process group.")

    async def leave_group(self, http: HttpRequest) -> Response:
        """Drops the group and its connections."""
        body = await read_object(http, _GROUP)
        try:
            self._groups.leave(body)
        except RequestError as error:
            return done(str(error), success=False)
        return done("Succeeded to destroy custom process group.")

    async def begin_update(self, http: HttpRequest) -> Response:
        """Weights will come by broadcast, in any number of requests."""
        await read_object(http, _BEGIN)
        self._frontend.check_ready()
        if self._arriving is not None:
            return done("A weight update has begun already.", success=False)
        self._arriving, self._collected = MemorySource(), {}
        return done("Weight update begun.")

    async def receive(self, http: HttpRequest) -> Response:
        """Receives some tensors; requests continue with the current weights."""
        body = await read_object(http, RECEIVE)
        self._frontend.check_ready()
        source = self._arriving
        if source is None:
            return done("No weight update has begun: /begin_weight_update", success=False)
        try:
            await self._groups.receive(body, source)
        except RequestError as error:
            return done(str(error), success=False)
        self._collected = body
        message = "Succeeded to update parameter online."
        if "weight_version" in body:
            message += f" Weight version updated to {body['weight_version']}."
        return done(message)

    async def end_update(self, http: HttpRequest) -> Response:
        """Serves with the received weights: all of them, or nothing changes."""
        await read_object(http, COMMON)
        source, self._arriving = self._arriving, None
        if source is None:
            return done("No weight update has begun.", success=False)
        wanted = ("weight_version", "flush_cache", "abort_all_requests")
        body = {key: self._collected[key] for key in wanted if key in self._collected}
        try:
            await self._adopt(source, body)
        except (InvalidInput, TransportError, TimeoutError) as error:
            return done(str(error), success=False)
        return done("Weight update ended.")


def done(message: str, *, success: bool = True) -> Response:
    """Returns SGLang's answer to calls about weights."""
    return json_response({"success": success, "message": message}, 200 if success else 400)
