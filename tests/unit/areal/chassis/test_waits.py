"""The watchdog's record, and how it is read from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from areal.chassis.waits import Wait, Waits, WaitsCollector
from areal_launch.view.watchdog import ask_waits


def test_waits_when_blocks_run_then_the_oldest_of_each_kind_is_named_until_they_end() -> None:
    waits = Waits()
    with waits.on("batch", "buffer", "step 7"):
        time.sleep(0.02)
        with waits.on("batch", "buffer", "step 8"), waits.on("answer", "redis"):
            batch, answer = waits.oldest()
            assert (batch.what, batch.on, batch.detail) == ("batch", "buffer", "step 7")
            assert batch.seconds >= 0.02 > answer.seconds
        assert [wait.detail for wait in waits.oldest()] == ["step 7"]
    assert waits.oldest() == []


def test_waits_when_the_block_raises_then_it_is_over() -> None:
    waits = Waits()
    with pytest.raises(KeyError), waits.on("answer", "redis"):
        raise KeyError
    assert waits.oldest() == []


def test_waits_when_a_component_is_watched_then_asked_at_each_look() -> None:
    waits, ages = Waits(), iter([3.0, 4.0])

    def source() -> Iterator[Wait]:
        yield Wait("server", "http://a", next(ages), "joining")

    waits.watch(source)
    assert [str(wait) for wait in waits.oldest()] == ["server (joining) on http://a for 3.0 s"]
    assert waits.oldest()[0].seconds == 4.0


def test_waits_when_other_threads_wait_then_looking_is_safe() -> None:
    waits, stop = Waits(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with waits.on("call", "buffer"):
                pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        waits.oldest()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert waits.oldest() == []


def test_metric_when_scraped_then_one_name_per_service_and_a_sample_per_kind() -> None:
    waits, registry = Waits(), CollectorRegistry()
    WaitsCollector("weight-sync", waits, registry)
    assert "oldest_wait_seconds{" not in generate_latest(registry).decode()
    with waits.on("server", "http://a", "never a label"):
        text = generate_latest(registry).decode()
    assert 'areal_weight_sync_oldest_wait_seconds{what="server"} ' in text
    assert "never a label" not in text


async def test_watchdog_when_asking_then_each_answers_or_is_named_and_sglang_is_left_out() -> None:
    waits = Waits()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(waits.as_json("buffer"))

    app = web.Application()
    app.add_routes([web.get("/waits", answer)])
    sites = []
    for served in (app, web.Application()):
        runner = web.AppRunner(served)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sites.append((runner, f"127.0.0.1:{runner.addresses[0][1]}"))
    try:
        with waits.on("batch", "rollout workers", "step 3"):
            addresses = {"buffer": sites[0][1], "sglang-0": sites[1][1], "redis": ""}
            found, problems = await ask_waits({**addresses, "reward": "127.0.0.1:1"}, 2.0)
    finally:
        for runner, _ in sites:
            await runner.cleanup()
    assert set(found) == {"buffer"}
    assert (found["buffer"][0].what, found["buffer"][0].detail) == ("batch", "step 3")
    assert set(problems) == {"reward"}
    assert problems["reward"].startswith("http://127.0.0.1:1/waits: ")
