"""How full Redis is, between two samples of its own figure."""

from __future__ import annotations

# Above this part of the limit TakeBatch asks for a checkpoint, so that payloads can be let go.
_NEAR = 0.9
# Of Redis's own limit: above it Redis refuses every write, and then no commit could let go of
# anything. What is left takes the next batch, which passes our limit, and the records of tasks.
_OF_REDIS = 0.8


class MemoryGauge:
    """Sampled use plus what was stored since; an overestimate, corrected by the next sample."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._asked_bytes = limit_bytes

    def sample(self, used_bytes: int, redis_limit_bytes: int = 0) -> None:
        """Redis's own figures; its limit counts where it is the lower one (0: none)."""
        self.used_bytes = used_bytes
        self.limit_bytes = self._asked_bytes
        if redis_limit_bytes:
            self.limit_bytes = min(self._asked_bytes, int(_OF_REDIS * redis_limit_bytes))

    def add(self, size_bytes: int) -> None:
        """Something of that size was stored since the sample."""
        self.used_bytes += size_bytes

    @property
    def near_limit(self) -> bool:
        """Time to let go of payloads."""
        return self.used_bytes >= _NEAR * self.limit_bytes

    @property
    def full(self) -> bool:
        """Only what the next batch needs may still be stored."""
        return self.used_bytes >= self.limit_bytes
