"""Where versions may lie: a folder or a bucket, and never with credentials."""

from __future__ import annotations

import pytest

from areal.config.experiment import GRPOConfig, validate
from areal.errors import ConfigError


def config(path: str, encoding: str = "full") -> GRPOConfig:
    config = GRPOConfig(experiment_name="e", trial_name="t")
    config.weight_sync.path, config.weight_sync.encoding = path, encoding
    return config


@pytest.mark.parametrize(
    "path", ["", "weights", "/mnt/weights", "s3://bucket", "gs://b.c-d/a/b_1/", "az://box/run=1"]
)
def test_path_when_a_folder_or_a_bucket_then_accepted(path: str) -> None:
    validate(config(path))


@pytest.mark.parametrize(
    "path",
    [
        "http://host/bucket",
        "s3://",
        "s3:///prefix",
        "s3://AKIA:secret@bucket/prefix",
        "s3://bucket/prefix?X-Amz-Signature=secret",
        "s3://bucket//prefix",
        "file:///tmp",
    ],
)
def test_path_when_another_url_then_refused_without_repeating_it(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync\.path .*bucket/prefix") as refused:
        validate(config(path))
    assert "secret" not in str(refused.value)


def test_delta_when_versions_go_to_a_bucket_then_refused() -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync\.encoding 'delta': expected full"):
        validate(config("s3://bucket/prefix", "delta"))
