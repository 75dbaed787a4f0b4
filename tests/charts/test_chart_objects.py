"""`weight_sync.path=s3://…`: servers fetch versions from a bucket, with credentials of the pods."""

from tests.charts.rendering import named, pods, render, render_ci


def test_pods_when_weights_are_in_a_bucket_then_those_that_read_or_write_them_have_credentials():
    objects = render_ci("objects-values.yaml")
    found = {
        (pod.component, container["name"])
        for pod in pods(objects)
        for container in pod.spec["containers"]
        if any(
            each["name"] == "AWS_SECRET_ACCESS_KEY" and each["valueFrom"]["secretKeyRef"]
            for each in container.get("env", [])
        )
    }
    assert found == {
        ("weight-sync", "weight-sync"),
        ("trainer", "pytorch"),
        ("sglang", "sglang"),
        ("sglang", "sidecar"),
    }


def test_servers_when_weights_are_in_a_bucket_then_they_mount_no_shared_volume():
    objects = render("--set", "overrides.weight_sync.path=s3://weights/run")
    (pod,) = (pod for pod in pods(objects) if pod.component == "sglang")
    assert all("emptyDir" in volume for volume in pod.spec["volumes"])
    assert [container["name"] for container in pod.spec["containers"]] == ["sglang"]


def test_egress_when_weights_are_in_a_bucket_then_the_three_that_need_it_may_leave():
    policy = named(render_ci("objects-values.yaml"), "NetworkPolicy", "areal-object-store")["spec"]
    (who,) = policy["podSelector"]["matchExpressions"]
    assert sorted(who["values"]) == ["sglang", "trainer", "weight-sync"]
    assert [each["port"] for each in policy["egress"][0]["ports"]] == [80, 443]
    names = [each["metadata"]["name"] for each in render() if each["kind"] == "NetworkPolicy"]
    assert "areal-object-store" not in names
