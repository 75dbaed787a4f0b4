"""Workers and gateways die under parallel equal requests: what agents used is trained, once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from tests.ledger_support import Book
from tests.session_hops import Hops, Sampler

from areal.v1.buffer_service_pb2 import UpdateSessionRequest
from areal_buffer.sessions import check_update
from areal_torch.models.tiny import END_ID

CHAT = "/v1/chat/completions"
AGENTS, REPLICAS, SESSIONS = 4, 3, 8
DEATHS = ("before begin", "after begin", "after generate", "before record", "after record")
"""Of the worker, each beside a write of its own; all requests that it was serving die with it."""
LOSSES = ("answer", "receipt")
"""By the gateway: the answer does not reach the agent; or it does, and no one knows."""


class Died(BaseException):
    """Which no handler of errors answers."""


@dataclass
class Life:
    """Of one worker, which all requests that it serves share."""

    ended: bool = False


@dataclass(frozen=True)
class Fate:
    """Of one request."""

    worker: Life
    dies: str
    """The moment at which its worker does."""


FATE: ContextVar[Fate] = ContextVar("fate")


def reached(moment: str) -> None:
    fate = FATE.get(None)
    if fate is not None:
        fate.worker.ended = fate.worker.ended or fate.dies == moment
        if fate.worker.ended:
            raise Died


class Numbered(Sampler):
    """No two answers are equal."""

    async def generate(self, request: Any, responses: Any, **more: Any) -> None:
        await super().generate(request, responses, **more)
        [response], number = responses, len(self.prompts)
        letters = [97 + number // 26**place % 26 for place in range(self.letters)]
        response.output_tokens = [*letters, END_ID]
        await asyncio.sleep(0)
        reached("after generate")


class Replicas:
    """Workers of one session; one that dies is replaced."""

    def __init__(self, hops: Hops, chance: random.Random) -> None:
        self.hops, self.chance = hops, chance
        self.deaths = 0
        update = hops.store.update

        async def mortal(request: Any) -> Any:
            kind = request.WhichOneof("change")
            reached(f"before {kind}")
            answer = await update(request)
            reached(f"after {kind}")
            return answer

        hops.store.update = mortal  # type: ignore[method-assign]
        hops.sampler = Numbered(hops.sampler.letters, hops.sent)
        self._workers = [(hops.worker(), Life()) for _ in range(REPLICAS)]

    async def send(self, dies: str, path: str, body: Any, **more: Any) -> Any:
        """The reply, or None if the worker dies."""
        number = self.chance.randrange(REPLICAS)
        worker, life = self._workers[number]
        before = FATE.set(Fate(life, dies))
        try:
            return await self.hops.reply(worker, path, body, **more)
        except Died:
            if self._workers[number][1] is life:
                self._workers[number] = self.hops.worker(), Life()
                self.deaths += 1
            return None
        finally:
            FATE.reset(before)


class Agent:
    """Asks what all others ask, and again until it has an answer."""

    def __init__(self, number: int, replicas: Replicas, named: str) -> None:
        self.number, self.replicas, self.named = number, replicas, named
        self.used: dict[str, float] = {}
        """The answers that it had, and their own rewards; 0: none was sent."""

    async def live(self) -> None:
        messages = [{"role": "user", "content": "a"}]
        # One that is not extended is protected by its reward alone.
        for turn in range(1 + self.number % 2):
            said = await self._ask({"messages": messages, "max_tokens": 8}, turn)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "b"}]

    async def _ask(self, body: Any, turn: int) -> str:
        chance, replicas = self.replicas.chance, self.replicas
        for attempt in range(50):
            fate = chance.choice(["", "", *DEATHS, *LOSSES])
            more: dict[str, Any] = {"retry": attempt if "retries" in self.named else 0}
            if "keys" in self.named:
                more["Idempotency-Key"] = f"{self.number}/{turn}"
            reply = await replicas.send(fate, CHAT, body, **more)
            if reply is None or fate == "answer":
                continue
            assert reply.status == 200, reply.body
            answer = orjson.loads(reply.body)
            said: str = answer["choices"][0]["message"]["content"]
            self.used[said] = 0.0
            if fate != "receipt":
                receipt = UpdateSessionRequest.FromString(reply.receipt)
                await replicas.hops.store.update(check_update(receipt))
            if fate == "receipt" or chance.random() < 0.5:
                self.used[said] = reward = 1.0 + self.number + AGENTS * turn
                told = {"completion_id": answer["id"], "reward": reward}
                while await replicas.send("", "/v1/reward", told) is None:
                    pass  # its worker died with another request
            return said
        raise AssertionError("no answer")


@pytest.mark.parametrize("named", ["retries", "keys", "retries and keys"])
async def test_answers_when_processes_die_under_equal_requests_then_used_ones_are_trained(
    book: Book, named: str
) -> None:
    deaths = 0
    for number in range(SESSIONS):
        chance = random.Random(f"{named} {number}")
        hops = Hops(book, letters=3)
        await hops.open(f"s{number}")
        replicas = Replicas(hops, chance)
        agents = [Agent(each, replicas, named) for each in range(AGENTS)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.live() for each in agents))
        used = {text: reward for each in agents for text, reward in each.used.items()}
        found = await hops.store.read(f"s{number}", 0)
        answered = sum(bool(call.answer.token_ids) for call in found.calls)
        while await replicas.send("", "/end", {"reward": -1.0}) is None:
            pass
        trained = Counter[str]()
        assert hops.groups.group is not None
        for trajectory in hops.groups.group.trajectories:
            ids = trajectory.input_ids.tolist()
            ends = [at for at in trajectory.loss_mask.nonzero()[0] if ids[at] == END_ID]
            for end in ends:
                text = bytes(ids[end - 3 : end]).decode()
                trained[text] += 1
                last = end == ends[-1]
                assert trajectory.rewards[end] == (used[text] or (-1.0 if last else 0.0))
        assert trained == Counter(dict.fromkeys(used, 1))
        assert sum(hops.dropped) == answered - len(used)
        deaths += replicas.deaths
    assert deaths > SESSIONS
