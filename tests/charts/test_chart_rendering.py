"""Every values file of ci/ renders, lints and is valid for current and older clusters."""

import copy
import json

import jsonschema
import kubernetes_validate
import pytest
from tests.charts.rendering import CHART, CI, crd_schemas, helm, named, render, render_ci

VERSIONS = ("1.29", "1.33", "1.37")
# They have no published schema to check against.
WITHOUT_SCHEMA = {"ScaledObject", "HTTPRoute"}


def validate(each, version):
    schema = crd_schemas().get((each["apiVersion"], each["kind"]))
    if schema is not None:
        jsonschema.Draft7Validator(schema).validate(each)
    elif each["kind"] not in WITHOUT_SCHEMA:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_chart_when_rendered_with_the_ci_files_then_every_object_is_valid(version):
    # Most objects are the same with every file: each is looked at once.
    objects = {json.dumps(each): (values, each) for values in CI for each in render_ci(values)}
    for values, each in objects.values():
        try:
            validate(each, version)
        except jsonschema.ValidationError as error:
            where = ".".join(map(str, error.absolute_path))
            name = f"{values}: {each['kind']}/{each['metadata']['name']}"
            pytest.fail(f"{name}, Kubernetes {version}: {where}: {error.message}")


@pytest.mark.parametrize("version", [each for each in VERSIONS if each != "1.29"])
def test_chart_when_a_pod_makes_namespaces_then_its_fields_are_valid(version):
    objects = render("--set", "overrides.sandbox.boxes=8")
    validate(named(objects, "Deployment", "areal-sandbox"), version)


@pytest.mark.parametrize("values", CI)
def test_chart_when_linted_with_a_ci_file_then_helm_finds_nothing(values):
    done = helm("lint", str(CHART), "--strict", "--quiet", "-f", str(CHART / "ci" / values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("Deployment", "areal-buffer", ("spec", "template", "spec")),
        ("PyTorchJob", None, ("spec", "runPolicy")),
        ("ServiceMonitor", "areal", ("spec",)),
    ],
)
def test_validation_when_a_field_is_unknown_then_it_is_refused(kind, name, path):
    objects = render_ci("everything-values.yaml")
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    broken = copy.deepcopy(found[0])
    part = broken
    for key in path:
        part = part[key]
    part["noSuchField"] = 1
    with pytest.raises(jsonschema.ValidationError, match="noSuchField"):
        validate(broken, "1.33")


def test_names_when_the_release_is_not_called_areal_then_they_do_not_collide():
    objects = {(o["kind"], o["metadata"]["name"]) for o in render()}
    others = {(o["kind"], o["metadata"]["name"]) for o in render(release="second")}
    assert not objects & others
    assert ("Deployment", "second-areal-sglang") in others


def test_labels_when_the_chart_version_changes_then_selectors_do_not():
    deployment = named(render(), "Deployment", "areal-buffer")
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert not any("version" in key or "chart" in key for key in selector)
