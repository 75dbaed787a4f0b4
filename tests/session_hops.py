"""Rollout workers that serve one session over a real store, and the bytes on each hop."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
from tests.ledger_support import EMPTY, Book, ledger_config, new_task

from areal.agents.replies import Reply
from areal.chassis.waits import Waits
from areal.errors import ArealError
from areal.protocol.trajectories import pack_group
from areal.tokenizer import Tokenizer
from areal.types import (
    GenerationHyperparameters,
    LLMRequest,
    LLMResponse,
    Purpose,
    StopReason,
    TrajectoryGroup,
)
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer.records import Completion, MemoryGauge
from areal_buffer.sessions import SessionStore, check_update
from areal_rollout.config import RolloutConfig
from areal_rollout.sessions import Sessions
from areal_torch.models.tiny import CHAT_TEMPLATE, END_ID, make_byte_tokenizer

KEY = "sk-test"


def byte_tokenizer() -> Tokenizer:
    """One token for each byte."""
    return Tokenizer(make_byte_tokenizer(), chat_template=CHAT_TEMPLATE, eos_token_ids=[END_ID])


def fail() -> None:
    raise AssertionError("an unexpected exception; the log has it")


class CountedBuffer:
    """The buffer's RPCs without a wire; counts what would be on it."""

    def __init__(self, store: SessionStore, sent: Counter[str]) -> None:
        self._store, self._sent = store, sent

    async def get(self, task_id: str, attempt: int, *known: Any) -> pb.GetSessionResponse:
        found = await self._store.read(task_id, attempt, *known)
        self._sent["read"] += found.ByteSize()
        return found

    async def update(self, request: pb.UpdateSessionRequest) -> pb.UpdateSessionResponse:
        self._sent["written"] += request.ByteSize()
        return await self._store.update(check_update(request))


class Sampler:
    """Answers each prompt with so many letters of its own and an end; notes the prompts."""

    def __init__(self, letters: int, sent: Counter[str]) -> None:
        self.letters, self.prompts, self._sent = letters, list[list[int]](), sent

    async def generate(
        self,
        request: LLMRequest,
        responses: Sequence[LLMResponse],
        *,
        min_version: int,
        avoid: Collection[str],
    ) -> None:
        self.prompts.append(list(request.input_ids))
        self._sent["engine"] += 4 * len(request.input_ids)
        for index, response in enumerate(responses):
            turn = len(self.prompts) + index
            response.output_tokens = [97 + (turn + i) % 26 for i in range(self.letters)] + [END_ID]
            count = len(response.output_tokens)
            response.output_logprobs = [-0.5 / (turn + i + 1) for i in range(count)]
            response.output_versions = [3] * count
            response.stop_reason = StopReason.STOP


class Groups:
    """Takes the finished group, as the ledger would."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.group: TrajectoryGroup | None = None

    async def renew_leases(self, worker_id: str, leases: Sequence[tuple[str, int]]) -> object:
        return await self._book.store.renew(worker_id, list(leases))

    async def complete_task(
        self, task_id: str, token: int, group: TrajectoryGroup, worker_id: str
    ) -> bool:
        self.group = group
        lengths = tuple(len(each.input_ids) for each in group.trajectories)
        packed = await asyncio.to_thread(pack_group, group)
        done = Completion(task_id, token, packed, 3, lengths, 1, 0.0)
        (recorded,) = await self._book.store.complete([done], limit=EMPTY)
        if isinstance(recorded, ArealError):
            raise recorded
        return recorded


class Hops:
    """A session, and any number of workers that serve it."""

    def __init__(self, book: Book, letters: int = 239) -> None:
        config = ledger_config("", namespace=book.namespace, max_group_bytes=64 << 20)
        self.book, self.sent = book, Counter[str]()
        self.store = SessionStore(book.redis, config, MemoryGauge(EMPTY), Waits())
        self.sampler, self.groups = Sampler(letters, self.sent), Groups(book)
        self.id = ""
        self.dropped: list[int] = []
        """What workers report of each attempt that they made trajectories of."""

    async def open(self, task_id: str, idle_ms: int = 60_000, attempts: int = 1) -> None:
        digests = [hashlib.sha256(KEY.encode()).hexdigest()] * attempts
        await self.store.open(new_task(task_id, Purpose.SERVE), digests, idle_ms, b"")
        self.id = f"{task_id}-0"

    def worker(self) -> Sessions:
        gconfig = GenerationHyperparameters(max_new_tokens=4096)
        config = RolloutConfig(worker_id="w", capacity=8, gconfig=gconfig)
        buffer: Any = CountedBuffer(self.store, self.sent)
        groups: Any = self.groups
        observer: Any = SimpleNamespace(
            dropped_answers=self.dropped.append,
            agent_call_bug=fail,
            conversations_split=lambda _: None,
        )
        sessions = Sessions(buffer, groups, config, observer)
        generation: Any = self.sampler
        sessions.start(generation, byte_tokenizer())
        return sessions

    async def reply(
        self,
        worker: Sessions,
        path: str,
        body: Any = None,
        method: str = "POST",
        retry: int = 0,
        **more: str,
    ) -> Reply:
        headers = {"Authorization": f"Bearer {KEY}", "x-stainless-retry-count": str(retry), **more}
        content = b"" if body is None else orjson.dumps(body)
        return await worker.serve(self.id, method, path, headers, content)

    async def ask(self, worker: Sessions, path: str, body: Any = None) -> Any:
        reply = await self.reply(worker, path, body)
        assert reply.status == 200, reply.body
        return orjson.loads(reply.body)

    async def redis_bytes(self) -> Counter[str]:
        """Bytes that Redis has read and written so far, this question included."""
        info = await self.book.redis.info("stats")
        return Counter(
            {"redis in": info["total_net_input_bytes"], "redis out": info["total_net_output_bytes"]}
        )
