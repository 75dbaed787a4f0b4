"""Images through the ledger: its own process, gRPC, a real Redis."""

import io
import os
from dataclasses import replace

import pytest
from PIL import Image
from tests.buffer_client import BufferClient
from tests.buffer_server import register
from tests.ledger_support import make_group, make_task

from areal.errors import InvalidInput
from areal.images import image_files
from areal.protocol.leases import TakeState


def picture(size: int = 16) -> bytes:
    file = io.BytesIO()
    noise = os.urandom(3 * size * size)
    Image.frombytes("RGB", (size, size), noise).save(file, format="PNG")
    return file.getvalue()


async def test_images_when_a_row_has_them_then_worker_and_trainer_get_the_same_files(
    buffer: BufferClient,
) -> None:
    incarnation = await register(buffer)
    files = (picture(), picture())
    tasks = [
        replace(make_task(f"0:{i}", position=(0, i)), data={"prompt": "?", "images": list(files)})
        for i in range(2)
    ]
    assert await buffer.submit_tasks(tasks, incarnation=incarnation) == [True] * 2
    leases, _ = await buffer.lease_tasks("w1", 10, 0)
    for lease in leases:
        assert image_files(lease.task.data) == files
        group = make_group(lease.task.task_id)
        for each in group.trajectories:
            each.images = files
        assert await buffer.complete_task(lease.task.task_id, lease.token, group, "w1")
    batch = await buffer.take_batch(incarnation, 1, 1)
    assert batch.state is TakeState.TAKEN
    ids = [group.task_id for group in batch.groups]
    for group in await buffer.fetch_groups(incarnation, 1, ids):
        assert group.images == files
        assert all(each.images == files for each in group.trajectories)


async def test_images_when_larger_than_a_row_may_be_then_the_row_is_refused_in_one_line(
    buffer: BufferClient,
) -> None:
    incarnation = await register(buffer)
    row = {"images": [picture(600)]}  # noise does not compress: about 1.1 MB
    task = replace(make_task("0:0", position=(0, 0)), data=row)
    with pytest.raises(InvalidInput, match=r"task '0:0' data_json has 14\d+ characters: at most"):
        await buffer.submit_tasks([task], incarnation=incarnation)
