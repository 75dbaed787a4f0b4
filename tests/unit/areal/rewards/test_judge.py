"""A judge asks an endpoint over a real socket: scores, cache, budget, deadline, errors."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from tests.judge_server import JudgeServer, judge_server
from tests.ports import free_port

from areal.errors import (
    CannotStart,
    CapacityExceeded,
    InvalidInput,
    Unavailable,
    WorkflowError,
)
from areal.rewards.judge import Judge

SECRET = "sk-very-secret-0123456789"


async def eight(text: str) -> str:
    return "Not bad, a score of 3 would be harsh.\n**Score:** 8"


@pytest.fixture
async def judge_of() -> AsyncIterator[Callable[..., Judge]]:
    """Makes judges of a server, and closes them."""
    made: list[Judge] = []

    def make(server: JudgeServer | None, *template: str, **arguments: Any) -> Judge:
        options = {"base_url": server and server.url, "api_key": SECRET, **arguments}
        made.append(Judge("grader", *template, **options))
        return made[-1]

    yield make
    for judge in made:
        await judge.close()


async def test_judge_when_it_answers_then_the_last_score_counts_and_the_text_was_filled_in(
    judge_of,
):
    async with judge_server(eight) as server:
        judge = judge_of(server, options={"temperature": 0, "seed": 7})
        score = await judge(prompt="2+2?", completion="{4}", answer="4", more=1)
        assert score == 0.8
        [body] = server.bodies
        assert "2+2?" in body["messages"][0]["content"]
        assert "{4}" in body["messages"][0]["content"]
        assert (body["model"], body["temperature"], body["seed"]) == ("grader", 0, 7)
        assert server.keys == [f"Bearer {SECRET}"]
        assert (judge.used().calls, judge.used().tokens) == (1, 40)


async def test_judge_when_the_same_text_comes_again_or_at_once_then_it_is_asked_once(
    judge_of, tmp_path
):
    async with judge_server(eight) as server:
        book = tmp_path / "judge.sqlite"
        judge = judge_of(server, cache=book)
        same = [judge(prompt="p", completion="c") for _ in range(20)]
        assert await asyncio.gather(*same, judge(prompt="p", completion="d")) == [0.8] * 21
        assert await judge(prompt="p", completion="c") == 0.8
        assert len(server.bodies) == 2
        other = judge_of(server, cache=book)  # another process
        assert await other(prompt="p", completion="c") == 0.8
        assert len(server.bodies) == 2
        # Another question about the same text is none that was asked before.
        await judge_of(server, cache=book, options={"seed": 1})(prompt="p", completion="c")
        assert len(server.bodies) == 3
        assert SECRET.encode() not in b"".join(p.read_bytes() for p in tmp_path.iterdir())


async def test_judge_when_another_has_its_own_best_score_then_they_share_no_score(
    judge_of, tmp_path
):
    async with judge_server(eight) as server:
        book, text = tmp_path / "judge.sqlite", "Rate {completion}"
        of_ten = judge_of(server, text, cache=book)
        of_sixteen = judge_of(server, text, cache=book, best=16)
        assert await of_ten(completion="c") == 0.8
        assert await of_sixteen(completion="c") == 0.5
        assert len(server.bodies) == 2


async def test_judge_when_more_is_kept_than_may_be_then_the_oldest_is_asked_again(judge_of):
    async with judge_server(eight) as server:
        judge = judge_of(server, max_cached=3)
        for text in "abcd":
            await judge(prompt="p", completion=text)
        await judge(prompt="p", completion="d")
        assert len(server.bodies) == 4
        await judge(prompt="p", completion="a")
        assert len(server.bodies) == 5


async def test_judge_when_its_budget_is_spent_then_no_request_is_sent(judge_of, tmp_path):
    async with judge_server(eight) as server:
        book = tmp_path / "judge.sqlite"
        judges = [judge_of(server, cache=book, max_calls=3) for _ in range(2)]
        calls = [judges[i % 2](prompt="p", completion=str(i)) for i in range(10)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert done.count(0.8) == 3
        spent = next(each for each in done if isinstance(each, CapacityExceeded))
        assert str(spent).startswith("judge grader: its budget is spent: 3 calls (max_calls: 3)")
        assert len(server.bodies) == 3
        assert await judges[1](prompt="p", completion=str(done.index(0.8))) == 0.8
        thrifty = judge_of(server, max_tokens=70)
        assert [await thrifty(prompt="p", completion=c) for c in "ab"] == [0.8, 0.8]
        with pytest.raises(CapacityExceeded, match=r"80 tokens \(max_tokens: 70\)"):
            await thrifty(prompt="p", completion="c")


async def test_judge_when_the_endpoint_is_busy_then_it_is_asked_until_it_answers(judge_of):
    busy = iter([429, 503, 500])

    async def answer(text: str):
        code = next(busy, None)
        wait = {"retry-after-ms": "10"}
        return JSONResponse({"error": {"message": "busy"}}, code, wait) if code else "Score: 10"

    async with judge_server(answer) as server:
        assert await judge_of(server)(prompt="p", completion="c") == 1.0
        assert len(server.bodies) == 4


async def test_judge_when_the_endpoint_is_silent_busy_or_away_then_unavailable_says_so(judge_of):
    async def silent(text: str) -> str:
        await asyncio.sleep(600)
        return ""

    async def full(text: str):
        return JSONResponse({"error": {"message": "full"}}, 429, {"retry-after": "30"})

    for answer in (silent, full):
        async with judge_server(answer) as server:
            judge = judge_of(server, timeout_s=0.3)
            with pytest.raises(Unavailable) as caught:
                await judge(prompt="p", completion="c")
            assert str(caught.value) == (
                "judge grader at 127.0.0.1: no answer within timeout_s = 0.3 s"
            )
            assert len(server.bodies) <= 2
    away = judge_of(None, base_url=f"http://127.0.0.1:{free_port()}/v1", timeout_s=1)
    with pytest.raises(Unavailable, match=r"^judge grader at 127\.0\.0\.1: no"):
        await away(prompt="p", completion="c")


async def test_judge_when_the_endpoint_refuses_then_the_error_has_no_secret(judge_of, caplog):
    async def refuse(text: str):
        said = {"error": {"message": f"Incorrect API key provided: {SECRET}"}}
        return JSONResponse(said, 401)

    caplog.set_level(logging.INFO)
    async with judge_server(refuse) as server:
        with pytest.raises(InvalidInput) as caught:
            await judge_of(server)(prompt="p", completion="c")
        assert str(caught.value) == (
            "judge grader at 127.0.0.1: HTTP 401: Incorrect API key provided: ***; "
            "check the key and base_url"
        )
        assert len(server.bodies) == 1
        assert SECRET not in caplog.text


async def test_judge_when_an_answer_has_no_score_then_it_is_asked_again_and_then_fails(judge_of):
    said = iter(["I cannot say", "Score: 11", "Score: 5", "no", "no", "the mark is seven"])

    async def answer(text: str) -> str:
        return next(said)

    async with judge_server(answer) as server:
        judge = judge_of(server)
        assert await judge(prompt="p", completion="c") == 0.5
        with pytest.raises(WorkflowError, match=r"no score in 3 answers; .*'the mark is seven'$"):
            await judge(prompt="p", completion="d")
        assert len(server.bodies) == 6


async def test_judge_when_it_has_its_own_template_and_parser_then_they_are_used(judge_of):
    async def answer(text: str) -> str:
        return '{"verdict": "yes"}' if text == 'Is "4" as "4"? {"verdict": …}' else "nan"

    def verdict(said: str) -> float:
        found = re.search(r'"verdict": "(yes|no)"', said)
        return float(found[1] == "yes") if found else float(said)

    async with judge_server(answer) as server:
        template = 'Is "{completion}" as "{answer}"? {{"verdict": …}}'
        judge = judge_of(server, template=template, parse=verdict)
        assert await judge(completion="4", answer="4") == 1.0
        with pytest.raises(WorkflowError, match="no score"):
            await judge(completion="5", answer="4")
        with pytest.raises(InvalidInput, match=r"needs 'answer'.*did you mean 'answers'"):
            await judge(completion="4", answers="4")


def test_judge_when_an_argument_is_wrong_then_one_line_names_it():
    with pytest.raises(InvalidInput, match="judge timeout_s 0: expected a number above 0"):
        Judge("m", timeout_s=0)
    with pytest.raises(InvalidInput, match="judge best nan: expected a number above 0"):
        Judge("m", best=float("nan"))
    for template in ("{", "{}", "{0}", "{a.b}", "{a[0]}"):
        with pytest.raises(InvalidInput, match="judge template: "):
            Judge("m", template)


async def test_judge_when_there_is_no_key_or_no_such_file_then_one_line_says_so(
    monkeypatch, tmp_path
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(InvalidInput, match="judge m: no key: set OPENAI_API_KEY"):
        await Judge("m")(prompt="p", completion="c")
    with pytest.raises(CannotStart, match=r"judge cache '.*missing/x': unable to open"):
        await Judge("m", api_key="k", cache=tmp_path / "missing" / "x")(prompt="p", completion="c")
