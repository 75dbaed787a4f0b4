"""Weights on their way out of two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.areal_torch.engines.hub_families import make_family

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    model, out = make_family("qwen3_moe", folder / "model", vocab_size=261), folder / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "tests/integration/export_worker.py")]
    command += [json.dumps({"model": str(model), "out": str(out)})]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'services'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def test_gathering_when_a_rank_does_not_publish_then_it_holds_no_whole_tensor(report):
    (publishing, _), (sending, buffer) = report["largest_by_rank"]
    assert publishing >= report["largest_tensor"]
    assert 0 < sending < report["largest_tensor"]
    assert 0 < buffer <= 20_480 + 1_024  # its half of a bucket, and room between pieces


def test_gathering_when_served_in_bfloat16_then_half_the_bytes_are_sent(report):
    wide, narrow = report["bytes_sent"]
    assert wide > 0
    assert 0.5 <= narrow / wide < 0.51  # pieces begin at multiples of 16 bytes


def test_gathering_when_tensors_are_laid_out_in_any_way_then_they_come_out_whole(report):
    assert [rank["layouts"] for rank in report["ranks"]] == [True, True]


def test_export_when_a_step_follows_then_the_weights_of_before_are_delivered(report):
    assert report["changed"] > 0
    assert set(report["delivered"]) == set(report["names"])
    assert all(report["delivered"].values())
    assert report["digests"]


def test_export_when_it_is_broadcast_then_gathered_again_before_the_weights_change(report):
    assert report["again"] == {"in order": True, "same": True, "changed since": True}


def test_export_when_it_gathers_in_order_then_all_ranks_launch_the_same_before_the_step(report):
    first, second = (rank["launched"] for rank in report["ordered"])
    assert first == second
    exchanges = first.count("exchange")
    assert exchanges > 1
    assert first[:exchanges] == ["exchange"] * exchanges
    assert any(each.startswith("all_gather") for each in first[exchanges:])
    # Without a second gathering, which would be out of order.
    assert report["ordered"][0]["delivered"] == [[len(report["names"]), True]]


def test_export_when_the_delivery_takes_long_then_neither_the_step_nor_a_rank_waits(report):
    publishing, sending = report["ranks"]
    assert not publishing["done_before_delivery"]
    assert sending["done_before_delivery"]
