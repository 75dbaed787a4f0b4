"""Calls of sessions that this worker has read or recorded, so that it reads each token once.

    GetSession(known: 12 calls, the last is C) ──> ledger: C is its call 11 ──> calls 12, 13, …
                                                   C is not there           ──> all calls

No answer depends on it: the ledger says at every request which calls there are. Each call has an
id, and calls are only added, so a ledger that has the last call has all before it. One that lost
its latest writes does not have it, or refuses to extend an answer that it lost (`session.lua`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from areal.v1 import buffer_service_pb2 as pb

CACHE_BYTES = 256 << 20
_OVERHEAD = 1 << 10
"""Bytes that a session takes even without calls, so that their number is bounded too."""
Key = tuple[str, int]
"""Key of a session: task and attempt."""


class CachedCalls:
    """The first calls of one attempt; any number of requests may share it."""

    def __init__(self) -> None:
        self.calls: list[pb.SessionCall] = []
        self.size = 0
        """Approximate size in bytes."""

    @property
    def known(self) -> pb.SessionKnown | None:
        """Returns what the ledger need not send."""
        if not self.calls:
            return None
        unanswered = [call.number for call in self.calls if not call.HasField("answer")]
        last = self.prompt(len(self.calls) - 1).call_id
        return pb.SessionKnown(calls=len(self.calls), last=last, unanswered=unanswered)

    def prompt(self, number: int) -> pb.SessionPrompt:
        """The prompt of a call; several answers share that of the first."""
        while not self.calls[number].HasField("prompt"):
            number -= 1
        return self.calls[number].prompt

    def add(self, calls: Iterable[pb.SessionCall]) -> None:
        """Adds calls, and what is new of those that are here, as far as they follow these."""
        for call in calls:
            if call.number == len(self.calls):
                self.calls.append(call)
                self.size += call.ByteSize()
            elif call.number < len(self.calls):
                mine = self.calls[call.number]
                if call.HasField("answer") and not mine.HasField("answer"):
                    mine.answer.CopyFrom(call.answer)
                    self.size += call.answer.ByteSize()
                if call.HasField("reward"):
                    mine.reward = call.reward
                    mine.reward_parts.clear()
                    mine.reward_parts.update(call.reward_parts)


class SessionCache:
    """The calls of the sessions that were used last, up to so many bytes."""

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit, self._total = limit_bytes, 0
        self._entries: OrderedDict[Key, tuple[CachedCalls, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key) -> CachedCalls:
        """Returns what is known of a session; may be empty."""
        found = self._entries.get(key)
        return found[0] if found else CachedCalls()

    def keep(self, key: Key, entry: CachedCalls) -> None:
        """Keeps what is known of a session; over the limit the least recently used go."""
        self.drop(key)
        if not entry.calls:
            return
        size = entry.size + _OVERHEAD
        self._entries[key] = entry, size
        self._total += size
        while self._total > self._limit:
            self.drop(next(iter(self._entries)))

    def drop(self, key: Key) -> None:
        """Forgets a session and its size."""
        _, size = self._entries.pop(key, (None, 0))
        self._total -= size
