"""Who gets which node, and which of its GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.areal_launch.gpu_machines import install

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import CannotStart, ConfigError
from areal.security import Security
from areal_launch.clusters.base import Cluster, assign, count_nodes
from areal_launch.clusters.kubernetes import allocation_values
from areal_launch.clusters.ray import bundles_of
from areal_launch.clusters.slurm import render_script
from areal_launch.processes.process import Node
from areal_launch.run_folder import RunFolder
from areal_launch.stack.plan import plan_stack

NODES = [Node(f"n{i}", f"10.0.0.{i}") for i in range(8)]


def make(*overrides: str) -> GRPOConfig:
    return build_config(GRPOConfig, None, list(overrides))


@pytest.mark.parametrize(
    ("allocation", "gpus", "ranks", "nodes"),
    [
        ("sglang:d2+fsdp:d1", 0, 0, 1),
        ("sglang:d2+fsdp:d4", 0, 2, 2),
        ("sglang:d2+fsdp:d4", 8, 0, 1),
        ("sglang:d4+fsdp:d4", 8, 0, 1),
        ("sglang:d5+fsdp:d4", 8, 0, 2),  # trainer on one, servers on the other
        ("sglang:d12+fsdp:d16", 8, 0, 4),
        ("sglang:d4t4+fsdp:d8", 8, 0, 3),
    ],
)
def test_shape_when_allocated_then_so_many_nodes(
    allocation: str, gpus: int, ranks: int, nodes: int
) -> None:
    config = make(
        f"allocation_mode={allocation}",
        f"stack.gpus_per_node={gpus}",
        f"stack.ranks_per_node={ranks}",
    )
    assert count_nodes(config).nodes == nodes


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["allocation_mode=sglang:d1+fsdp:d3", "stack.ranks_per_node=2"], "evenly"),
        (
            ["allocation_mode=sglang:d1t8+fsdp:d1", "stack.gpus_per_node=4"],
            r"a server of 8 GPUs would span nodes of stack.gpus_per_node 4, .* cannot: expected at "
            r"most 4 GPUs per server .*, or servers that you start yourself, named in "
            r"endpoints\.inference",
        ),
        (
            [
                "allocation_mode=sglang:d1+fsdp:d8",
                *("stack.gpus_per_node=4", "stack.ranks_per_node=8"),
            ],
            "puts 8 trainer ranks on a node: expected a stack.ranks_per_node of at most 4",
        ),
    ],
)
def test_shape_when_it_cannot_be_then_one_line_says_why(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        count_nodes(make(*overrides))


def test_assign_when_one_node_has_gpus_then_no_gpu_has_two_users() -> None:
    config = make("allocation_mode=sglang:d2t2+fsdp:d4", "stack.gpus_per_node=8")
    placement = assign(config, NODES[:1], "0.0.0.0")
    assert [node.gpus for node in placement.trainer] == [("0", "1", "2", "3")]
    assert [node.gpus for node in placement.inference] == [("4", "5"), ("6", "7")]


def test_assign_when_several_nodes_then_servers_have_nodes_of_their_own() -> None:
    config = make("allocation_mode=sglang:d3t4+fsdp:d16", "stack.gpus_per_node=8")
    placement = assign(config, NODES[:4], "0.0.0.0")
    assert [node.name for node in placement.trainer] == ["n0", "n1"]
    assert {node.gpus for node in placement.trainer} == {tuple("01234567")}
    placed = [(node.name, node.gpus) for node in placement.inference]
    assert placed == [("n2", tuple("0123")), ("n2", tuple("4567")), ("n3", tuple("0123"))]
    with pytest.raises(CannotStart, match=r"needs 28 GPUs .* takes 4 nodes, and there are 3"):
        assign(config, NODES[:3], "0.0.0.0")


def test_plan_when_nodes_are_lent_then_addresses_and_slots_are_theirs(tmp_path: Path) -> None:
    config = make(
        f"run_root={tmp_path}",
        "allocation_mode=sglang:d2+fsdp:d2",
        "stack.ranks_per_node=1",
    )
    placement = assign(config, NODES[:2], "0.0.0.0")
    plan = plan_stack(config, RunFolder(config.run_dir), with_trainer=True, placement=placement)
    assert all(spec.address.startswith("10.0.0.0:") for spec in [*plan.stores, *plan.services])
    assert not any(spec.nodes for spec in [*plan.stores, *plan.services])
    assert [spec.address.partition(":")[0] for spec in plan.inference] == ["10.0.0.0", "10.0.0.1"]
    trainer = plan.trainer
    assert trainer is not None
    assert [node.name for node in trainer.nodes] == ["n0", "n1"]
    assert trainer.argv[trainer.argv.index("--nnodes") + 1] == "2"
    assert trainer.argv[trainer.argv.index("--nproc-per-node") + 1] == "1"
    assert trainer.argv[trainer.argv.index("--master-addr") + 1] == "10.0.0.0"
    listening = [spec.argv[spec.argv.index("--listen") + 1] for spec in [*plan.services, trainer]]
    assert all(address.startswith("0.0.0.0:") for address in listening)
    security = Security.load(plan.config.security)
    assert security.token, "other machines reach it: there is a token"
    assert security.redis_password
    assert security.nats_token
    everything = [*plan.stores, *plan.services, *plan.inference, trainer]
    text = " ".join(part for spec in everything for part in spec.argv)
    assert security.token not in text
    assert security.redis_password not in text


def test_plan_when_this_machine_has_gpus_then_each_process_sees_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)
    config = make(
        f"run_root={tmp_path}",
        "allocation_mode=sglang:d2+fsdp:d2",
        "stack.gpus_per_node=4",
    )
    placement = assign(config, [Node()], "127.0.0.1")
    plan = plan_stack(config, RunFolder(config.run_dir), with_trainer=True, placement=placement)
    assert plan.trainer is not None
    assert plan.trainer.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in plan.inference] == ["2", "3"]
    assert not plan.trainer.nodes
    assert Security.load(plan.config.security).token, "others of this machine reach it, too"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["allocation_mode=sglang:d1+fsdp:d1", "stack.gpus_per_node=1"],
            "needs 2 GPUs for 1 trainer rank and 1 server, so with stack.gpus_per_node 1 and 1 "
            "trainer rank on a node it takes 2 nodes, and there is 1; put both on the same GPUs "
            "with allocation_mode='sglang:d1|fsdp:d1', or run it --on slurm or ray, or serve on "
            "CPUs with stack.inference_command=cpu, or name servers elsewhere in "
            "endpoints.inference, or train without servers (allocation_mode=fsdp:d1",
        ),
        (
            ["allocation_mode=sglang:d2t2+fsdp:d5", "stack.gpus_per_node=8"],
            "needs 9 GPUs for 5 trainer ranks and 2 servers of 2 GPUs",
        ),
    ],
)
def test_assign_when_one_node_has_too_few_gpus_then_the_line_says_ways_out(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(CannotStart) as refused:
        assign(make(*overrides), [Node()], "127.0.0.1")
    assert said in str(refused.value)


def test_assign_when_the_cpu_engine_is_named_then_servers_take_no_gpu() -> None:
    config = make(
        "allocation_mode=sglang:d3+fsdp:d1",
        "stack.gpus_per_node=1",
        "stack.inference_command=cpu",
    )
    placement = assign(config, [Node(gpus=("GPU-8",))], "127.0.0.1")
    assert [node.gpus for node in placement.trainer] == [("GPU-8",)]
    assert [node.gpus for node in placement.inference] == [(), (), ()]


async def test_cluster_when_the_user_has_chosen_gpus_then_those_are_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 5,-1,7")
    config = make("allocation_mode=sglang:d1+fsdp:d1", "stack.gpus_per_node=2")
    placement = await Cluster().open(config)
    assert [node.gpus for node in (*placement.trainer, *placement.inference)] == [
        ("GPU-a",),
        ("5",),
    ]


@pytest.mark.parametrize(
    ("allocation", "gpus", "trainer", "servers"),
    [
        ("sglang:d1|fsdp:d1", 1, "0", ["0"]),
        ("sglang:d4|fsdp:d4", 8, "0123", ["0", "1", "2", "3"]),
        ("sglang:d2t2|fsdp:d4@shared", 4, "0123", ["01", "23"]),
        ("sglang:d2|fsdp:d2", 0, "", ["", ""]),
    ],
)
def test_assign_when_gpus_are_shared_then_servers_are_on_those_of_the_trainer(
    allocation: str, gpus: int, trainer: str, servers: list[str]
) -> None:
    config = make(f"allocation_mode={allocation}", f"stack.gpus_per_node={gpus}")
    assert count_nodes(config).nodes == 1
    placement = assign(config, [Node()], "127.0.0.1")
    assert [node.gpus for node in placement.trainer] == [tuple(trainer)]
    assert [node.gpus for node in placement.inference] == [tuple(each) for each in servers]


@pytest.mark.parametrize("allocation", ["sglang:d1|fsdp:d1", "auto"])
def test_cluster_when_its_gpus_cannot_be_looked_at_then_names_what_to_write(
    tmp_path: Path, allocation: str
) -> None:
    config = make(f"allocation_mode={allocation}", "stack.gpus_per_node=8")
    for use in (
        lambda: bundles_of(config),
        lambda: allocation_values(config),
        lambda: render_script(config, tmp_path, tmp_path / "experiment.yaml"),
    ):
        with pytest.raises(ConfigError, match=r"^allocation_mode '.*expected "):
            use()


def test_shape_when_gpus_are_shared_over_nodes_then_refused() -> None:
    config = make("allocation_mode=sglang:d4|fsdp:d4", "stack.gpus_per_node=2")
    with pytest.raises(ConfigError, match=r"'\|' is for the GPUs of one machine"):
        count_nodes(config)
