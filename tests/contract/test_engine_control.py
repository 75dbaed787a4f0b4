"""Pauses, aborts, weight updates and information: the same from both engines."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import torch
from tests.contract.engines import Http, chosen, output_logprobs, reference
from transformers import DynamicCache

from areal_rollout.generation.protocol import error_message

TOLERANCE = 1e-4
PROMPT = [5, 17, 99, 3, 42]
LONG = {"ignore_eos": True, "temperature": 1.0}


def spans(answer) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]


def finish(answer) -> str:
    return answer["meta_info"]["finish_reason"]["type"]


@torch.no_grad()
def rebuilt(http: Http, answer) -> torch.Tensor:
    """Logprobs over a cache whose every position was computed by the weights of its time."""
    output = answer["output_ids"]
    config = http.engine.models[0].config.get_text_config()
    sequence, cache, done, found = PROMPT + output, DynamicCache(config=config), 0, []
    for version, start, end in spans(answer):
        stop, rows = len(PROMPT) - 1 + end, []
        # Recurrent layers of transformers continue a state by one token at a time.
        step = 1 if http.engine.name == "plain" and done else stop - done
        while done < stop:
            ids = torch.tensor([sequence[done : done + step]])
            model = http.engine.model(version)
            rows.append(model(ids, past_key_values=cache, use_cache=True).logits[0])
            done += step
        found.append(chosen(torch.cat(rows)[start - end :], output[start:end]))
    return torch.cat(found)


def recomputed(http: Http, answer) -> torch.Tensor:
    """Logprobs with everything computed by the weights of the token's own version."""
    output = answer["output_ids"]
    return torch.cat(
        [
            chosen(
                reference(http.engine.model(version), PROMPT, output[:end])[start:],
                output[start:end],
            )
            for version, start, end in spans(answer)
        ]
    )


@contextlib.asynccontextmanager
async def generating(http: Http, count: int = 3, tokens: int = 0):
    """Requests in flight, well inside their output of `tokens`; gives their tasks."""
    params = {**LONG, "max_new_tokens": tokens or http.engine.long}
    tasks = [
        asyncio.create_task(
            http.generate(PROMPT, extra={"rid": f"r{i}", "extra_key": "0"}, **params)
        )
        for i in range(count)
    ]
    try:
        await http.running(count)
        await http.advance(count)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------ batches


async def test_abort_when_it_names_one_of_a_batch_then_only_that_one_ends(http: Http):
    """What `n` would not give: its samples have ids that only the server knows."""
    rids, params = ["b0", "b1", "b2"], {**LONG, "max_new_tokens": http.engine.long}
    task = asyncio.create_task(
        http.generate([PROMPT] * 3, extra={"rid": rids, "extra_key": "0"}, **params)
    )
    await http.running(3)
    await http.advance(3)
    await http.ok("/abort_request", {"rid": "b1"})
    answers = await task
    assert [answer["meta_info"]["id"] for answer in answers] == rids
    assert [finish(answer) for answer in answers] == ["length", "abort", "length"]
    assert 0 < len(answers[1]["output_ids"]) < http.engine.long


# ------------------------------------------------------------------ updates in the middle


async def test_update_when_paused_in_place_then_requests_go_on_over_their_cache(http: Http):
    async with generating(http) as tasks:
        for version in (1, 2):
            await http.pause("in_place")
            answer = await http.update(version, flush_cache=False)
            assert answer["success"] is True
            assert await http.version() == str(version)
            await http.resume()
            await http.advance(len(tasks))
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert finish(answer) == "length"
        assert [version for version, _, _ in spans(answer)] == ["0", "1", "2"]
        assert answer["meta_info"]["num_retractions"] == 0
        assert answer["meta_info"]["weight_version"] == "2"
        found = output_logprobs(answer)
        torch.testing.assert_close(found, rebuilt(http, answer), atol=TOLERANCE, rtol=0)
        assert (
            found - recomputed(http, answer)
        ).abs().max() > 10 * TOLERANCE  # the check has teeth


async def test_update_when_retracted_then_requests_are_computed_anew(http: Http):
    async with generating(http) as tasks:
        await http.pause("retract")
        await http.update(1)
        await http.resume()
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert finish(answer) == "length"
        assert [version for version, _, _ in spans(answer)] == ["0", "1"]
        assert answer["meta_info"]["num_retractions"] == 1
        torch.testing.assert_close(
            output_logprobs(answer), recomputed(http, answer), atol=TOLERANCE, rtol=0
        )


async def test_pause_when_abort_then_partial_answers_with_200(http: Http):
    async with generating(http) as tasks:
        await http.pause("abort")
        answers = await asyncio.gather(*tasks)
        await http.update(1)
    for answer in answers:
        assert finish(answer) == "abort"
        assert 0 < len(answer["output_ids"]) < http.engine.long
        assert spans(answer) == [("0", 0, len(answer["output_ids"]))]
        torch.testing.assert_close(
            output_logprobs(answer), recomputed(http, answer), atol=TOLERANCE, rtol=0
        )


async def test_update_when_not_paused_then_waits_for_running_requests(http: Http):
    async with generating(http) as tasks:
        await http.update(1)
        assert (await http.load())["num_running_reqs"] == 0
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert spans(answer) == [("0", 0, http.engine.long)]
    assert await http.version() == "1"


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_pause_when_a_request_comes_then_it_waits_for_continue(http: Http, mode: str):
    await http.pause(mode)
    task = asyncio.create_task(http.generate(PROMPT, max_new_tokens=3, ignore_eos=True))
    await asyncio.sleep(0.3)
    assert not task.done()
    assert (await http.get("/ready"))[0] == 503
    await http.resume()
    assert len((await task)["output_ids"]) == 3
    assert (await http.get("/ready"))[0] == 200


async def test_control_when_paused_in_place_then_answers_at_once(http: Http):
    """Weight-sync asks all of this inside the pause."""
    async with generating(http) as tasks, asyncio.timeout(60):
        await http.pause("in_place")
        await http.update(1, flush_cache=False)
        assert await http.version() == "1"
        assert (await http.load())["num_running_reqs"] == len(tasks)
        assert (await http.ok("/weights_checker", {"action": "checksum"}))["success"] is True
        await http.resume()


async def test_update_when_in_place_but_flushing_then_refused(http: Http):
    """SGLang answers 400 although weights and version have changed; ours changes nothing."""
    async with generating(http) as tasks:
        await http.pause("in_place")
        body = {"model_path": str(http.engine.folders[1]), "weight_version": "1"}
        status, answer = await http.post("/update_weights_from_disk", body)
        assert status == 400
        assert answer["success"] is False
        sums = await checksums(http)
        await http.ok("/abort_request", {"abort_all": True})
        await http.resume()
        await asyncio.gather(*tasks)
    await http.update(1 if http.engine.real else 0)
    assert await checksums(http) == sums


# ------------------------------------------------------------------ aborts


async def test_abort_when_one_is_named_then_only_it_ends_with_what_it_has(http: Http):
    async with generating(http) as tasks:
        await http.ok("/abort_request", {"rid": "r1"})
        answer = await tasks[1]
        assert finish(answer) == "abort"
        assert 0 < len(answer["output_ids"]) < http.engine.long
        assert len(output_logprobs(answer)) == len(answer["output_ids"])
        assert spans(answer) == [("0", 0, len(answer["output_ids"]))]
        others = await asyncio.gather(tasks[0], tasks[2])
        assert [finish(other) for other in others] == ["length", "length"]


async def test_abort_when_all_then_partial_answers(http: Http):
    async with generating(http) as tasks:
        await http.ok("/abort_request", {"abort_all": True})
        answers = await asyncio.gather(*tasks)
    assert [finish(answer) for answer in answers] == ["abort"] * len(answers)
    assert all(answer["output_ids"] for answer in answers)


async def test_abort_when_retracted_then_partial_answers_keep_their_tokens(http: Http):
    """They wait in the queue with tokens of their own.

    SGLang hands a request's tokens on every 50; an abort in the queue gives those handed on.
    """
    async with generating(http) as tasks:
        await http.advance(len(tasks), 60)
        await http.pause("retract")
        await http.ok("/abort_request", {"abort_all": True})
        await http.resume()
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert finish(answer) == "abort"
        count = len(answer["output_ids"])
        assert count > 0
        assert spans(answer) == [("0", 0, count)]
        assert len(output_logprobs(answer)) == count


async def test_abort_when_paused_in_place_then_answered_by_continue_at_the_latest(http: Http):
    async with generating(http) as tasks:
        await http.pause("in_place")
        await http.ok("/abort_request", {"abort_all": True})
        await http.resume()
        answers = await asyncio.gather(*tasks)
    assert [finish(answer) for answer in answers] == ["abort"] * len(answers)


@pytest.mark.parametrize("body", [{}, {"rid": "nobody"}, {"rid": ""}])
async def test_abort_when_nobody_is_meant_then_nothing_happens(http: Http, body):
    async with generating(http, count=1) as tasks:
        await http.ok("/abort_request", body)
        assert finish(await tasks[0]) == "length"


async def test_abort_when_a_rid_begins_another_then_sglang_ends_both(http: Http):
    """SGLang compares prefixes: our client's ids must not begin one another."""
    async with generating(http, count=2) as tasks:
        params = {**LONG, "max_new_tokens": http.engine.long}
        longer = asyncio.create_task(http.generate(PROMPT, extra={"rid": "r1-and-more"}, **params))
        await http.running(3)
        await http.ok("/abort_request", {"rid": "r1"})
        assert finish(await tasks[1]) == "abort"
        assert finish(await longer) == ("abort" if http.engine.real else "length")
        assert finish(await tasks[0]) == "length"


# ------------------------------------------------------------------ weights and versions


async def checksums(http: Http) -> dict[str, str]:
    answer = await http.ok("/weights_checker", {"action": "checksum"})
    assert answer["success"] is True
    (rank,) = answer["ranks"]
    return rank["checksums"]


async def test_checksums_when_weights_are_equal_then_equal(http: Http):
    before = await checksums(http)
    assert len(before) > 10
    await http.update(1)
    after = await checksums(http)
    assert before.keys() == after.keys()
    # Tied weights may be listed once or twice; what is listed has changed.
    assert all(before[name] != after[name] for name in before)
    await http.update(0)
    assert await checksums(http) == before


async def test_update_when_it_fails_then_400_and_the_version_stays(http: Http):
    body = {"model_path": "/nowhere", "weight_version": "9"}
    status, answer = await http.post("/update_weights_from_disk", body)
    assert (status, answer["success"]) == (400, False)
    assert answer["message"]
    assert await http.version() == "0"


async def test_version_when_renamed_then_the_next_token_carries_it(http: Http):
    answer = await http.ok("/update_weight_version", {"new_version": "3"})
    assert answer["success"] is True
    assert await http.version() == "3"
    answer = await http.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
    assert spans(answer) == [("3", 0, 2)]


async def test_flush_when_idle_then_the_cache_is_gone(http: Http):
    prompt = list(range(2, 60))
    await http.generate(prompt, max_new_tokens=2)
    status, words = await http.post("/flush_cache", {})
    assert (status, words.split(".")[0]) == (200, "Cache flushed")
    answer = await http.generate(prompt, max_new_tokens=2)
    assert answer["meta_info"]["cached_tokens"] == 0


# ------------------------------------------------------------------ information


async def test_information_when_asked_then_what_our_services_read_is_there(http: Http):
    assert await http.get("/health") == (200, "")
    assert (await http.get("/ready"))[0] == 200
    _, model = await http.get("/model_info")
    assert model["model_path"] == str(http.engine.folders[0])
    assert model["weight_version"] == "0"
    assert model["is_generation"] is True
    assert model["architectures"] == [type(http.engine.models[0]).__name__]
    _, server = await http.get("/server_info")
    assert server["startup_time"]
    assert server["random_seed"] == 5
    assert server["status"] == "ready"
    assert server["internal_states"][0]["weight_version"] == "0"
    assert server["max_total_num_tokens"] > 0
    status, loads = await http.get("/v1/loads")
    assert status == 200
    assert isinstance(loads["timestamp"], str)
    (load,) = loads["loads"]
    for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"):
        assert load[name] == 0, name
    assert load["max_total_num_tokens"] > 0


async def test_server_info_when_updated_then_only_internal_states_follow(http: Http):
    await http.update(1)
    _, server = await http.get("/server_info")
    assert server["weight_version"] == "0"
    assert server["internal_states"][0]["weight_version"] == "1"


async def test_loads_when_requests_run_then_counts_them(http: Http):
    async with generating(http) as tasks:
        await http.pause("in_place")
        load = await http.load()
        assert load["num_running_reqs"] == len(tasks)
        assert load["num_used_tokens"] > len(PROMPT)
        await http.resume()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "softly"}),
        ("/abort_request", {"rid": 5}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": 5}),
        ("/update_weight_version", {}),
        ("/weights_checker", {"action": "guess"}),
    ],
)
async def test_control_when_bad_then_400_that_our_client_can_read(http: Http, path, body):
    status, answer = await http.post(path, body)
    assert status == 400
    assert error_message(json.dumps(answer).encode())


async def test_control_when_a_field_is_unknown_then_ours_refuses(http: Http):
    """SGLang ignores what it does not know, so a misspelt `flush_cache` would go unnoticed."""
    status, _ = await http.post("/pause_generation", {"mod": "in_place"})
    assert status == (200 if http.engine.real else 400)


async def test_unknown_path_when_called_then_404(http: Http):
    assert (await http.get("/nothing"))[0] == 404
    assert (await http.get("/generate"))[0] == 405
