"""Groups with images on their way into a batch."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.areal_torch.engines.hub_families import IMAGE, VISION_START, make_family
from transformers import Qwen2VLImageProcessorPil

from areal.config.training import TrainEngineConfig
from areal.errors import InvalidInput
from areal.types import Trajectory, TrajectoryGroup
from areal_torch.algorithms.packing import check_batch, unpack
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.images import pack_groups_with_images

SIZES = {"tall": (8, 16), "square": (16, 16)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_family("qwen2_5_vl", tmp_path_factory.mktemp("seeing"))
    Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}
    ).save_pretrained(folder)
    return folder


def picture(kind, color="red"):
    file = io.BytesIO()
    Image.new("RGB", SIZES[kind], color).save(file, format="PNG")
    return file.getvalue()


def group(name, kinds, answers=2, sampled=(7, 8)):
    ids = [5, *[t for _ in kinds for t in (VISION_START, IMAGE, 6)], *sampled]
    mask = np.arange(len(ids)) >= len(ids) - len(sampled)
    one = {
        "input_ids": np.array(ids, np.int32),
        "loss_mask": mask,
        "behavior_logprobs": np.where(mask, -1.5, 0).astype(np.float32),
        "token_versions": np.where(mask, 4, -1).astype(np.int32),
        "rewards": np.eye(len(ids), dtype=np.float32)[-1],
        "images": tuple(picture(kind) for kind in kinds),
    }
    return TrajectoryGroup(name, [Trajectory(f"{name}.{n}", **one) for n in range(answers)])


def test_groups_when_packed_then_each_image_is_as_many_tokens_as_it_fills(model):
    groups = [group("a", ["tall"]), group("b", []), group("c", ["square", "tall"], 1)]
    batch = pack_groups_with_images(groups, model)
    check_batch(batch)
    assert batch["image_grid_thw"].tolist() == [[1, 4, 2], [1, 4, 4], [1, 4, 2]]
    assert batch["image_group"].tolist() == [0, 2, 2]
    filled = [VISION_START, IMAGE, IMAGE, 6]
    rows = [each["input_ids"].tolist() for each in unpack(batch)]
    assert rows[0] == rows[1] == [5, *filled, 7, 8]
    assert rows[2] == [5, 7, 8]
    assert rows[4] == [5, VISION_START, *[IMAGE] * 4, 6, *filled, 7, 8]
    for each in unpack(batch):
        assert each["loss_mask"].tolist() == [False] * (len(each["loss_mask"]) - 2) + [True] * 2
        assert each["rewards"].tolist()[-1] == each["rewards"].sum() == 1
        assert (each["token_versions"] == 4).tolist() == each["loss_mask"].tolist()
    theirs = Qwen2VLImageProcessorPil.from_pretrained(model)(
        images=[Image.open(io.BytesIO(picture("tall")))], return_tensors="pt"
    )
    assert torch.equal(batch["pixel_values"][:8], theirs["pixel_values"])
    engine = FSDPEngine(TrainEngineConfig(path=str(model), optimizer=None))
    engine.initialize()
    found = engine.forward(batch)
    assert torch.isfinite(found).all()
    assert (found[batch["loss_mask"]] < 0).all()
    engine.destroy()


def test_groups_when_an_answer_has_an_image_token_then_it_stays_one(model):
    batch = pack_groups_with_images([group("a", ["tall"], 1, sampled=(IMAGE, 8))], model)
    assert batch["input_ids"].tolist() == [5, VISION_START, IMAGE, IMAGE, 6, IMAGE, 8]


def test_groups_when_none_has_images_then_the_batch_is_text(model):
    assert "pixel_values" not in pack_groups_with_images([group("a", [])], "no-such-folder")
    assert len(pack_groups_with_images([], "no-such-folder")["input_ids"]) == 0


def test_groups_when_images_cannot_be_seen_then_are_refused_in_one_line(model, tmp_path):
    blind = make_family("qwen2", tmp_path / "blind")
    with pytest.raises(InvalidInput, match="does not take images: expected rows without `images`"):
        pack_groups_with_images([group("a", ["tall"])], blind)
    bare = make_family("qwen2_5_vl", tmp_path / "bare")
    with pytest.raises(InvalidInput, match="no image processor: "):
        pack_groups_with_images([group("a", ["tall"])], bare)
    broken = group("a", ["tall"], 1)
    broken.trajectories[0].images = (picture("tall")[:40],)
    with pytest.raises(InvalidInput, match="group 'a': an image cannot be read: "):
        pack_groups_with_images([broken], model)
    fewer = group("a", ["tall"], 1)
    fewer.trajectories[0].images *= 2
    with pytest.raises(InvalidInput, match=r"trajectory 'a.0': .* 1 image tokens .* expected 2"):
        pack_groups_with_images([fewer], model)
