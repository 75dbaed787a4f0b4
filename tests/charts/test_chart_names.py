"""Names stay whole, apart, and short enough for whatever an operator adds to them."""

from __future__ import annotations

import pytest
from tests.charts.rendering import CHART, of_kind, render

from areal.config.experiment import GRPOConfig, build_config
from areal_launch.clusters.kubernetes import Release

LIMIT = 63  # of a label of DNS (RFC 1123): Services, pods' host names, values of labels
LONGEST = "gsm8k-grpo-qwen3-8b-instruct-ablation-seven-b-trial-1"
EVERYTHING = ("--values", str(CHART / "ci" / "everything-values.yaml"))


def derived(objects):
    """The names of the objects and of what is made from them, as the operators do."""
    for each in objects:
        kind, name = each["kind"], each["metadata"]["name"]
        yield name
        if kind == "PyTorchJob":  # a pod and a Service each
            yield from (f"{name}-master-0", f"{name}-worker-99")
        elif kind == "TrainJob":  # JobSet: name, replicated job, its number, the pod's, a suffix
            yield f"{name}-node-0-0-abcde"
        elif kind == "StatefulSet":
            yield f"{name}-0"
        elif kind == "Job":
            completions = each["spec"].get("completions")
            yield f"{name}-{completions - 1}-abcde" if completions else f"{name}-abcde"


@pytest.mark.parametrize("workload", ["PyTorchJob", "TrainJob", "Job"])
def test_names_when_the_release_has_53_characters_then_all_that_come_from_it_fit(workload):
    assert len(LONGEST) == 53
    settings = ("--set", f"trainer.workload={workload},trainer.replicaCount=100")
    objects = render(*EVERYTHING, *settings, release=LONGEST)
    long = sorted({name for name in derived(objects) if len(name) > LIMIT})
    assert not long
    assert all(name == name.strip("-") for name in derived(objects))


@pytest.mark.parametrize("length", [25, 26, 31, 34])
def test_names_when_the_release_is_just_short_enough_or_not_then_all_fit(length):
    """The longest that is not cut, the shortest that is, and those between."""
    objects = render(*EVERYTHING, "--set", "trainer.workload=TrainJob", release=LONGEST[:length])
    assert not sorted({name for name in derived(objects) if len(name) > LIMIT})


def test_names_when_long_releases_differ_at_their_ends_then_so_do_all_their_objects():
    def names(release):
        objects = render(*EVERYTHING, release=release)
        return {(each["kind"], each["metadata"]["name"]) for each in objects}

    assert not names(LONGEST) & names(f"{LONGEST[:-1]}2")


def test_names_when_the_release_is_short_then_they_are_what_they_say():
    services = {each["metadata"]["name"] for each in of_kind(render(release="math"), "Service")}
    assert "math-areal-buffer" in services


def test_release_when_long_trials_differ_anywhere_then_so_do_their_names(tmp_path):
    def name(experiment, trial):
        config = build_config(
            GRPOConfig, None, [f"experiment_name={experiment}", f"trial_name={trial}"]
        )
        return Release(config, tmp_path).name

    experiment = "gsm8k-grpo-qwen3-8b-instruct-{}-long-ablation-of-the-thing"
    first, second = (name(experiment.format(which), "trial0") for which in ("a", "b"))
    assert first != second
    assert max(len(first), len(second)) <= 53
    assert first.endswith("trial0")


def test_names_when_one_is_given_then_all_begin_with_it():
    names = [each["metadata"]["name"] for each in render("--set", "fullnameOverride=mine")]
    assert [name for name in names if not name.startswith("mine-")] == []
    (long,) = {
        name.removesuffix("-buffer")
        for each in of_kind(render("--set", f"fullnameOverride={LONGEST}"), "Deployment")
        if (name := each["metadata"]["name"]).endswith("-buffer")
    }
    assert len(long) <= 31


def test_prepare_when_its_job_is_to_be_deleted_then_kubernetes_knows_when():
    def spec_of(*arguments):
        (job,) = of_kind(render(*arguments), "Job")
        return job["spec"]

    assert "ttlSecondsAfterFinished" not in spec_of()
    later = ("--set", "prepare.ttlSecondsAfterFinished=600")
    assert spec_of(*later)["ttlSecondsAfterFinished"] == 600
