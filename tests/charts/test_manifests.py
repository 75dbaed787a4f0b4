"""manifests/rendered is what the chart renders today."""

import pytest
from tests.charts.rendering import ROOT
from tools.gen_manifests import RENDERED, render


@pytest.mark.parametrize("name", RENDERED)
def test_manifests_when_rendered_again_then_they_are_the_same(name):
    checked_in = (ROOT / "manifests" / "rendered" / f"{name}.yaml").read_text()
    assert checked_in == render(RENDERED[name]), "run `make manifests` and commit the result"
