"""The alerts, evaluated by Prometheus itself on series made up for each case."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.charts.rendering import NAMESPACE, of_kind, render

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool (Debian: apt-get install prometheus)"
)
WATCHED = ("--set", "metrics.prometheusRule=true")


def rules(release="areal"):
    """The groups of one release."""
    (rule,) = of_kind(render(*WATCHED, release=release), "PrometheusRule")
    return rule["spec"]["groups"]


def series(name, values, *, component, release="areal", **labels):
    """One input series, labelled as the operator's Prometheus does."""
    full = release if "areal" in release else f"{release}-areal"
    found = {"namespace": NAMESPACE, "service": f"{full}-{component}", **labels}
    text = ",".join(f'{key}="{value}"' for key, value in found.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def everything_up(release="areal"):
    components = ("gateway", "rollout", "reward", "buffer", "weight-sync")
    return [series("up", "1+0x600", component=c, release=release) for c in components]


def firing(folder: Path, given, at, release="areal"):
    """The alerts that fire at a time, as `promtool test rules` finds them."""
    groups = rules(release)
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    # Each is expected to be silent: promtool prints those that are not.
    names = {rule["alert"] for group in groups for rule in group["rules"]}
    silent = [{"eval_time": at, "alertname": name, "exp_alerts": []} for name in sorted(names)]
    case = {"interval": "1m", "input_series": given, "alert_rule_test": silent}
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(tests))
    command = [str(PROMTOOL), "test", "rules", "tests.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
    said = done.stdout + done.stderr
    found = set(re.findall(r"alertname: *(\w+), *time:", said))
    assert bool(found) == (done.returncode != 0), said
    return found


def servers(values, state="serving", release="areal"):
    return series(
        "areal_weight_sync_servers", values, component="weight-sync", release=release, state=state
    )


def trainer(unfinished, step_seconds=None):
    found = [series("areal_trainer_unfinished_seconds", unfinished, component="trainer")]
    if step_seconds is not None:
        name = "areal_trainer_step_seconds"
        found.append(series(name, f"{step_seconds}+0x600", component="trainer"))
    return found


def redis(values, release="areal"):
    name = "areal_buffer_redis_answered_timestamp_seconds"
    return series(name, values, component="buffer", release=release)


HEALTHY = [*everything_up(), servers("4+0x600"), redis("0+60x600")]
WITHOUT_WEIGHT_SYNC = [
    *(each for each in everything_up() if "weight-sync" not in each["series"]),
    redis("0+60x600"),
]
OTHERS = [*everything_up("other-areal"), servers("4+0x600", release="other-areal")]
CASES = {
    "all is well": ([*HEALTHY, *trainer("0+0x600", 10)], "60m", set()),
    "no server serves": (
        [*everything_up(), servers("0+0x600"), redis("0+60x600")],
        "10m",
        {"ArealNoServer"},
    ),
    "weight-sync is dead, its series are gone": (
        WITHOUT_WEIGHT_SYNC,
        "10m",
        {"ArealNoServer", "ArealServiceAway"},
    ),
    "a neighbor's servers do not count": (
        [*everything_up(), servers("0+0x600"), redis("0+60x600"), *OTHERS],
        "10m",
        {"ArealNoServer"},
    ),
    "a neighbor's lack of servers does not count": (
        [*HEALTHY, servers("0+0x600", release="other-areal")],
        "10m",
        set(),
    ),
    "steps of 30 minutes, one just before its end": (
        [*HEALTHY, *trainer("0+60x28 0+60x600", 1800)],
        "28m",
        set(),
    ),
    "no step for 100 minutes where one takes 30": (
        [*HEALTHY, *trainer("0+60x600", 1800)],
        "100m",
        {"ArealTrainerStalled"},
    ),
    "no step for 25 minutes where one takes ten seconds": (
        [*HEALTHY, *trainer("0+60x600", 10)],
        "25m",
        {"ArealTrainerStalled"},
    ),
    "a first step of 40 minutes": ([*HEALTHY, *trainer("0+60x600")], "40m", set()),
    "a first step of 70 minutes": (
        [*HEALTHY, *trainer("0+60x600")],
        "70m",
        {"ArealTrainerStalled"},
    ),
    "Redis has been away for five minutes": (
        [*everything_up(), servers("4+0x600"), redis("0+60x5 300+0x600")],
        "10m",
        {"ArealRedisAway"},
    ),
    "a server is quarantined": (
        [*HEALTHY, servers("1+0x600", state="quarantined")],
        "15m",
        {"ArealServerQuarantined"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_alerts_when_evaluated_then_what_is_wrong_fires_and_nothing_else(case, tmp_path):
    given, at, expected = CASES[case]
    assert firing(tmp_path, given, at) == expected


def test_alerts_when_two_releases_share_a_namespace_then_each_speaks_of_itself(tmp_path):
    other = [servers("0+0x600", release="other-areal"), redis("0+60x600", "other-areal")]
    given = [*HEALTHY, *everything_up("other-areal"), *other]
    assert firing(tmp_path, given, "10m") == set()
    assert firing(tmp_path, given, "10m", "other-areal") == {"ArealNoServer"}
