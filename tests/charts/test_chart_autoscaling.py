"""The number of inference servers follows the rollout workers' recommendation."""

from __future__ import annotations

import pytest
from tests.charts.rendering import NAMESPACE, render

METRIC = "areal_rollout_recommended_inference_servers"


def scaler(kind: str, *arguments: str) -> dict:
    objects = render("--set", "sglang.autoscaling.enabled=true", *arguments)
    [found] = [each for each in objects if each["kind"] == kind]
    return found


def test_keda_when_several_workers_recommend_then_the_largest_counts_once():
    spec = scaler("ScaledObject", "--set", "sglang.autoscaling.type=ScaledObject")["spec"]
    [trigger] = spec["triggers"]
    query = f'max({METRIC}{{namespace="{NAMESPACE}"}} > 0)'
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
