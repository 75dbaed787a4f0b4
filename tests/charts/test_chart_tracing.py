"""Traces: one value sends them from every component, and lets them out."""

from __future__ import annotations

from typing import Any

from tests.charts.rendering import render

COLLECTOR = "http://otel-collector.monitoring:4317"
SENDERS = {"gateway", "rollout", "reward", "buffer", "weight-sync", "trainer", "sglang"}


def environments(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The OTEL_ variables of each component's container."""
    found = {}
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "PyTorchJob":
            template = spec["pytorchReplicaSpecs"]["Master"]["template"]
        elif each["kind"] in {"Deployment", "StatefulSet"}:
            template = spec["template"]
        else:
            continue
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        [main] = [c for c in template["spec"]["containers"] if c["name"] != "sidecar"]
        found[component] = {
            e["name"]: e.get("value") for e in main.get("env", []) if e["name"].startswith("OTEL_")
        }
    return found


def test_chart_when_no_collector_is_named_then_nothing_of_traces_is_there() -> None:
    objects = render()
    assert not any(environments(objects).values())
    assert not [o for o in objects if o["metadata"]["name"].endswith("collector")]


def test_chart_when_a_collector_is_named_then_every_component_sends_there() -> None:
    sampler = {"name": "OTEL_TRACES_SAMPLER", "value": "parentbased_traceidratio"}
    objects = render(
        *("--set", f"tracing.endpoint={COLLECTOR}"),
        *("--set", f"tracing.env[0].name={sampler['name']}"),
        *("--set", f"tracing.env[0].value={sampler['value']}"),
    )
    found = environments(objects)
    assert {name for name, variables in found.items() if variables} == SENDERS
    for name in SENDERS:
        assert found[name] == {
            "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR,
            sampler["name"]: sampler["value"],
        }
    [policy] = [
        o
        for o in objects
        if o["kind"] == "NetworkPolicy" and o["metadata"]["name"].endswith("collector")
    ]
    [expression] = policy["spec"]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == SENDERS
    assert policy["spec"]["egress"] == [{"ports": [{"protocol": "TCP", "port": 4317}]}]


def test_chart_when_the_collector_changes_then_the_trainer_is_another_job() -> None:
    def trainer(*arguments: str) -> str:
        [job] = [o for o in render(*arguments) if o["kind"] == "PyTorchJob"]
        return str(job["metadata"]["name"])

    assert trainer("--set", f"tracing.endpoint={COLLECTOR}") != trainer()
