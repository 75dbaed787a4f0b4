"""What would be started, without starting it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.unit.areal_launch.gpu_machines import write_sglang

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import CannotStart, ConfigError
from areal_launch.gpus.engine import Installed
from areal_launch.processes.free_ports import PortPicker, port_is_free
from areal_launch.run_folder import RunFolder
from areal_launch.stack.plan import missing_model, plan_stack, ports_of


def make(tmp_path: Path, *overrides: str) -> tuple[GRPOConfig, RunFolder]:
    config = build_config(GRPOConfig, None, [f"run_root={tmp_path}", *overrides])
    return config, RunFolder(config.run_dir)


def test_plan_when_nothing_is_given_then_everything_is_started(tmp_path: Path) -> None:
    config, folder = make(tmp_path, "allocation_mode=sglang:d2+fsdp:d1", "stack.rollout_workers=2")
    plan = plan_stack(config, folder, with_trainer=True)
    assert [s.name for s in plan.stores] == ["redis", "nats"]
    assert [s.name for s in plan.inference] == ["inference-0", "inference-1"]
    names = {s.name for s in plan.services}
    assert names == {"buffer", "weight-sync", "reward", "rollout-0", "rollout-1", "gateway"}
    assert plan.trainer is not None
    assert plan.trainer.argv[1:3] == ("-m", "areal_trainer")
    everything = [*plan.stores, *plan.inference, *plan.services, plan.trainer]
    addresses = [s.address for s in everything]
    assert len(set(addresses)) == len(addresses)
    endpoints = plan.config.endpoints
    assert endpoints.buffer in addresses
    workers = [s.address for s in plan.services if s.name.startswith("rollout-")]
    assert endpoints.rollout.split(",") == workers
    assert endpoints.redis == f"redis://{plan.stores[0].address}/0"
    assert endpoints.gateway.startswith("http://127.0.0.1:")
    assert config.endpoints.redis == "", "the caller's config is left as it was"


def test_plan_when_boxes_are_asked_for_then_a_sandbox_service_lends_them(
    tmp_path: Path,
) -> None:
    config, folder = make(tmp_path, "sandbox.boxes=3")
    plan = plan_stack(config, folder, with_trainer=False)
    (spec,) = [spec for spec in plan.services if spec.name == "sandbox"]
    assert plan.config.endpoints.sandbox == spec.address
    assert plan.config.endpoints.sandbox_http.startswith("http://127.0.0.1:")
    assert "sandbox" in plan.stop_order()[3]


def test_plan_when_stopping_then_callers_go_before_the_called(tmp_path: Path) -> None:
    config, folder = make(tmp_path)
    order = plan_stack(config, folder, with_trainer=True).stop_order()
    flat = [name for stage in order for name in stage]
    expected = ["trainer", "rollout-0", "inference-0", "weight-sync", "redis"]
    assert [name for name in flat if name in expected] == expected
    assert set(order[-1]) == {"redis", "nats"}


def test_plan_when_endpoints_are_given_then_those_are_not_started(tmp_path: Path) -> None:
    config, folder = make(
        tmp_path,
        "endpoints.redis=redis://elsewhere:6379/0",
        "endpoints.inference=[http://gpu:30000]",
        "endpoints.gateway=http://elsewhere:8080",
    )
    plan = plan_stack(config, folder, with_trainer=False)
    assert [s.name for s in plan.stores] == ["nats"]
    assert not plan.inference
    assert "gateway" not in {s.name for s in plan.services}
    assert plan.trainer is None


def test_plan_when_a_command_for_inference_is_given_then_it_gets_the_flags(tmp_path: Path) -> None:
    config, folder = make(tmp_path)
    config.stack.inference_command = "'/opt/sg lang/python' -m sglang.launch_server --tp 2"
    first, second = plan_stack(config, folder, with_trainer=False).inference
    own = ("/opt/sg lang/python", "-m", "sglang.launch_server", "--tp", "2")
    assert first.argv[: len(own)] == own
    flags = dict(zip(first.argv[len(own) :: 2], first.argv[len(own) + 1 :: 2], strict=True))
    assert flags["--port"] == first.address.rpartition(":")[2]
    assert flags["--context-length"] == str(config.model.context_length)
    assert first.argv != second.argv, "another port, another seed"
    config.stack.inference_command = "python 'unclosed"
    with pytest.raises(ConfigError, match=r"stack\.inference_command .*unclosed"):
        plan_stack(config, folder, with_trainer=False)


def test_plan_when_made_again_then_servers_differ_in_seed_and_keep_theirs(tmp_path: Path) -> None:
    config, folder = make(tmp_path, "allocation_mode=sglang:d3+fsdp:d1", "seed=7")

    def seeds() -> list[str]:
        specs = plan_stack(config, folder, with_trainer=False).inference
        return [spec.argv[spec.argv.index("--random-seed") + 1] for spec in specs]

    first = seeds()
    assert len(set(first)) == 3
    assert seeds() == first
    config.seed = 8
    assert not set(seeds()) & set(first)


def test_plan_when_there_are_gpus_then_servers_are_the_sglang_beside_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    config, folder = make(tmp_path, "stack.gpus_per_node=4", "model.dtype=bfloat16")

    def command() -> tuple[str, ...]:
        return plan_stack(config, folder, with_trainer=True).inference[0].argv[:3]

    with pytest.raises(CannotStart, match=r"SGLang is not installed .* `make sglang-gpu`, or set"):
        command()
    python = write_sglang(tmp_path, Installed.HALF)
    with pytest.raises(CannotStart, match=r"only half installed .* run `make sglang-gpu` again"):
        command()
    shutil.rmtree(tmp_path / ".venv-sglang-gpu")
    write_sglang(tmp_path, Installed.WHOLE)
    assert command() == (str(python), "-m", "sglang.launch_server")
    config.stack.inference_command = "serve --now"
    assert command()[:2] == ("serve", "--now")
    config.stack.inference_command = "cpu"
    assert command()[2] == "areal_inference", "it is named"
    config.stack.inference_command, config.stack.gpus_per_node = "", 0
    assert command()[2] == "areal_inference", "it computes on CPUs"


@pytest.mark.parametrize(
    ("gpus", "stored", "expected"),
    [(0, "float32", "float32"), (0, "bfloat16", "bfloat16"), (4, "float32", "bfloat16")],
)
def test_plan_when_the_dtype_is_left_open_then_the_checkpoints_and_16_bits_on_gpus(
    tmp_path: Path, gpus: int, stored: str, expected: str
) -> None:
    (tmp_path / "config.json").write_text(f'{{"dtype": "{stored}"}}')
    config, folder = make(tmp_path, f"model.path={tmp_path}", f"stack.gpus_per_node={gpus}")
    config.stack.inference_command = "cpu"

    def dtype() -> str:
        [spec, *_] = plan_stack(config, folder, with_trainer=False).inference
        return spec.argv[spec.argv.index("--dtype") + 1]

    assert dtype() == "auto", "the CPU engine decides when it loads the model"
    config.stack.inference_command = "python -m sglang.launch_server"
    assert dtype() == expected
    config.model.dtype = "float32"
    assert dtype() == "float32"


def test_plan_when_a_token_meets_another_command_then_it_is_in_a_file_only(tmp_path: Path) -> None:
    secret = "0123456789abcdef+/="
    (tmp_path / "token").write_text(secret)
    config, folder = make(tmp_path, f"security.dir={tmp_path}")
    config.stack.inference_command = "python -m sglang.launch_server"
    [spec, *_] = plan_stack(config, folder, with_trainer=False).inference
    assert not [part for part in spec.argv if secret in part]
    assert secret not in str(spec.environment)
    file = Path(spec.argv[spec.argv.index("--config") + 1])
    assert file.stat().st_mode & 0o077 == 0
    assert yaml.safe_load(file.read_text()) == {"api-key": secret, "log-level": "warning"}


@pytest.mark.parametrize("option", ["--config {}", "--config={}"])
def test_plan_when_the_command_has_a_file_of_its_own_then_what_it_says_is_kept(
    tmp_path: Path, option: str
) -> None:
    (tmp_path / "own.yaml").write_text("tp-size: 2\napi_key: another\nlog-level: info\n")
    config, folder = make(tmp_path)
    own = option.format(tmp_path / "own.yaml")
    config.stack.inference_command = f"python -m sglang.launch_server {own} --trust-remote-code"
    [spec, *_] = plan_stack(config, folder, with_trainer=False).inference
    assert spec.argv[:4] == ("python", "-m", "sglang.launch_server", "--trust-remote-code")
    assert spec.argv.count("--config") == 1
    content = yaml.safe_load(Path(spec.argv[spec.argv.index("--config") + 1]).read_text())
    token = (folder.secrets / "token").read_text().strip()
    assert content == {"tp-size": 2, "api-key": token, "log-level": "warning"}


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("- 1", "expected a mapping"), ("a: [", "while")]
)
def test_plan_when_the_commands_own_file_cannot_be_read_then_it_is_named(
    tmp_path: Path, text: str | None, why: str
) -> None:
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    config, folder = make(tmp_path)
    config.stack.inference_command = f"serve --config {tmp_path / 'own.yaml'}"
    with pytest.raises(ConfigError, match=rf"stack\.inference_command: --config .*{why}"):
        plan_stack(config, folder, with_trainer=False)


def test_plan_when_servers_are_added_then_the_lowest_free_name_is_taken(tmp_path: Path) -> None:
    config, folder = make(tmp_path, "allocation_mode=sglang:d3+fsdp:d1")
    plan = plan_stack(config, folder, with_trainer=False)
    del plan.inference[1]
    added = [plan.add_inference(), plan.add_inference()]
    assert [spec.name for spec in added] == ["inference-1", "inference-3"]
    assert len({spec.address for spec in plan.inference}) == 4
    assert [s.name for s in plan.inference] == plan.stop_order()[2]


def test_plan_when_several_ranks_then_torchrun(tmp_path: Path) -> None:
    config, folder = make(tmp_path, "allocation_mode=sglang:d1+fsdp:d2")
    trainer = plan_stack(config, folder, with_trainer=True).trainer
    assert trainer is not None
    assert "torch.distributed.run" in trainer.argv
    assert trainer.argv[trainer.argv.index("--nproc-per-node") + 1] == "2"


def test_plan_when_run_again_then_same_ports_unless_taken(tmp_path: Path) -> None:
    config, folder = make(tmp_path)
    first = plan_stack(config, folder, with_trainer=False)
    stack = {
        "processes": {
            s.name: {"address": s.address, "metrics": s.metrics}
            for s in [*first.stores, *first.services, *first.inference]
        }
    }
    taken = int(first.stores[0].address.rpartition(":")[2])
    assert first.ports is not None
    first.ports.close()  # as when its launcher has ended
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        second = plan_stack(config, folder, with_trainer=False, preferred_ports=ports_of(stack))
    assert second.stores[0].address != first.stores[0].address
    assert [s.address for s in second.services] == [s.address for s in first.services]
    assert [s.address for s in second.inference] == [s.address for s in first.inference]


def test_ports_when_promised_to_one_then_no_other_picker_has_them() -> None:
    first = PortPicker()
    port = first.pick("redis")
    assert PortPicker({"redis": port}).pick("redis") != port
    module = "areal_launch.processes.free_ports"
    code = f"from {module} import PortPicker as P; print(P({{'a': {port}}}).pick('a'))"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(elsewhere.stdout) != port
    assert first.pick("redis") != port, "each once"
    first.close()
    assert PortPicker({"redis": port}).pick("redis") == port


def test_pick_when_asked_often_then_distinct_free_ports() -> None:
    picker = PortPicker()
    ports = [picker.pick(f"p{i}") for i in range(50)]
    assert len(set(ports)) == 50
    assert all(port_is_free(port) for port in ports)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "no config.json there"),
        (["config.json"], r"no \*.safetensors there"),
        (["config.json", "model.safetensors"], "^$"),
    ],
)
def test_missing_model_when_files_lack_then_says_which(
    tmp_path: Path, files: list[str], expected: str
) -> None:
    for file in files:
        (tmp_path / file).touch()
    config, _ = make(tmp_path, f"model.path={tmp_path}")
    import re

    assert re.search(expected, missing_model(config))
