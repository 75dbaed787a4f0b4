"""Conversions between versions and servers and their protobuf messages. No grpc here."""

from __future__ import annotations

from areal.errors import InvalidInput
from areal.v1 import policy_pb2 as pb
from areal.v1 import weight_sync_service_pb2 as service_pb
from areal.weights.broadcast import Offer
from areal.weights.manifest import (
    MAX_POLICY_VERSION,
    AdapterInfo,
    DeltaFile,
    PolicyVersion,
    WeightFile,
    WeightTensor,
)
from areal.weights.servers import InferenceServer, ServerState, SyncStatus

_STATE_TO_PB: dict[ServerState, pb.ServerState.ValueType] = {
    state: pb.ServerState.Value(f"SERVER_STATE_{state.name}") for state in ServerState
}
_STATE_FROM_PB = {value: key for key, value in _STATE_TO_PB.items()}


def version_to_pb(version: PolicyVersion, *, with_manifest: bool = True) -> pb.PolicyVersion:
    """Encodes a version; without its manifest a message stays below 200 bytes."""
    message = pb.PolicyVersion(
        version=version.version, incarnation=version.incarnation, path=version.path
    )
    message.publish_time.FromMicroseconds(int(version.publish_time * 1e6))
    if with_manifest:
        message.files.extend(
            pb.WeightFile(name=f.name, size_bytes=f.size_bytes, digest=f.digest)
            for f in version.files
        )
        message.tensors.extend(
            pb.WeightTensor(name=t.name, shape=t.shape, dtype=t.dtype, digest=t.digest)
            for t in version.tensors
        )
        if version.delta is not None:
            message.delta.CopyFrom(pb.WeightDelta(**vars(version.delta)))
    if version.adapter is not None:
        message.adapter.CopyFrom(pb.WeightAdapter(**vars(version.adapter)))
    return message


def version_from_pb(message: pb.PolicyVersion) -> PolicyVersion:
    """Decodes a version.

    Raises:
        InvalidInput: The version or incarnation is out of range, the path is missing, or a file
            name or time is invalid.
    """
    if not 0 <= message.version < MAX_POLICY_VERSION:
        raise InvalidInput(
            f"version.version {message.version}: expected 0 to {MAX_POLICY_VERSION - 1}"
        )
    if not 0 <= message.incarnation < 2**53:  # Lua's numbers are doubles
        raise InvalidInput(
            f"version.incarnation {message.incarnation}: expected 0 or more, below 2^53"
        )
    if not message.path:
        raise InvalidInput("version.path '': expected a model directory")
    for name in (message.path, message.delta.base, *(file.name for file in message.files)):
        if "\0" in name:
            raise InvalidInput(f"version names {name[:80]!r}: a path has no null character")
    try:
        publish_time = message.publish_time.ToMicroseconds() / 1e6
    except ValueError as error:
        raise InvalidInput(f"version.publish_time: {error}") from None
    return PolicyVersion(
        version=message.version,
        incarnation=message.incarnation,
        path=message.path,
        files=tuple(WeightFile(f.name, f.size_bytes, f.digest) for f in message.files),
        tensors=tuple(
            WeightTensor(t.name, tuple(t.shape), t.dtype, t.digest) for t in message.tensors
        ),
        delta=DeltaFile(
            message.delta.base,
            message.delta.base_digest,
            message.delta.size_bytes,
            message.delta.digest,
        )
        if message.HasField("delta")
        else None,
        adapter=AdapterInfo(
            message.adapter.rank,
            message.adapter.alpha,
            message.adapter.base_digest,
            message.adapter.size,
            message.adapter.before,
            message.adapter.change,
        )
        if message.HasField("adapter")
        else None,
        publish_time=publish_time,
    )


def server_to_pb(server: InferenceServer) -> pb.InferenceServer:
    """Converts a server to its message."""
    message = pb.InferenceServer(
        server_id=server.server_id,
        url=server.url,
        state=_STATE_TO_PB[server.state],
        version=server.version,
        cause=server.cause,
        aborted_requests=server.aborted_requests,
        adapter=server.adapter,
    )
    message.since.FromMicroseconds(int(server.since * 1e6))
    return message


def server_from_pb(message: pb.InferenceServer) -> InferenceServer:
    """Decodes a server; a state of a newer protocol counts as QUARANTINED (no traffic)."""
    return InferenceServer(
        server_id=message.server_id,
        url=message.url,
        state=_STATE_FROM_PB.get(message.state, ServerState.QUARANTINED),
        version=message.version,
        cause=message.cause,
        since=message.since.ToMicroseconds() / 1e6,
        aborted_requests=message.aborted_requests,
        adapter=message.adapter,
    )


def status_to_pb(status: SyncStatus) -> service_pb.WatchVersionsResponse:
    """Encodes a status, the version without its manifest."""
    message = service_pb.WatchVersionsResponse(
        confirmed_servers=status.confirmed_servers,
        servers=status.servers,
        confirmed_version=status.confirmed_version,
        updates=status.updates,
        update_seconds_mean=status.update_seconds_mean,
        aborted_requests=status.aborted_requests,
        draining=status.draining,
        unstored=status.unstored,
    )
    if status.current is not None:
        message.current.CopyFrom(version_to_pb(status.current, with_manifest=False))
    return message


def status_from_pb(message: service_pb.WatchVersionsResponse) -> SyncStatus:
    """Converts a message to a status."""
    return SyncStatus(
        current=version_from_pb(message.current) if message.HasField("current") else None,
        confirmed_servers=message.confirmed_servers,
        servers=message.servers,
        confirmed_version=message.confirmed_version,
        updates=message.updates,
        update_seconds_mean=message.update_seconds_mean,
        aborted_requests=message.aborted_requests,
        draining=message.draining,
        unstored=message.unstored,
    )


def offer_to_pb(offer: Offer) -> service_pb.BroadcastOffer:
    """Converts an offer to its message."""
    return service_pb.BroadcastOffer(**vars(offer))


def offer_from_pb(message: service_pb.BroadcastOffer) -> Offer:
    """Decodes an offer.

    Raises:
        InvalidInput: The address is missing, the port is invalid, or the backend is unknown.
    """
    if not message.address:
        raise InvalidInput("offer.address '': expected the trainer's host")
    if not 0 < message.port < 2**16:
        raise InvalidInput(f"offer.port {message.port}: expected 1 to 65535")
    if message.backend not in ("gloo", "nccl"):
        raise InvalidInput(f"offer.backend {message.backend!r:.50}: expected gloo or nccl")
    return Offer(message.address, message.port, message.backend, message.group)
