"""`areal doctor` says what is allowed and may not be meant."""

from pathlib import Path

from areal.config.experiment import GRPOConfig, build_config
from areal_launch.doctor.local import Verdict, examine_here


def test_doctor_when_sampling_is_truncated_then_a_note_says_what_it_does(tmp_path: Path) -> None:
    for overrides, verdict, words in (
        ([], Verdict.OK, "valid"),
        (["gconfig.top_k=20"], Verdict.NOTE, "gconfig.top_k 20: answers are drawn from a trunc"),
    ):
        config = build_config(GRPOConfig, None, [f"run_root={tmp_path}", *overrides])
        found = {each.name: each for each in examine_here(config, can_prepare=False)}
        assert found["config"].verdict is verdict
        assert words in found["config"].found
