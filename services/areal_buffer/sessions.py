"""Tasks that outside agents run: opened, recorded call by call, read by whichever process serves.

A session is a task under a lease of its own: `open` submits and leases it in one transition, every
recorded call renews the lease, `complete` (the same as for any episode) or `sweep` ends it; when
some of its attempts have ended, `sweep` queues it for a worker that makes a group of these. Its
calls are in hashes of the task, one for each attempt, until it ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import orjson
import redis.asyncio as redis
from redis.exceptions import RedisError

from areal.chassis.waits import Waits
from areal.clients.redis_connection import redis_prefix
from areal.errors import InvalidInput, NotFound
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer import replies
from areal_buffer import validation as check
from areal_buffer.config import BufferConfig
from areal_buffer.records import MemoryGauge, NewTask
from areal_buffer.scripts import Argument, Scripts, translate

MAX_ATTEMPTS = 64
MAX_ANSWERS = 128
_MIN_IDLE_MS, _MAX_IDLE_MS = 100, 7 * 24 * 3600 * 1000
_FIELDS = ("sessions", "keys", "token", "floor", "idle", "silent")
# Parts of a call's record. If a prompt has several answers, only the first has the prompt.
_PARTS = (b"prompt", b"answer", b"reward", b"delivered")
_Calls = dict[bytes, bytes]
_MOST_KNOWN = 100_000
_MAX_SALT_BYTES = 64
# Limits on the parts of a reward that agents send.
_MAX_PARTS, _MAX_PART_CHARS = 32, 64


class SessionStore:
    """Sessions in Redis. Raises what a script refused with, Unavailable while Redis is away."""

    def __init__(
        self, client: redis.Redis, config: BufferConfig, memory: MemoryGauge, waits: Waits
    ) -> None:
        self._redis, self._config, self._memory = client, config, memory
        self._prefix = redis_prefix(config.namespace)
        self._scripts = Scripts(client, config, self._prefix, waits)

    async def open(
        self, task: NewTask, key_digests: Sequence[str], idle_ms: int, salt: bytes
    ) -> pb.OpenSessionResponse:
        """Begins a task, or finds the one that an equal request has begun.

        Raises:
            InvalidInput: Another task has this id.
            CapacityExceeded: No episode could start now either; says when to try again.
        """
        limit = self._memory.limit_bytes
        args: list[Argument] = [task.task_id, task.purpose.value, task.body, idle_ms, limit, salt]
        version, first_salt = await self._scripts.run("open", *args, *key_digests)
        return pb.OpenSessionResponse(policy_version=int(version), salt=first_salt)

    async def update(self, request: pb.UpdateSessionRequest) -> pb.UpdateSessionResponse:
        """Records what an agent did; see `check_update`."""
        change: list[Argument]
        match request.WhichOneof("change"):
            case "begin":
                begin = request.begin
                prompt = begin.prompt.SerializeToString()
                limits = (self._memory.limit_bytes, self._config.max_group_bytes)
                extends = begin.prompt.extends if begin.prompt.HasField("extends") else ""
                change = ["begin", begin.prompt.call_id, begin.answers, prompt, *limits, extends]
            case "record":
                answer = request.record.answer.SerializeToString()
                change = ["record", request.record.number, answer, request.record.call_id]
            case "reward":
                reward = request.reward
                number = reward.number if reward.HasField("number") else ""
                change = ["reward", number, _reward_to_text(reward.value, reward.parts)]
            case "delivered":
                delivered = request.delivered
                change = ["delivered", delivered.call_id, *delivered.numbers]
            case _:
                change = ["end"]
        lease = request.lease
        number, left = await self._scripts.run(
            "session", lease.task_id, lease.token, request.attempt, *change
        )
        return pb.UpdateSessionResponse(number=int(number), open_attempts=int(left))

    async def read(
        self, task_id: str, attempt: int, known: pb.SessionKnown | None = None
    ) -> pb.GetSessionResponse:
        """Returns an attempt's current state, without what the reader has; raises NotFound."""
        rest = None
        if known is not None and 0 < known.calls <= _MOST_KNOWN:
            rest = await self._rest(task_id, attempt, known)
        row, calls = rest or await self._fetch(task_id, attempt)
        attempts = int(row["sessions"] or 0)
        if attempt >= attempts:
            raise NotFound(f"session {task_id}-{attempt}: unknown, or released since it ended")
        response = pb.GetSessionResponse(
            record=replies.task_record(task_id, row, None),
            lease=pb.LeaseRef(task_id=task_id, token=int(row["token"] or 0)),
            policy_version=int(row["floor"] or 0),
            key_digest=replies.text(row["keys"]).split(",")[attempt],
            attempts=attempts,
            ended=b"ended" in calls,
            expired=str(attempt) in replies.text(row["silent"]).split(","),
            continued=rest is not None,
        )
        response.idle.FromMilliseconds(int(row["idle"] or 0))
        if b"outcome" in calls:
            response.outcome, parts = _reward_from_text(calls[b"outcome"])
            response.outcome_parts.update(parts)
        had = known.calls if known is not None and rest is not None else 0
        for number in range(int(calls.get(b"calls", 0))):
            prompt, answer, reward, delivered = (
                calls.get(b"%d:%s" % (number, part)) for part in _PARTS
            )
            if number < had and answer is None and reward is None:
                continue
            call = response.calls.add(number=number, delivered=delivered is not None)
            if prompt is not None:
                call.prompt.ParseFromString(prompt)
            if answer is not None:
                call.answer.ParseFromString(answer)
            if reward is not None:
                call.reward, parts = _reward_from_text(reward)
                call.reward_parts.update(parts)
        return response

    async def _rest(
        self, task_id: str, attempt: int, known: pb.SessionKnown
    ) -> tuple[replies.Row, _Calls] | None:
        """Returns what the reader lacks, in one round trip if that is little; None: everything."""
        last, count = b"begun:%s" % known.last.encode(), known.calls
        while True:
            fields = [last, b"calls", b"ended", b"outcome"]
            fields += [b"%d:answer" % number for number in known.unanswered]
            fields += [b"%d:reward" % number for number in range(known.calls)]
            new = range(known.calls, count)
            fields += [b"%d:%s" % (number, part) for number in new for part in _PARTS]
            row, calls = await self._fetch(task_id, attempt, fields)
            if last not in calls or int(calls[last]) >= known.calls:
                return None
            if int(calls[b"calls"]) <= count:
                return row, calls
            count = int(calls[b"calls"])

    async def _fetch(
        self, task_id: str, attempt: int, fields: Sequence[bytes] = ()
    ) -> tuple[replies.Row, _Calls]:
        """The record, and these fields of the calls; without fields all of both."""
        columns = [*replies.RECORD_FIELDS, *_FIELDS]
        if fields:
            columns.remove("body")
        calls = f"{self._prefix}calls:{task_id}/{attempt}"
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hmget(f"{self._prefix}task:{task_id}", columns)
                if fields:
                    pipe.hmget(calls, fields)
                else:
                    pipe.hgetall(calls)
                row, found = await pipe.execute()
        except RedisError as error:
            raise translate(error) from None
        if fields:
            found = {k: v for k, v in zip(fields, found, strict=True) if v is not None}
        return dict.fromkeys(replies.RECORD_FIELDS) | dict(zip(columns, row, strict=True)), found


def _reward_to_text(value: float, parts: Mapping[str, float]) -> bytes:
    return repr(value).encode() + (b" " + orjson.dumps(dict(parts)) if parts else b"")


def _reward_from_text(text: bytes) -> tuple[float, dict[str, float]]:
    value, _, parts = text.partition(b" ")
    return float(value), orjson.loads(parts) if parts else {}


def check_open(request: pb.OpenSessionRequest) -> tuple[NewTask, list[str], int, bytes]:
    """Returns task, digests of keys, idle time in ms, salt; raises InvalidInput."""
    task = check.check_task(request.task)
    if task.time_to_live_ms is not None or task.position is not None:
        raise InvalidInput(f"task {task.task_id!r}: a session has no time_to_live and no position")
    if not 1 <= len(request.key_digests) <= MAX_ATTEMPTS:
        raise InvalidInput(
            f"key_digests: got {len(request.key_digests)}, expected 1 to {MAX_ATTEMPTS}"
        )
    for digest in request.key_digests:
        if not digest or check.check_digest(digest, "key_digests") != digest:
            raise InvalidInput("key_digests '': expected sha256 in hex")
    idle_ms = request.idle.ToMilliseconds()
    if not _MIN_IDLE_MS <= idle_ms <= _MAX_IDLE_MS:
        raise InvalidInput(f"idle {idle_ms / 1000:g} s: expected 0.1 s to 7 days")
    if len(request.salt) > _MAX_SALT_BYTES:
        raise InvalidInput(f"salt: got {len(request.salt)} bytes, at most {_MAX_SALT_BYTES}")
    return task, list(request.key_digests), idle_ms, request.salt


def check_known(known: pb.SessionKnown) -> pb.SessionKnown:
    """Returns what a reader says that it has if that can be; raises InvalidInput."""
    check.check_number(known.calls, "known.calls", 0)
    if known.calls:
        check.check_task_id(known.last, "known.last")
    for number in known.unanswered:
        if not 0 <= number < known.calls:
            raise InvalidInput(
                f"known.unanswered {number}: expected a number of the first {known.calls} calls"
            )
    return known


def check_update(request: pb.UpdateSessionRequest) -> pb.UpdateSessionRequest:
    """Returns the request if it is valid; raises InvalidInput."""
    check.check_task_id(request.lease.task_id, "lease.task_id")
    check.check_number(request.lease.token, "lease.token", 1)
    check.check_number(request.attempt, "attempt", 0)
    match request.WhichOneof("change"):
        case "begin":
            check.check_task_id(request.begin.prompt.call_id, "begin.prompt.call_id")
            check.check_number(request.begin.prompt.extends, "begin.prompt.extends", 0)
            if not 1 <= request.begin.answers <= MAX_ANSWERS:
                raise InvalidInput(
                    f"begin.answers {request.begin.answers}: expected 1 to {MAX_ANSWERS}"
                )
        case "record":
            answer = request.record.answer
            check.check_number(request.record.number, "record.number", 0)
            check.check_task_id(request.record.call_id, "record.call_id")
            sizes = {len(answer.token_ids), len(answer.logprobs), len(answer.versions)}
            if len(sizes) > 1:
                raise InvalidInput("record.answer: expected as many logprobs and versions as ids")
        case "reward":
            _check_reward(request.reward)
        case "delivered":
            _check_delivered(request.delivered)
        case None:
            raise InvalidInput("change: expected begin, record, reward, delivered or end")
    return request


def _check_reward(reward: pb.SessionReward) -> None:
    check.check_number(reward.number, "reward.number", 0)
    if not math.isfinite(reward.value):
        raise InvalidInput(f"reward.value {reward.value}: expected a finite number")
    if len(reward.parts) > _MAX_PARTS:
        raise InvalidInput(f"reward.parts: got {len(reward.parts)}, expected at most {_MAX_PARTS}")
    for name, value in reward.parts.items():
        if len(name) > _MAX_PART_CHARS:
            raise InvalidInput(
                f"reward.parts {name[:_MAX_PART_CHARS]!r}: got {len(name)} characters, "
                f"expected at most {_MAX_PART_CHARS}"
            )
        if not math.isfinite(value):
            raise InvalidInput(f"reward.parts {name} {value}: expected a finite number")


def _check_delivered(delivered: pb.SessionDelivered) -> None:
    check.check_task_id(delivered.call_id, "delivered.call_id")
    if not 1 <= len(delivered.numbers) <= MAX_ANSWERS:
        raise InvalidInput(
            f"delivered.numbers: got {len(delivered.numbers)}, expected 1 to {MAX_ANSWERS}"
        )
    for number in delivered.numbers:
        check.check_number(number, "delivered.numbers", 0)
