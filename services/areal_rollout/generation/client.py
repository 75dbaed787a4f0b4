"""Generation on SGLang-protocol servers, through interruptions of every kind.

    generate ──> choose a server ──> POST /generate ──┬─ stop, length ─────────> done
        ^              │ none                         ├─ abort (update, drain) ─> again
        │              v                              ├─ failure, server lost ──> report, again
        └──────── table.changed                       └─ 400 ───────────────────> InvalidInput

| step      | consumes          | waits for                | unblocked by                          |
|-----------|-------------------|--------------------------|---------------------------------------|
| choosing  | the server table  | a server at min_version  | table update, setup_timeout_s         |
| posting   | one HTTP response | the server               | answer, quarantine, request_timeout_s |
| interrupt | running requests  | their partial answers    | /abort_request, its deadline          |

Every token keeps the version that sampled it (`meta_info.weight_versions`), whatever happened in
between: a continued request sends prompt + tokens so far and asks for the rest. Where versions are
adapters, each call names one, here and nowhere else, and all its tokens are of that one.

The answers of a group are asked for in one call; after an interruption, those that have not ended.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

import aiohttp

from areal.chassis import tracing
from areal.chassis.logging import get_logger
from areal.errors import InvalidInput, Unavailable, WaitTimeout
from areal.types import LLMRequest, LLMResponse, StopReason
from areal_rollout.generation import trace
from areal_rollout.generation.answer import Answer, stream_interval
from areal_rollout.generation.connections import Connections
from areal_rollout.generation.protocol import (
    ModelLimits,
    ServerBusy,
    ServerError,
    append_answers,
    append_event,
    error_message,
    refusal,
    request_body,
)
from areal_rollout.generation.reading import append_apart
from areal_rollout.generation.routes import MAX_CALL_BYTES, RouteReader, Routing
from areal_rollout.generation.routing import Server
from areal_rollout.generation.server_table import ServerTable, give_up

_MAX_FAILURES = 8
_HEADERS = {"Content-Type": "application/json"}
OnTokens = Callable[[int, Sequence[int]], None]


class GenerationFailed(Unavailable):
    """Servers failed again and again.

    Attributes:
        failed_server: The last that failed.
    """

    def __init__(self, message: str, failed_server: str) -> None:
        super().__init__(message)
        self.failed_server = failed_server


class Interrupted(Unavailable):
    """The worker is draining: the response holds what there is."""


class GenerationObserver(Protocol):
    """Where the client's figures go."""

    def request_done(self, seconds: float, tokens: int) -> None:
        """A request has ended well; a group is one."""

    def interruption(self, kind: str) -> None:
        """A running request was aborted, failed, lost its server, or found a full queue."""

    def salvaged(self, tokens: int) -> None:
        """A broken stream had brought so many tokens, which are kept."""


class SGLangClient:
    """Generates on whatever servers the table admits; one per process."""

    def __init__(
        self,
        table: ServerTable,
        limits: ModelLimits,
        *,
        report: Callable[[str, str], Awaitable[None]],
        observer: GenerationObserver,
        request_timeout_s: float,
        setup_timeout_s: float,
        asleep_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        previous: Mapping[str, str] | None = None,
        connections: int = 10_000,
    ) -> None:
        """Opens no connection yet.

        Args:
            table: Fed by someone else.
            limits: The model's limits.
            report: Tells weight-sync (url, cause) of a server that failed.
            observer: For metrics.
            request_timeout_s: One request, from sending to its last token.
            setup_timeout_s: How long to wait for a server with a recent enough version.
            asleep_s: How much longer servers may sleep while the trainer has their GPUs; 0: they
                never do. Else waiting for one does not count as time of the request.
            headers: Sent with every request: the bearer token.
            previous: Sent instead to a server that refuses them, while the token is rotated.
            connections: Requests at once; more wait for one to end.
        """
        self.table = table
        self.limits = limits
        self._routes = None if limits.routes is None else RouteReader(limits.routes)
        self._report = report
        self._observer = observer
        self._request_timeout_s = request_timeout_s
        self._setup_timeout_s = setup_timeout_s
        self._asleep_s = asleep_s
        self._connections = Connections(headers or {}, connections, previous)
        self._log = get_logger(__name__)
        self._running: dict[str, tuple[Server, asyncio.Timeout, list[str]]] = {}
        self._idle = asyncio.Event()
        self._draining = False
        self._reports: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Opens the connection pool."""
        await self._connections.open()

    async def close(self) -> None:
        """Closes the connection pool."""
        for task in [*self._reports.values(), *self._aborts]:
            task.cancel()
        await self._connections.close()

    async def wait_ready(self, timeout: float) -> bool:
        """Whether any server takes traffic, after waiting up to `timeout` seconds for one."""
        await self._connections.calm(timeout)  # a burst is spread: further requests wait
        if not len(self.table):
            await self.table.changed(timeout)
        return len(self.table) > 0

    async def generate(
        self,
        request: LLMRequest,
        responses: Sequence[LLMResponse],
        *,
        min_version: int = 0,
        avoid: Collection[str] = (),
    ) -> None:
        """Completes a request for one answer or a group of them, all by one server at a time.

        Args:
            request: What to generate.
            responses: Filled in; those with stop reason ABORT, which may already hold tokens of an
                earlier attempt. They hold what was generated so far whenever this raises.
            min_version: Version below which no server may work on it.
            avoid: Servers on which it failed before; taken only if there is no other.

        Raises:
            InvalidInput: See `ModelLimits.check`, or the server refused it as malformed.
            GenerationFailed: Servers failed again and again; names each cause.
            WaitTimeout: No server with a recent enough version, or no answer, in time.
            Interrupted: `interrupt` was called.
        """
        self.limits.check(request)
        began = time.monotonic()
        deadline = asyncio.get_running_loop().time() + self._request_timeout_s
        with trace.generation(self.limits.model, request, responses):
            await self._connections.take(deadline)
            try:
                await self._complete(request, responses, min_version, avoid, deadline)
            finally:
                self._connections.free()
        seconds = time.monotonic() - began
        for response in responses:
            response.latency_s += seconds
        self._observer.request_done(seconds, sum(len(r.output_tokens) for r in responses))

    async def interrupt(self, timeout: float) -> None:
        """Stops all generation for good; running requests end with the tokens they have.

        Returns when every `generate` has its partial answer, at the latest after `timeout`
        seconds; then whatever has not answered is given up.
        """
        self._draining = True
        self.table.wake()
        for server, _, rids in list(self._running.values()):
            self._abort(server, rids)
        try:
            async with asyncio.timeout(timeout):
                while self._running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            for _, scope, _ in self._running.values():
                give_up(scope)

    # ------------------------------------------------------------ inside

    async def _complete(
        self,
        request: LLMRequest,
        responses: Sequence[LLMResponse],
        min_version: int,
        avoid: Collection[str],
        deadline: float,
    ) -> None:
        """Tries one server after another, until the last token of the last answer."""
        began = time.monotonic()
        prompt = len(request.input_ids)
        most = min(request.gconfig.max_new_tokens, self.limits.room(prompt))
        cost = prompt + most
        failures: list[str] = []
        fruitless = 0
        while True:
            pending = _unfinished(responses, most)
            if not pending:
                return
            if request.grammar:
                _restart(pending)
            before = [len(response.output_tokens) for response in pending]
            server, asleep_s = await self._server(min_version, request.affinity_key, cost, avoid)
            deadline += asleep_s
            load = cost * len(pending)
            server.outstanding += load
            try:
                with trace.segment(self.limits.model, server, request, pending):
                    finished = await self._post(
                        server,
                        request,
                        pending,
                        min_version,
                        most,
                        deadline,
                        _on_tokens(request, responses, pending),
                    )
            except ServerBusy:  # a moment later, or elsewhere
                self._observer.interruption("busy")
                continue
            except ServerError as error:
                failures.append(f"{server.url}: {error}")
                self._observer.interruption("failure")
                if self._draining:
                    raise Interrupted("the worker is draining") from None
                if len(failures) >= _MAX_FAILURES:
                    raise GenerationFailed(
                        f"generation failed {len(failures)} times: {'; '.join(failures)}",
                        server.url,
                    ) from None
                _count_interruption(pending)
                avoid = {*avoid, server.url}
                continue
            finally:
                server.outstanding -= load
                gained = _note_server(server.url, pending, before)
            if finished:
                return
            self._observer.interruption("abort")
            if self._draining:
                raise Interrupted("the worker is draining")
            _count_interruption(pending)
            # A server that aborts everything at once (it is leaving) must not spin us.
            fruitless = 0 if gained else fruitless + 1
            if fruitless:
                with tracing.span("wait_server"):
                    await self.table.changed(min(0.02 * 2**fruitless, 1.0))
                if asyncio.get_running_loop().time() > deadline:
                    hint = "every answer was aborted"
                    raise WaitTimeout("generation", on=server.url, since=began, hint=hint)

    async def _server(
        self, min_version: int, affinity_key: str, cost: int, avoid: Collection[str]
    ) -> tuple[Server, float]:
        """A server, and how many seconds it took that do not count as time of the request."""
        server = (
            None if self._draining else self.table.choose(min_version, affinity_key, cost, avoid)
        )
        if server is not None:
            return server, 0.0
        since = time.monotonic()
        with tracing.span("wait_server", {"areal.min_version": min_version}):
            while not self._draining:
                remaining = since + self._setup_timeout_s + self._asleep_s - time.monotonic()
                if remaining <= 0:
                    raise WaitTimeout(
                        f"an inference server at version {min_version} or newer",
                        on="weight-sync",
                        since=since,
                        hint=self.table.describe(),
                    )
                await self.table.changed(remaining)
                server = self.table.choose(min_version, affinity_key, cost, avoid)
                if server is not None and not self._draining:
                    return server, time.monotonic() - since if self._asleep_s else 0.0
            raise Interrupted("the worker is draining")

    async def _post(
        self,
        server: Server,
        request: LLMRequest,
        responses: Sequence[LLMResponse],
        min_version: int,
        most: int,
        deadline: float,
        on_tokens: OnTokens | None,
    ) -> bool:
        """Makes one /generate call, appends its tokens, returns whether every answer has ended."""
        # The number first: SGLang aborts by prefix, so no id may begin another.
        tail = f"{self._name}-{request.rid or 'areal'}"
        rids = [f"{next(self._numbers)}-{tail}" for _ in responses]
        routing = self._routes.ask(request, responses, most) if self._routes else None
        body = request_body(
            request,
            responses,
            rids,
            extra_key=str(server.version),
            adapter=server.adapter,
            limits=self.limits,
            most=most,
            stream_interval=stream_interval(
                most - min(len(response.output_tokens) for response in responses),
                on_tokens is not None,
            ),
            routing=routing,
        )
        began = time.monotonic()
        adapter, sampled_by = server.adapter, server.version if server.adapter else None
        more = MAX_CALL_BYTES if routing else 0
        answer = Answer(server.version, len(responses), on_tokens, more, of_adapter=bool(adapter))
        scope = asyncio.timeout_at(deadline)
        self._running[rids[0]] = (server, scope, rids)
        server.running.add(scope)
        try:
            async with scope:
                raw = await self._exchange(server, body, answer)
            vocab_size = self.limits.vocab_size
            finished = await append_apart(
                len(raw),
                append_answers,
                responses,
                raw,
                min_version,
                vocab_size,
                routing,
                sampled_by=sampled_by,
            )
            trace.finished(finished)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) or scope.expired():
                self._abort(server, rids)
            await self._salvage(responses, answer, server, min_version, routing)
            if isinstance(error, ServerBusy):
                self.table.failed(server)
                raise
            # The server is at fault if it lacks the adapter that it was listed with.
            lacks = isinstance(error, InvalidInput) and adapter and adapter in str(error)
            blamed = ServerError(str(error)) if lacks else error
            failure = self._judged(blamed, server, scope, deadline, began)
            if failure is error:
                raise
            raise failure from None
        finally:
            server.running.discard(scope)
            self._running.pop(rids[0], None)
            if not self._running:
                self._idle.set()
        server.failures = 0
        return "abort" not in finished

    async def _exchange(self, server: Server, body: bytes, answer: Answer) -> bytes:
        session = self._connections.session
        more = tracing.headers()
        headers = {**_HEADERS, **dict(more)} if more else _HEADERS
        async with session.post(server.generate_url, data=body, headers=headers) as http:
            raw = await answer.read(http)
        if http.status == 400:
            raise InvalidInput(f"{server.url} refuses the request: {error_message(raw)}")
        if http.status != 200:
            raise refusal(http.status, raw)
        return raw

    def _judged(
        self,
        error: BaseException,
        server: Server,
        scope: asyncio.Timeout,
        deadline: float,
        began: float,
    ) -> BaseException:
        """Returns what went wrong, in our words; reports a server that is to blame."""
        if isinstance(error, TimeoutError) and not scope.expired():  # aiohttp's own
            error = ServerError("no connection within 5 s")
        elif isinstance(error, TimeoutError):
            if asyncio.get_running_loop().time() < deadline:  # not too late, but abandoned
                return ServerError(f"request given up: {server.note}")
            hint = "rollout.request_timeout_s"
            error = WaitTimeout("its tokens", on=server.url, since=began, hint=hint)
        elif isinstance(error, (aiohttp.ClientError, OSError)):
            error = ServerError(f"{type(error).__name__}: {error}")
        if isinstance(error, (ServerError, WaitTimeout)):
            self._failed(server, str(error))
        return error

    async def _salvage(
        self,
        responses: Sequence[LLMResponse],
        answer: Answer,
        server: Server,
        min_version: int,
        routing: Routing | None,
    ) -> None:
        """Keeps what a broken stream has brought."""
        kept = 0
        try:
            for index, event in answer.partial.items():
                kept += await append_apart(
                    len(event),
                    append_event,
                    [responses[index]],
                    event,
                    answer.version,
                    min_version,
                    self.limits.vocab_size,
                    routing,
                    sampled_by=answer.version if answer.of_adapter else None,
                )
        except (ServerError, IndexError) as error:
            self._log.warning("partial_answer_dropped", url=server.url, cause=str(error)[:500])
        if kept:
            self._observer.salvaged(kept)

    def _failed(self, server: Server, cause: str) -> None:
        """Keeps new requests away for a moment and tells weight-sync, once at a time."""
        if not self.table.failed(server) or server.url in self._reports:
            return
        self._log.warning("server_failed", url=server.url, cause=cause[:500])
        task = asyncio.create_task(self._tell(server.url, cause))
        self._reports[server.url] = task
        task.add_done_callback(lambda _: self._reports.pop(server.url, None))

    async def _tell(self, url: str, cause: str) -> None:
        try:
            await self._report(url, cause)
        except Exception as error:  # its own probes will find out
            self._log.info("server_report_failed", url=url, error=str(error))

    def _abort(self, server: Server, rids: Sequence[str]) -> None:
        """Tells a server, in the background, that no one waits for some answers any more."""
        for rid in rids:
            task = asyncio.create_task(self._connections.abort(server.abort_url, rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


def _unfinished(responses: Sequence[LLMResponse], most: int) -> list[LLMResponse]:
    """Returns answers that may still get tokens; one with `most` tokens has ended."""
    pending = []
    for response in responses:
        if response.stop_reason is not StopReason.ABORT:
            continue
        if len(response.output_tokens) >= most:
            response.stop_reason = StopReason.LENGTH
        else:
            pending.append(response)
    return pending


def _on_tokens(
    request: LLMRequest, responses: Sequence[LLMResponse], pending: Sequence[LLMResponse]
) -> OnTokens | None:
    """Maps the pending sequences of one call to their places and earlier tokens."""
    on_tokens = request.on_tokens
    if on_tokens is None:
        return None
    places = {id(response): index for index, response in enumerate(responses)}
    before = [(places[id(each)], list(each.output_tokens)) for each in pending]

    def on_part(index: int, ids: Sequence[int]) -> None:
        place, earlier = before[index]
        on_tokens(place, [*earlier, *ids])

    return on_part


def _note_server(url: str, responses: Sequence[LLMResponse], before: Sequence[int]) -> bool:
    """Notes whose tokens were added to the numbers before; whether there are any."""
    grown = [r for r, had in zip(responses, before, strict=True) if len(r.output_tokens) > had]
    for response in grown:
        if url not in response.servers:
            response.servers.append(url)
    return bool(grown)


def _restart(responses: Sequence[LLMResponse]) -> None:
    """Forgets the tokens of interrupted answers: a server begins a grammar at its start."""
    for response in responses:
        response.output_tokens.clear()
        response.output_logprobs.clear()
        response.output_versions.clear()
        response.servers.clear()
        response.routed_experts = None


def _count_interruption(responses: Sequence[LLMResponse]) -> None:
    for response in responses:
        if response.stop_reason is StopReason.ABORT:
            response.interruptions += 1
