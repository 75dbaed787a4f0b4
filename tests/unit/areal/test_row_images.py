"""Images on their way from a row to a server and into a group."""

import io
from dataclasses import replace
from decimal import Decimal

import orjson
import pytest
from PIL import Image
from tests.unit.areal.protocol.test_wire import trajectory
from tests.unit.areal.workflows.test_rlvr import Engine

from areal.errors import InvalidInput
from areal.images import data_url, image_files
from areal.protocol import trajectories as wire
from areal.types import (
    GenerationHyperparameters,
    LLMRequest,
    LLMResponse,
    Purpose,
    StopReason,
    Task,
    TrajectoryGroup,
    WorkflowSpec,
)
from areal.v1 import trajectory_pb2 as pb
from areal.workflows.base import make_trajectory
from areal.workflows.rlvr import RLVRWorkflow
from areal_rollout.generation.protocol import ModelLimits, request_body
from areal_rollout.journal import request_digest

PICTURE = Image.new("RGB", (8, 4), "red")


def png(color="red"):
    file = io.BytesIO()
    Image.new("RGB", (8, 4), color).save(file, format="PNG")
    return file.getvalue()


def sent(row):
    """The row as a worker gets it."""
    task = Task("t", Purpose.TRAIN, WorkflowSpec("rlvr"), row)
    return wire.task_from_pb(pb.Task.FromString(wire.task_to_pb(task).SerializeToString())).data


def test_row_when_it_has_images_of_any_kind_then_a_worker_finds_their_files(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    given = [PICTURE, tmp_path / "a.png", png(), data_url(png()), {"bytes": png(), "path": "a"}]
    row = sent({"images": given, "answer": "2"})
    assert image_files(row) == (png(),) * 5
    assert row["answer"] == "2"
    assert image_files({"prompt": "no images"}) == ()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"GIF89a", "image of 6 bytes begins with b'GIF89a': expected a PNG, JPEG or WebP"),
        ("no-such-path", None),
    ],
)
def test_row_when_an_image_is_none_then_is_refused_in_one_line(image, message, tmp_path):
    given = image if message else tmp_path / image
    with pytest.raises(InvalidInput, match=message or "no-such-path': No such file"):
        sent({"images": [given]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": [object()]}, r"^field images\[0\]: got object <object "),
        (
            {"a": {"b": [1, Decimal("1.5")]}},
            r"^field a\.b\[1\]: got Decimal Decimal\('1\.5'\), exp",
        ),
        ({"a": 1, "b": {2}}, r"^field b: got set \{2\}, expected a JSON type or an image"),
        ({"a": {(1, 2): 1}}, r"^field a: got the key \(1, 2\), expected text"),
        ({"a": [b"x"]}, r"^field a\[0\]: image of 1 bytes begins with b'x'"),
        ({1: 1}, "^field names: got the key 1, expected text"),
        ({"a": "\ud800"}, "^field a: got str '.ud800'"),
    ],
)
def test_row_when_it_holds_something_else_then_the_field_is_named(row, message):
    with pytest.raises(InvalidInput, match=message):
        sent(row)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("data:image/png;base64,AAAA", "images: expected a list, got str 'data:image/png"),
        (float("nan"), "images: expected a list, got float nan"),
        (b"x", "images: expected a list, got bytes b'x'"),
        (["picture.png"], r"images\[0\]: expected data:image/.*got 'picture.png'"),
        ([data_url(png()), "data:image/png;base64,A?"], r"images\[1\]: not base64"),
    ],
)
def test_image_files_when_the_row_has_something_else_then_it_is_named(images, message):
    with pytest.raises(InvalidInput, match=message):
        image_files({"images": images})


def test_group_when_it_has_images_then_they_travel_once():
    files = (png(), png("blue"))
    group = TrajectoryGroup("t", [replace(trajectory(), images=files) for _ in range(4)])
    packed = wire.pack_group(group)
    back = wire.unpack_group(packed)
    assert [each.images for each in back.trajectories] == [files] * 4
    assert wire.group_to_pb(group).SerializeToString().count(files[0]) == 1
    assert wire.unpack_group(wire.pack_group(TrajectoryGroup("t", [trajectory()]))).images == ()


def test_group_when_its_images_differ_then_is_refused():
    several = [replace(trajectory(), images=(png(color),)) for color in ("red", "blue")]
    with pytest.raises(InvalidInput, match="group 't': trajectories have different images"):
        wire.group_to_pb(TrajectoryGroup("t", several))


def test_request_when_it_has_images_then_each_prompt_of_the_call_has_them():
    gconfig = GenerationHyperparameters(max_new_tokens=4)
    request = LLMRequest([5, 6, 7], gconfig, images=(png(),))
    begun = LLMResponse([5, 6, 7], [8], [-1.0], [3], StopReason.ABORT)
    fresh = LLMResponse([5, 6, 7], [], [], [], StopReason.ABORT)

    def body(responses):
        rids = [str(number) for number in range(len(responses))]
        options = {"limits": ModelLimits(96, 64), "most": 4, "stream_interval": 0}
        return orjson.loads(request_body(request, responses, rids, extra_key="3", **options))

    url = data_url(png())
    one, two = body([begun]), body([begun, fresh])
    assert (one["input_ids"], one["image_data"]) == ([5, 6, 7, 8], [url])
    assert two["image_data"] == [[url], [url]]
    request = replace(request, images=())
    assert "image_data" not in body([begun])


def test_journal_when_images_differ_then_calls_do():
    request = LLMRequest([5], GenerationHyperparameters(), images=(png(),))
    digests = {request_digest(replace(request, images=i)) for i in ((), (png(),), (png("blue"),))}
    assert len(digests) == 3
    assert request_digest(replace(request, rid="other")) in digests


TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{{ '<|pad|>' if c.type == 'image' else c.text }}"
    "{% endfor %}{% endif %}{% endfor %}"
)


class Seeing(Engine):
    """Its answers have the request's images, as an episode's do."""

    async def agenerate_group(self, request):
        return [replace(r, images=request.images) for r in await super().agenerate_group(request)]


async def test_rlvr_when_a_row_has_images_then_request_and_trajectories_have_them():
    engine = Seeing(TEMPLATE)
    row = sent({"prompt": "How many?", "images": [PICTURE, png("blue")], "answer": "2"})
    workflow = RLVRWorkflow("math", GenerationHyperparameters(n_samples=2, max_new_tokens=4))
    group = await workflow.arun_episode(engine, row)
    files = (png(), png("blue"))
    [request] = engine.requests
    assert request.images == files
    assert engine.tokenizer.decode(request.input_ids) == "<|user|><|pad|><|pad|>How many?"
    assert [each.images for each in group] == [files, files]
    [(_, item)] = engine.scored
    assert item["data"] == {"prompt": "How many?", "answer": "2"}
    assert make_trajectory(LLMResponse([1], [2], [-1.0], [0], StopReason.STOP), 1.0).images == ()
