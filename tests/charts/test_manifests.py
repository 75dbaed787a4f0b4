"""manifests/rendered is what the chart renders today."""

import json

import pytest
from tests.charts.rendering import ROOT
from tools import gen_chart_schema
from tools.gen_manifests import RENDERED, render


@pytest.mark.parametrize("name", RENDERED)
def test_manifests_when_rendered_again_then_they_are_the_same(name):
    checked_in = (ROOT / "manifests" / "rendered" / f"{name}.yaml").read_text()
    assert checked_in == render(RENDERED[name]), "run `make manifests` and commit the result"


def test_schema_when_written_again_then_it_is_the_same():
    assert json.loads(gen_chart_schema.SCHEMA.read_text()) == gen_chart_schema.schema()
    assert json.loads(gen_chart_schema.KEYS.read_text()) == gen_chart_schema.keys(), (
        "make manifests"
    )
