"""What processes of a stack inherit from the shell or pod in which it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.security import SECRET_VARIABLES
from areal_launch.processes.inherited import around_proxies, without_other_launchers
from areal_launch.processes.process import child_environment, python_environment

OF_OTHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("NODE_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT", "PET_NPROC_PER_NODE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_ID"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_STEPID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    *("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "MV2_COMM_WORLD_RANK"),
)
KEPT = (
    *("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "RANKING", "MY_RANK", "SLURM_JOB_ID", "MASTER"),
    *("SLURM_JOB_NODELIST", "SLURM_CONF", "NCCL_SOCKET_IFNAME", "HF_HOME", "PETS", "PMI"),
)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_child_when_launched_in_another_launchers_job_then_it_knows_no_place_in_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "3")
    assert name not in child_environment("stack", "trainer", {})
    assert name not in python_environment()
    # What the launcher itself says, e.g. to a node of several, arrives.
    assert child_environment("stack", "trainer", {name: "1"})[name] == "1"


@pytest.mark.parametrize("name", KEPT)
def test_child_when_a_variable_is_of_no_launcher_then_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "3")
    assert child_environment("stack", "trainer", {})[name] == "3"


@pytest.mark.parametrize("name", SECRET_VARIABLES)
def test_child_when_a_secret_is_in_our_environment_then_it_has_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0123456789abcdef")
    assert name not in child_environment("stack", "trainer", {})


@given(st.dictionaries(st.text(), st.text()))
def test_variables_when_filtered_then_nothing_is_added_or_changed(known: dict[str, str]) -> None:
    assert without_other_launchers(known).items() <= known.items()


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy"])
@pytest.mark.parametrize("before", [{}, {"no_proxy": "a.b, c.d"}, {"NO_PROXY": "a.b,c.d"}])
def test_child_when_there_is_a_proxy_then_it_does_not_take_requests_to_this_machine(
    name: str, before: dict[str, str]
) -> None:
    own = around_proxies({name: "http://127.0.0.1:9", **before})
    exempt = own["no_proxy"].split(",")
    assert exempt == ([*(["a.b", "c.d"] if before else []), "127.0.0.1", "localhost", "::1"])
    assert own["NO_PROXY"] == own["no_proxy"]
    assert own[name] == "http://127.0.0.1:9"  # downloads use it


def test_child_when_there_is_no_proxy_then_its_variables_are_as_before() -> None:
    assert around_proxies({"PATH": "/bin", "no_proxy": "a"}) == {"PATH": "/bin", "no_proxy": "a"}


def test_python_child_when_the_locale_is_another_then_its_text_is_utf8(tmp_path: Path) -> None:
    environment = child_environment("stack", "trainer", {"LC_ALL": "POSIX"})
    code = "import sys; open(sys.argv[1], 'w').write('\\u2028\\U0001f600'); print('\\u6570')"
    file = tmp_path / "written"
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env={**environment, "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert file.read_bytes().decode() == "\u2028\U0001f600"
    assert done.stdout.decode() == "\u6570\n"
