"""The number of inference servers follows the rollout workers' recommendation."""

from __future__ import annotations

import pytest
from tests.charts.rendering import NAMESPACE, named, refusal, render

METRIC = "areal_rollout_recommended_inference_servers"


def scaler(kind: str, *arguments: str) -> dict:
    objects = render("--set", "sglang.autoscaling.enabled=true", *arguments)
    [found] = [each for each in objects if each["kind"] == kind]
    return found


def test_keda_when_several_workers_recommend_then_the_largest_counts_once():
    spec = scaler("ScaledObject", "--set", "sglang.autoscaling.type=ScaledObject")["spec"]
    [trigger] = spec["triggers"]
    query = f'max({METRIC}{{namespace="{NAMESPACE}",service="areal-rollout"}} > 0)'
    assert trigger["metadata"]["query"] == query
    assert trigger["metadata"]["threshold"] == "1"


@pytest.mark.parametrize("api", ["autoscaling/v2", "autoscaling/v2beta2"])
def test_hpa_when_the_recommendation_is_its_metric_then_it_is_external(api):
    spec = scaler("HorizontalPodAutoscaler", "--api-versions", api)["spec"]
    [metric] = spec["metrics"]
    assert metric["external"]["metric"]["name"] == METRIC
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert spec["scaleTargetRef"]["name"] == "sglang"


def test_keda_when_another_metric_is_chosen_then_it_is_added_up():
    chosen = "sglang.autoscaling.metric=areal_rollout_running_episodes"
    spec = scaler("ScaledObject", "--set", "sglang.autoscaling.type=ScaledObject", "--set", chosen)
    assert spec["spec"]["triggers"][0]["metadata"]["query"].startswith("sum(")


def test_keda_when_prometheus_has_no_answer_then_the_number_stays():
    """An empty answer counts as 0 by KEDA's default: one server of a running stack would stay."""
    keda = ("--set", "sglang.autoscaling.type=ScaledObject,sglang.replicaCount=3")
    spec = scaler("ScaledObject", *keda)["spec"]
    assert spec["triggers"][0]["metadata"]["ignoreNullValues"] == "false"
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 3}
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 0
    assert spec["cooldownPeriod"] == 0


def test_scalers_when_two_releases_share_a_namespace_then_each_asks_for_its_own():
    chosen = ("sglang.autoscaling.enabled=true", "rollout.autoscaling.enabled=true")
    asked = []
    for release in ("areal", "second"):
        settings = ("--set", ",".join(chosen), "--set", "rollout.autoscaling.type=ScaledObject")
        objects = render(*settings, release=release)
        [hpa] = [each for each in objects if each["kind"] == "HorizontalPodAutoscaler"]
        [keda] = [each for each in objects if each["kind"] == "ScaledObject"]
        labels = hpa["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]
        asked += [str(labels), keda["spec"]["triggers"][0]["metadata"]["query"]]
        service = "areal-rollout" if release == "areal" else "second-areal-rollout"
        assert labels == {"namespace": NAMESPACE, "service": service}
        assert f'service="{service}"' in asked[-1]
        assert named(objects, "Service", service)
    assert len(set(asked)) == 4


@pytest.mark.parametrize(("least", "count", "first"), [(1, 3, 3), (5, 3, 5)])
def test_servers_when_they_are_autoscaled_then_they_begin_with_what_was_asked_for(
    least, count, first
):
    settings = f"sglang.autoscaling.minReplicas={least},sglang.replicaCount={count}"
    enabled = ("--set", "sglang.autoscaling.enabled=true", "--set", settings)
    assert named(render(*enabled), "Deployment", "sglang")["spec"]["replicas"] == first


def test_hpa_when_it_may_go_to_zero_then_it_is_refused_but_keda_is_not():
    zero = ("--set", "reward.autoscaling.enabled=true,reward.autoscaling.minReplicas=0")
    assert "reward.autoscaling: minReplicas 0 with type HPA" in refusal(*zero)
    assert render(*zero, "--set", "reward.autoscaling.type=ScaledObject")
