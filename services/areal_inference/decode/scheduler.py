"""The state machine of generation: who waits, who runs, what a pause does, when weights change.

::

    submit --> waiting --admit (prefill or copy of a shared prompt)--> running --> finished
      |          ^                                                        |
      |          +-------- retract (pause, or cache full) ----------------+
      +--> held (an update waits for running requests) --open_gate--> waiting

    | consumes         | waits for                          | unblocked by                     |
    |------------------|------------------------------------|----------------------------------|
    | waiting requests | a free row, cache room, no pause   | a finished request, resume()     |
    | held requests    | a weight update ahead of them      | open_gate() after the update     |
    | a weight update  | paused, or nothing running/waiting | pause(), or the last one finishes|

One thread calls everything here; nothing blocks. Running request i occupies row i of the KV cache:
when one finishes, the last one moves into its row, so that a decode step works on a plain slice.
The last token of a sequence is never in the cache yet: a prompt of n tokens prefills n - 1, and
its first output comes out of the same decode step as the next output of the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_inference.decode.request import Request, abort_reason

PAUSE_MODES = ("abort", "retract", "in_place")
_ADMISSION_HEADROOM = 32
"""Free tokens that the cache needs before a request is admitted; without them it might have to be
retracted at once."""


class Runner(Protocol):
    """What the scheduler needs of the model (`decode.runner`, or a fake in tests)."""

    def fits(self, rows: int, length: int) -> bool:
        """Whether the cache may hold this many rows of this length."""

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for that many rows of that length, and keeps the content."""

    def prefill(self, requests: Sequence[Request]) -> None:
        """Fills each request's row from all its tokens but the last; sets its input_logprobs."""

    def share(self, source: int, targets: list[int], length: int) -> None:
        """Copies the head of one row to others."""

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the heads of rows to other rows."""

    def clear(self, row: int) -> None:
        """Wipes a row that may hold non-finite values."""

    def decode(
        self, requests: Sequence[Request], *, changed: bool
    ) -> tuple[list[int], list[float]]:
        """Returns each request's next token and logprob; changed: other requests than last time."""

    def load(self, weights: Any) -> None:
        """Uses other weights from the next call on."""

    def unload(self) -> None:
        """Releases the weights' memory; `load` gives others."""

    def reset(self) -> None:
        """Releases the cache's memory."""


@dataclass(slots=True)
class Stats:
    """Counters since the start; read by /metrics from another thread, written by this one."""

    requests: int = 0
    aborted: int = 0
    retracted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    pause_seconds: float = 0.0
    weight_updates: int = 0
    weight_update_seconds: float = 0.0


class Scheduler:
    """Decides which requests run; see the module's docstring."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_running: int,
        max_prefill_tokens: int,
        weight_version: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.runner = runner
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.weight_version = weight_version
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.held: deque[Request] = deque()
        self.pause_mode: str | None = None
        self.released: frozenset[str] = frozenset()
        """Tags of the memory that was released; see `release`."""
        self.unloaded = False
        """Whether the weights were released and not loaded since."""
        self.stats = Stats()
        self._clock = clock
        self._gate_open = True
        self._paused_at = 0.0
        self._batch_changed = True
        self._news: list[Request] = []
        # Running requests whose prompt was computed with the current weights, by prompt.
        self._donors: dict[tuple[str | None, str, bytes], Request] = {}
        self._window = (clock(), 0)
        self._throughput = 0.0

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request (during a pause it waits; behind a pending update it is held)."""
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.input_ids)
        (self.waiting if self._gate_open else self.held).append(request)

    def abort(self, rids: set[str] | None, message: str) -> int:
        """Finishes these requests (None: all) with the tokens they have; returns how many."""
        hit = [r for r in self._unfinished() if rids is None or r.rid in rids]
        for request in hit:
            self._finish(request, abort_reason(message))
        self.stats.aborted += len(hit)
        self.waiting = deque(r for r in self.waiting if r.finish is None)
        self.held = deque(r for r in self.held if r.finish is None)
        self._drop_finished()
        return len(hit)

    def take_news(self) -> list[Request]:
        """Returns requests that finished, or got a token while streaming, since the last call."""
        news, self._news = self._news, []
        return news

    # --- pause and weights ----------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stops decoding. abort: finish all; retract: requeue all without cache; in_place: keep."""
        if mode == "abort":
            self.abort(None, "Aborted")
        elif mode == "retract":
            for request in reversed(list(self.running)):
                self._retract(request)
        if self.pause_mode is None:
            self._paused_at = self._clock()
        self.pause_mode = mode

    def resume(self) -> None:
        """Continues decoding; no effect when not paused."""
        if self.pause_mode is not None:
            self.stats.pause_seconds += self._clock() - self._paused_at
        self.pause_mode = None

    @property
    def asleep(self) -> bool:
        """Whether memory that decoding needs was released."""
        return bool(self.released) or self.unloaded

    def release(self, tags: frozenset[str]) -> bool:
        """Gives up memory: `kv_cache`, `weights`. False when requests still need the cache.

        Requests wait until the memory is back and the weights are loaded.
        """
        if self.running or (self.waiting and not (self.asleep or self.pause_mode)):
            return False
        if "kv_cache" in tags:
            self.runner.reset()
        if "weights" in tags and not self.unloaded:
            self.runner.unload()
            self._donors.clear()
            self.unloaded = True
        self.released |= tags
        return True

    def regain(self, tags: frozenset[str]) -> None:
        """Takes memory back; weights that were released have to be loaded before decoding."""
        self.released -= tags

    @property
    def quiet(self) -> bool:
        """Whether weights may change now: paused, or all earlier requests have finished."""
        held = self.pause_mode is not None or self.asleep
        return held or not (self.running or self.waiting)

    def close_gate(self) -> None:
        """Holds new requests back until `open_gate`, so that an update is not starved."""
        self._gate_open = False

    def open_gate(self) -> None:
        """Queues the requests that were held back."""
        self._gate_open = True
        self.waiting.extend(self.held)
        self.held.clear()

    def set_weights(self, weights: Any, version: str | None, seconds: float = 0.0) -> None:
        """Uses new weights from the next step on.

        Args:
            weights: Weights for the runner to load.
            version: Its name; None keeps the name.
            seconds: Time that reading them took, for the metrics.
        """
        self.runner.load(weights)
        self.unloaded = False
        self._donors.clear()
        self.stats.weight_updates += 1
        self.stats.weight_update_seconds += seconds
        if version is not None:
            self.weight_version = version

    def flush(self) -> bool:
        """Releases the cache; False when running requests still need it."""
        if self.running:
            return False
        self.runner.reset()
        return True

    # --- work -----------------------------------------------------------------------------------

    @property
    def can_step(self) -> bool:
        """Whether `step` has something to do."""
        if self.pause_mode is not None or self.asleep:
            return False
        return bool(self.running or self.waiting)

    @property
    def throughput(self) -> float:
        """Returns generated tokens per second over the last second of work; 0 when idle."""
        return self._throughput if self.running else 0.0

    @property
    def pause_seconds(self) -> float:
        """Returns the time spent paused, the current pause included."""
        current = self._clock() - self._paused_at if self.pause_mode is not None else 0.0
        return self.stats.pause_seconds + current

    def step(self) -> None:
        """Admits what fits, then advances every running request by one token."""
        if not self.can_step:
            return
        began = self._clock()
        self._admit()
        self._make_room()
        self._decode()
        now = self._clock()
        self.stats.busy_seconds += now - began
        self.stats.steps += 1
        since, tokens = self._window
        if now - since >= 1.0:
            self._throughput = (self.stats.generation_tokens - tokens) / (now - since)
            self._window = (now, self.stats.generation_tokens)

    def _admit(self) -> None:
        """Moves requests from waiting to running and fills their rows."""
        longest = max((r.length for r in self.running), default=0)
        budget = self.max_prefill_tokens
        fresh: list[Request] = []
        shares: dict[int, list[Request]] = {}
        admitted = 0
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            length = max(longest, request.length)
            if not self.runner.fits(len(self.running) + 1, length + _ADMISSION_HEADROOM):
                break
            key = request.prompt_key()
            donor = self._donors.get(key)
            may_share = not request.output_ids and request.logprob_start < 0
            if donor is None or not may_share:
                if fresh and request.length > budget:
                    break
                budget -= request.length
                fresh.append(request)
                self._donors.setdefault(key, request)
            else:
                shares.setdefault(donor.row, []).append(request)
                request.cached_tokens = len(request.input_ids) - 1
                self.stats.cached_tokens += request.cached_tokens
            self.waiting.popleft()
            request.row = len(self.running)
            request.started_at = request.started_at or time.time()
            self.running.append(request)
            longest = length
            admitted += 1
        if not admitted:
            return
        self._batch_changed = True
        self.runner.reserve(len(self.running), longest)
        if fresh:
            self.runner.prefill(fresh)
        for row, requests in shares.items():
            self.runner.share(row, [r.row for r in requests], len(requests[0].input_ids) - 1)

    def _make_room(self) -> None:
        """Grows the cache for one more token each; requeues the last rows if it may not grow."""
        longest = max(r.length for r in self.running)
        while len(self.running) > 1 and not self.runner.fits(len(self.running), longest):
            self._retract(self.running[-1])
            longest = max(r.length for r in self.running)
        self.runner.reserve(len(self.running), longest)

    def _decode(self) -> None:
        tokens, logprobs = self.runner.decode(self.running, changed=self._batch_changed)
        self._batch_changed = False
        version = self.weight_version
        finished = False
        for request, token, logprob in zip(self.running, tokens, logprobs, strict=True):
            if logprob != logprob:  # noqa: PLR0124 - NaN: these weights cannot be sampled from
                self.runner.clear(request.row)
                self._finish(request, abort_reason(f"non-finite logits at version {version}"))
                self.stats.aborted += 1
                finished = True
                continue
            produced = len(request.output_ids)
            if not request.spans or request.spans[-1][0] != version:
                request.spans.append((version, produced))
                request.weight_version = version
            request.output_ids.append(token)
            request.logprobs.append(logprob)
            self.stats.generation_tokens += 1
            if produced == 0:
                request.first_token_at = time.time()
            params = request.params
            if produced + 1 >= params.max_new_tokens:
                self._finish(request, {"type": "length", "length": params.max_new_tokens})
            elif token in params.stop_ids:
                self._finish(request, {"type": "stop", "matched": token})
            else:
                if request.stream and produced % params.stream_interval == 0:
                    self._news.append(request)
                continue
            finished = True
        if finished:
            self._drop_finished()

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finished_at = time.time()
        request.weight_version = self.weight_version
        request.finish = reason
        self._news.append(request)

    def _retract(self, request: Request) -> None:
        """Requeues a running request first in line; its tokens stay, its cache goes."""
        request.num_retractions += 1
        self.stats.retracted += 1
        self.waiting.appendleft(request)
        self._drop(lambda r: r is request)

    def _drop_finished(self) -> None:
        self._drop(lambda r: r.finish is not None)

    def _drop(self, leaves: Callable[[Request], bool]) -> None:
        """Takes requests off the batch, moving the last rows into the gaps."""
        gone = [r for r in self.running if leaves(r)]
        if not gone:
            return
        for request in gone:
            key = request.prompt_key()
            if self._donors.get(key) is request:
                del self._donors[key]
        kept = len(self.running) - len(gone)
        gaps = [r.row for r in gone if r.row < kept]
        movers = [r for r in self.running[kept:] if not leaves(r)]
        if gaps:
            self.runner.move([r.row for r in movers], gaps, max(r.length for r in movers))
        for request, row in zip(movers, gaps, strict=True):
            self.running[row] = request
            request.row = row
        del self.running[kept:]
        for request in gone:
            request.row = -1
        self._batch_changed = True

    def _unfinished(self) -> list[Request]:
        return [*self.running, *self.waiting, *self.held]
