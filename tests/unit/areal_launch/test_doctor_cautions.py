"""`areal doctor` says what is allowed and may not be meant."""

from pathlib import Path

from areal.config.experiment import GRPOConfig, build_config
from areal_launch.doctor.local import examine_here
from areal_launch.view.output import CheckResult


def test_doctor_when_sampling_is_truncated_then_a_note_says_what_it_does(tmp_path: Path) -> None:
    for overrides, verdict, words in (
        ([], CheckResult.OK, "valid"),
        (
            ["gconfig.top_k=20"],
            CheckResult.NOTE,
            "gconfig.top_k 20: answers are sampled",
        ),
    ):
        config = build_config(
            GRPOConfig, None, ["gconfig.n_samples=2", f"run_root={tmp_path}", *overrides]
        )
        found = {each.name: each for each in examine_here(config, can_prepare=False)}
        assert found["config"].verdict is verdict
        assert words in found["config"].found


def test_doctor_when_a_store_is_given_then_its_password_is_not_shown(tmp_path: Path) -> None:
    given = [
        "endpoints.redis=redis://:hunter2@store:6379/0",
        "endpoints.nats=nats://hunter2@n:4222",
    ]
    config = build_config(GRPOConfig, None, [f"run_root={tmp_path}", *given])
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    for name in ("redis", "nats"):
        assert found[name].verdict is CheckResult.OK
        assert found[name].found == f"endpoints.{name} is set"
