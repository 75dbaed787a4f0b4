"""The channel to BufferService that all roles share, with a policy for each RPC."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from areal.clients.base import CallPolicy, Client, Policies
from areal.v1 import buffer_service_pb2_grpc as pb_grpc

# A long poll's answer may come so much later than the wait it asked for.
_MARGIN_S = 15.0


class BufferConnection(Client):
    """One channel; close it when all its roles are done."""

    POLICIES: ClassVar[Policies] = {
        "SubmitTasks": CallPolicy(60.0, 30.0),
        "CancelTasks": CallPolicy(60.0, 30.0),
        "GetTasks": CallPolicy(30.0, 30.0),
        "WaitTasks": CallPolicy(_MARGIN_S, 30.0),
        "GetStats": CallPolicy(5.0),
        # Leases in a lost answer expire. The call is made in a loop.
        "LeaseTasks": CallPolicy(_MARGIN_S, idempotent=False),
        "RenewLeases": CallPolicy(10.0, 10.0),
        "CompleteTasks": CallPolicy(60.0, 60.0),
        "RejectTask": CallPolicy(30.0, 30.0),
        "ReturnTasks": CallPolicy(30.0, 30.0),
        "RegisterTrainer": CallPolicy(30.0, 60.0),
        "TakeBatch": CallPolicy(_MARGIN_S, 30.0),
        "ConfirmVersion": CallPolicy(10.0, 30.0),
        "FetchGroups": CallPolicy(120.0, 60.0),
        "FetchDiscarded": CallPolicy(60.0, 60.0),
        "CommitStep": CallPolicy(60.0, 60.0),
        "PutRecipe": CallPolicy(30.0, 60.0),
        "GetRecipe": CallPolicy(30.0, 60.0),
        "RetryDeadLetters": CallPolicy(60.0),
        "DropDeadLetters": CallPolicy(60.0),
        # Behind a request of an agent, which tries again itself.
        "OpenSession": CallPolicy(10.0, 5.0),
        "GetSession": CallPolicy(10.0, 5.0),
        "UpdateSession": CallPolicy(10.0, 15.0),
    }

    @cached_property
    def stub(self) -> pb_grpc.BufferServiceAsyncStub:
        """The gRPC stub that roles call."""
        return pb_grpc.BufferServiceStub(self._channel)


class Role:
    """Base class of the clients by role: submitter, worker, trainer and so on."""

    def __init__(self, connection: BufferConnection) -> None:
        self.connection = connection
        self._stub = connection.stub
        self._call = connection.call
