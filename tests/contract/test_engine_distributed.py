"""Weights that a trainer broadcasts: one set of requests, both engines; this process is rank 0."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.contract.engines import Http, output_logprobs, reference
from tests.contract.test_engine_control import PROMPT, generating, rebuilt, spans

from areal.weights.broadcast import Offer, Seat, buckets
from areal.weights.manifest import build_manifest
from areal_torch.publish.process_group import GroupError, ProcessGroup
from areal_weight_sync.engine.http import HttpEngine, open_session

NUMBERS = itertools.count(1)
LASTING = 3800
"""Tokens of a request that nothing outlasts, and that is aborted."""


class Trainer:
    """Rank 0 of a group of two."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self.name = f"group-{next(NUMBERS)}"
        self.group: ProcessGroup | None = None

    async def join(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            body = {
                "master_address": "127.0.0.1",
                "master_port": listener.getsockname()[1],
                "rank_offset": 1,
                "world_size": 2,
                "group_name": self.name,
                "backend": "gloo",
            }
            asked = asyncio.create_task(self.http.ok("/init_weights_update_group", body))
            lead = asyncio.to_thread(ProcessGroup.lead, listener, 2, self.name, "gloo", 60.0)
            self.group, answer = await asyncio.gather(lead, asked)
        assert answer["success"] is True

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        tied = "lm_head.weight"
        state = self.http.engine.models[version].state_dict()
        return {name: tensor for name, tensor in state.items() if name != tied}

    def request(self, tensors: dict[str, torch.Tensor], **values) -> dict:
        return {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self.name,
            **values,
        }

    async def give(self, tensors: dict[str, torch.Tensor], **values):
        asked = asyncio.create_task(
            self.http.ok("/update_weights_from_distributed", self.request(tensors, **values))
        )
        await asyncio.to_thread(self.group.broadcast, list(tensors.values()), 60.0)
        return await asked


@pytest.fixture
async def trainer(http: Http) -> AsyncIterator[Trainer]:
    made = Trainer(http)
    await made.join()
    yield made
    await http.post("/destroy_weights_update_group", {"group_name": made.name})


async def test_broadcast_when_received_in_buckets_then_the_new_weights_serve(
    http: Http, trainer: Trainer
) -> None:
    for version in (1, 2):  # the group stays
        tensors = trainer.tensors(version)
        half = len(tensors) // 2
        items = list(tensors.items())
        await http.ok("/begin_weight_update", {})
        await trainer.give(dict(items[:half]), weight_version=str(version), flush_cache=False)
        answer = await trainer.give(dict(items[half:]), weight_version=str(version))
        assert answer["success"] is True
        await http.ok("/end_weight_update", {})
        assert await http.version() == str(version)
        answer = await http.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
        logits = reference(http.engine.models[version], PROMPT, answer["output_ids"])
        expected = logits.log_softmax(-1).max(-1).values
        assert (output_logprobs(answer) - expected).abs().max() < 1e-4


async def test_broadcast_when_paused_in_place_then_requests_go_on(
    http: Http, trainer: Trainer
) -> None:
    async with generating(http) as tasks:
        await http.pause("in_place")
        await http.ok("/begin_weight_update", {})
        await trainer.give(trainer.tensors(1), weight_version="1", flush_cache=False)
        await http.ok("/end_weight_update", {})
        await http.resume()
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert [version for version, _, _ in spans(answer)] == ["0", "1"]
        assert (output_logprobs(answer) - rebuilt(http, answer)).abs().max() < 1e-4


async def test_update_when_out_of_order_then_400(http: Http, trainer: Trainer) -> None:
    request = trainer.request(trainer.tensors(1))
    for path, body in (("/update_weights_from_distributed", request), ("/end_weight_update", {})):
        assert (await http.post(path, body))[0] == 400, path
    await http.ok("/begin_weight_update", {})
    try:
        assert (await http.post("/begin_weight_update", {}))[0] == 400
    finally:
        await http.post("/end_weight_update", {})
    unknown = {"group_name": "nobody"}
    assert (await http.post("/destroy_weights_update_group", unknown))[0] == 400
    assert await http.version() == "0"


async def test_broadcast_when_the_server_has_left_the_group_then_the_trainer_is_told(
    http: Http, trainer: Trainer
) -> None:
    await http.ok("/destroy_weights_update_group", {"group_name": trainer.name})
    since = time.monotonic()
    with pytest.raises(GroupError, match=trainer.name):
        await asyncio.to_thread(trainer.group.broadcast, [torch.zeros(20_000_000)], 60.0)
    if not http.engine.real:
        assert time.monotonic() - since < 50, "long before the deadline"


async def test_broadcast_when_the_trainer_goes_then_the_server_says_so_and_serves_on(
    http: Http, trainer: Trainer
) -> None:
    if http.engine.real:
        pytest.skip("SGLang has written some tensors by then: it must be loaded again")
    tensors = trainer.tensors(1)
    await http.ok("/begin_weight_update", {})
    asked = asyncio.create_task(
        http.post("/update_weights_from_distributed", trainer.request(tensors, weight_version="1"))
    )
    await asyncio.sleep(0.2)
    trainer.group = None
    status, answer = await asked
    assert status == 400
    assert trainer.name in answer["message"]
    assert (await http.post("/end_weight_update", {}))[0] == 400  # incomplete
    assert await http.version() == "0"
    answer = await http.generate(PROMPT, max_new_tokens=5, temperature=0)
    assert spans(answer)[0][0] == "0"


BAD = [
    (lambda r: r["names"].__setitem__(3, "model.extra"), "model.extra"),
    (lambda r: r["shapes"].__setitem__(0, [3, 64]), "[3, 64]"),
    (lambda r: r["dtypes"].__setitem__(0, "int8"), "int8"),
    (lambda r: r["names"].__setitem__(1, r["names"][0]), "has shape"),
    (lambda r: r["shapes"].pop(), "the same number of each"),
    (lambda r: r["names"].__setitem__(0, ["a"]), "lists of strings"),
    (lambda r: r.update(group_name="nobody"), "nobody"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message for _, message in BAD])
async def test_broadcast_when_not_this_model_then_refused_before_anything_is_received(
    http: Http, trainer: Trainer, spoil, message: str
) -> None:
    if http.engine.real:
        pytest.skip("SGLang loads nothing, or dies, and reports success")
    request = trainer.request(trainer.tensors(1))
    spoil(request)
    await http.ok("/begin_weight_update", {})
    status, answer = await http.post("/update_weights_from_distributed", request)
    assert status == 400
    assert message in answer["message"]
    assert (await http.post("/end_weight_update", {}))[0] == 400
    # No one waits: the group can be used.
    await http.ok("/begin_weight_update", {})
    await trainer.give(trainer.tensors(1), weight_version="1")
    await http.ok("/end_weight_update", {})
    assert await http.version() == "1"


async def test_staging_when_broadcast_then_checked_by_digest_and_swapped_without_a_pause(
    http: Http, trainer: Trainer
) -> None:
    """Ours alone: what weight-sync does with a server that can."""
    if http.engine.real:
        assert (await http.post("/stage_weights", {}))[0] == 404
        return
    from areal.weights.safetensors import digest_of
    from areal_torch.engines.export.publishing import host_tensors

    tensors = trainer.tensors(1)
    digests = [digest_of(t.data) for t in host_tensors(tensors.items())]

    async def stage(digests: list[str]):
        request = trainer.request(tensors, digests=digests)
        asked = asyncio.create_task(http.post("/stage_weights", request))
        await asyncio.to_thread(trainer.group.broadcast, list(tensors.values()), 30.0)
        return await asked

    status, answer = await stage(["0" * 32, *digests[1:]])
    assert status == 400
    assert next(iter(tensors)) in answer["message"]
    async with generating(http, tokens=LASTING) as tasks:
        status, answer = await stage(digests)
        assert status == 200
        assert answer["ranks"][0]["checksums"] == dict(zip(tensors, digests, strict=True))
        body = {"model_path": answer["model_path"], "weight_version": "1", "flush_cache": False}
        await http.ok("/update_weights_from_disk", body)
        answers = await ended(http, tasks)
    for answer in answers:
        assert [version for version, _, _ in spans(answer)] == ["0", "1"]


async def ended(http: Http, tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """The answers of lasting requests, which end some tokens from now."""
    await http.advance(len(tasks))
    await http.ok("/abort_request", {"abort_all": True})
    return await asyncio.gather(*tasks)


async def test_weight_sync_when_a_trainer_broadcasts_then_brings_the_server_along(
    http: Http,
) -> None:
    """What the coordinator's member does, in its order."""
    manifest = build_manifest(http.engine.folders[1], 1, 1)
    version, trainer = replace(manifest, files=()), Trainer(http)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = Offer("127.0.0.1", listener.getsockname()[1], "gloo")

        def broadcast() -> None:
            group = ProcessGroup.lead(listener, 2, trainer.name, "gloo", 60.0)
            state = trainer.tensors(1)
            for bucket in buckets(version.tensors):
                group.broadcast([state[tensor.name] for tensor in bucket], 60.0)

        async with open_session({}) as session, generating(http, tokens=LASTING) as tasks:
            engine = HttpEngine(http.engine.url, session)
            await engine.boot_id()
            assert engine.ranks == 1
            sending = asyncio.create_task(asyncio.to_thread(broadcast))
            seat = Seat(offer, trainer.name, 1, 2, version.tensors)
            fingerprint = await engine.receive(version, seat, timeout=60.0)
            assert (fingerprint is None) == http.engine.real
            if http.engine.real:
                await engine.pause("in_place")
            await engine.load(version, flush_cache=False, timeout=60.0)
            await engine.resume()
            await sending
            answers = await ended(http, tasks)
    assert await http.version() == "1"
    for answer in answers:
        assert [version for version, _, _ in spans(answer)] == ["0", "1"]
        assert (output_logprobs(answer) - rebuilt(http, answer)).abs().max() < 1e-4
    await http.ok("/destroy_weights_update_group", {"group_name": trainer.name})


async def test_group_when_it_cannot_be_then_400_that_says_why(http: Http) -> None:
    if http.engine.real:
        pytest.skip("SGLang waits half an hour for a trainer that is not there, generating nothing")
    body = {
        "master_address": "127.0.0.1",
        "master_port": 9,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
    }
    for change, message in (
        ({"backend": "nccl"}, "backend"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"rank_offset": 2}, "rank_offset"),
        ({"master_port": 0}, "master_port"),
    ):
        status, answer = await http.post("/init_weights_update_group", body | change)
        assert (status, message in answer["message"]) == (400, True), answer
