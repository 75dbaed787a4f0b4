"""What `helm install` says at its end."""

from tests.charts.fake_cluster import cluster
from tests.charts.rendering import CHART, IMAGES, NAMESPACE, helm

JOB = (*IMAGES, "--set", "trainer.workload=Job")


def notes(*arguments):
    """As an installation in an empty cluster shows them."""
    with cluster() as address:
        server = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address)
        place = ("--namespace", NAMESPACE, *server)
        done = helm("install", "areal", str(CHART), *place, *JOB, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_notes_when_installed_then_they_say_how_to_see_what_keeps_pods_from_starting():
    said = notes()
    (command,) = [line for line in said.splitlines() if "custom-columns" in line]
    assert f"kubectl -n {NAMESPACE} get pods -l app.kubernetes.io/instance=areal" in command
    for part in ("initContainerStatuses", "containerStatuses", "spec.containers[*].image"):
        assert part in command
    assert "image that cannot be pulled" in said
    assert "--wait" in said


def test_notes_when_a_recipe_only_mentions_prepare_model_then_they_say_how_to_copy(tmp_path):
    recipe = tmp_path / "recipe.py"
    copying = "The recipe has no prepare_model"
    for text, shown in (
        ('"""No prepare_model here: copy one."""\n', True),
        ("def prepare_model(config, path):\n    pass\n", False),
        ("from warm import prepare_model\n", False),
    ):
        recipe.write_text(text)
        assert (copying in notes("--set-file", f"recipe={recipe}")) is shown, text


def test_notes_when_a_value_is_read_by_nothing_then_it_is_named():
    assert "not read by the chart: global.redis." in notes("--set", "global.redis.host=x")
    assert "not read" not in notes("--set", "global.imageRegistry=mirror.corp")
