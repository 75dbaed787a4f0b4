"""The generation client where versions are adapters: each call names one, whoever asked for it."""

import asyncio

import pytest
from tests.fake_sglang import FakeSGLang
from tests.integration.generation_rig import check, empty, generate, request, serving
from tests.waiting import until

from areal.errors import WaitTimeout
from areal_rollout.generation.client import GenerationFailed

OLD, NEW = "v00000004-inc1", "v00000005-inc1"


@pytest.mark.parametrize("tokens", [6, 600])  # whole, and streamed
async def test_generate_when_the_version_is_an_adapter_then_named_and_every_token_is_of_it(tokens):
    # The server says of itself that its weights are version 0, which they are.
    server = FakeSGLang(version="0", listed_version="4", adapter=OLD, adapters=(OLD,))
    async with serving(server) as client:
        response = await generate(client, request(tokens), empty(), min_version=4)
        check(response, tokens)
        answers = [empty() for _ in range(3)]
        await client.generate(request(tokens), answers, min_version=4)
    assert response.output_versions == [4] * tokens
    assert [each.output_versions for each in answers] == [[4] * tokens] * 3
    assert {each["lora_path"] for each in server.requests} == {OLD}


async def test_generate_when_aborted_by_an_update_then_continues_with_the_new_adapter():
    server = FakeSGLang(
        version="0", listed_version="4", adapter=OLD, adapters=(OLD, NEW), hold=True, partial=2
    )
    async with serving(server) as client:
        task = asyncio.create_task(generate(client, request(6), empty()))
        await until(lambda: server.requests)
        server.listed_version, server.adapter = "5", NEW
        client.table.update([server.listed()])
        server.abort_all()
        response = await task
    check(response, 6)
    assert response.output_versions == [4, 4, 5, 5, 5, 5]
    assert [each["lora_path"] for each in server.requests] == [OLD, NEW]


async def test_generate_when_a_stream_of_an_adapter_breaks_then_its_tokens_are_kept():
    dying = FakeSGLang(
        version="0", listed_version="4", adapter=OLD, adapters=(OLD,),
        breaks_after=[(1, "0"), (40, "0"), (80, "0")],
    )  # fmt: skip
    good = FakeSGLang(version="0", listed_version="5", adapter=NEW, adapters=(NEW,))
    async with serving(dying, good) as client:
        client.table.update([dying.listed()])
        task = asyncio.create_task(generate(client, request(600), empty(), min_version=4))
        await until(lambda: client.reports, "a report")
        client.table.update([dying.listed(), good.listed()])
        response = await task
    check(response, 600)
    assert response.output_versions == [4] * 80 + [5] * 520


async def test_generate_when_a_server_lacks_its_adapter_then_it_is_the_servers_fault():
    lacking = FakeSGLang(version="0", listed_version="4", adapter=OLD, adapters=(NEW,))
    good = FakeSGLang(version="0", listed_version="4", adapter=OLD, adapters=(OLD,))
    async with serving(lacking, good) as client:
        client.table.update([lacking.listed()])
        task = asyncio.create_task(generate(client, request(6), empty()))
        await until(lambda: client.reports, "a report")
        assert OLD in client.reports[0][1]
        client.table.update([lacking.listed(), good.listed()])
        check(await task, 6)
    async with serving(lacking) as client:
        with pytest.raises((GenerationFailed, WaitTimeout)):
            await asyncio.wait_for(generate(client, request(6), empty()), 60)


async def test_generate_when_versions_are_whole_weights_then_no_adapter_is_named():
    server = FakeSGLang(version="4")
    async with serving(server) as client:
        check(await generate(client, request(6), empty()), 6)
    assert "lora_path" not in server.requests[0]
