"""Which images a release takes, and that all of them can be pinned."""

import pytest
from tests.charts.rendering import CI, pods, refusal, render, render_ci

NAMES = ("control", "reward", "weight-sync", "sandbox", "trainer", "inference-cpu", "stores")
BOXES = "overrides.sandbox.boxes=8"
DIGEST = "sha256:" + "0123456789abcdef" * 4


def images(objects):
    return {container["image"] for pod in pods(objects) for container in pod.containers()}


def test_images_when_each_has_a_reference_then_no_container_takes_another():
    pinned = {name: f"registry.example.com/x/{name}@{DIGEST}" for name in NAMES}
    settings = [f"image.references.{name}={reference}" for name, reference in pinned.items()]
    together = ("--set", ",".join(["image.repository=", BOXES, *settings]))
    assert images(render(*together)) == set(pinned.values())
    gpus = ("--set", "sglang.gpus=1,overrides.weight_sync.transport=stream", *together)
    others = {name: each for name, each in pinned.items() if name != "inference-cpu"}
    assert images(render(*gpus)) == {*others.values(), "lmsysorg/sglang:v0.5.23"}


def test_images_when_a_component_has_its_own_then_that_wins():
    own = "image.references.control=r/control:1,gateway.image=r/gateway:2"
    found = images(render("--set", own))
    assert {"r/control:1", "r/gateway:2"} <= found


@pytest.mark.parametrize("tag", ["", "v1"])
def test_images_when_no_registry_is_named_then_it_is_refused(tag):
    """docker.io/areal belongs to somebody else."""
    said = refusal("--set", f"image.repository=,image.tag={tag}")
    assert "image.repository is empty" in said
    assert "image.tag=dev" in said


def test_images_when_the_tag_is_dev_then_they_are_those_of_make_images():
    found = images(render("--set", f"image.repository=,image.tag=dev,{BOXES}"))
    assert found == {f"areal/{name}:dev" for name in NAMES}


@pytest.mark.parametrize("values", CI)
def test_images_when_an_example_is_rendered_then_none_is_of_docker_hub_by_accident(values):
    for image in images(render_ci(values)):
        own = image.startswith("registry.example.com/") or image.endswith(":dev")
        assert own or image.startswith("lmsysorg/"), image
