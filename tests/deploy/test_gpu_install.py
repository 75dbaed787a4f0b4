"""The documented way to GPUs is one that exists: builds of torch, drivers, disk, SGLang's pins."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.lock import names
from tools.sglang_facts import FACTS, facts

from areal.config.experiment import GRPOConfig
from areal_launch.doctor import local

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
PAGE = (ROOT / "docs/gpu.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SGLANG = json.loads(FACTS.read_text())
BUILDS = json.loads((FOLDER / "torch-builds.json").read_text())
LOCK = (FOLDER / "torch-cuda.txt").read_text()
# Which torch release each of these files installs.
INSTALLING = [
    *ROOT.glob("docs/**/*.md"),
    *(ROOT / name for name in ("Dockerfile", "Makefile", "README.md", "CONTRIBUTING.md")),
    *(ROOT / name for name in ("docker-compose.yaml", "tools/install_torch.py")),
]


def locked(lock: str) -> str:
    """The release of torch in a lock, such as 2.14."""
    found = re.search(r"^torch==(\d+\.\d+)", lock, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("file", INSTALLING, ids=lambda file: file.name)
def test_file_when_it_names_a_build_of_torch_then_the_locked_release_has_it(file: Path) -> None:
    there = set(BUILDS["torch"][locked(LOCK)]["builds"])
    named = set(re.findall(r"\bcu1[0-9]{2}\b", file.read_text()))
    assert named <= there, f"torch {locked(LOCK)} is built for {sorted(there)} only"
    assert not re.findall(r"CUDA 12\.[0-57-9]", file.read_text())


def test_torch_when_locked_for_gpus_then_it_is_the_release_that_sglang_pins() -> None:
    assert f"torch=={SGLANG['torch']} \\\n" in LOCK
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["cuda"][1:] == [f"torch=={SGLANG['torch']}"]
    assert extras["cuda"][0].startswith("liger-kernel==")
    assert f"torch {SGLANG['torch']}" in PAGE
    assert f"transformers {SGLANG['transformers']}" in PAGE


def test_torch_when_locked_for_gpus_then_its_libraries_are_those_of_the_build_on_pypi() -> None:
    pypi = BUILDS["torch"][locked(LOCK)]["pypi"]
    major, minor = pypi[2:4], pypi[4]
    assert re.search(rf"^cuda-toolkit=={major}\.{minor}\.", LOCK, re.MULTILINE)
    assert f"nvidia-nccl-cu{major}==" in LOCK
    assert [int(major)] == SGLANG["cuda"]
    assert f"build for CUDA {major}.{minor}" in PAGE
    assert f"CUDA toolkit {major}" in PAGE


def test_page_when_it_names_a_driver_then_it_runs_the_locked_build() -> None:
    pypi = BUILDS["torch"][locked(LOCK)]["pypi"]
    assert f"driver of branch {BUILDS['drivers'][pypi]} or newer" in PAGE
    [older, below] = map(int, re.findall(r"branch (\d+) to (\d+)", PAGE)[0])
    assert (older, below) == (BUILDS["drivers"]["cu126"], BUILDS["drivers"][pypi] - 1)


def test_page_when_it_lists_what_a_machine_needs_then_as_sglang_asks_for() -> None:
    assert f"SGLang {SGLANG['sglang']}" in PAGE
    assert f"glibc {SGLANG['glibc']}" in PAGE
    assert f"Python {SGLANG['python'].removeprefix('>=')} or newer" in PAGE
    assert SGLANG["compiles"], "nothing is compiled: the page need not ask for nvcc"
    assert all(program in PAGE for program in ("`nvcc`", "`g++`"))


def test_page_when_it_says_how_much_disk_then_doctor_and_environments_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3_087_467_144)  # Qwen2.5-1.5B-Instruct, without its bytes
    config = GRPOConfig(experiment_name="e", trial_name="t")
    config.model.path, config.run_root = str(tmp_path), str(tmp_path)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    said = re.search(r"make room for about ([\d.]+) GiB", str(local._disk(config, None)))
    assert said is not None
    run_folder = float(said[1]) * 2**30 / 1e9
    [whole] = re.findall(r"\| (\d+) GB of disk \|", PAGE)
    parts = re.findall(
        r"environments about (\d+) GB, pip's cache (\d+) GB, the model (\d+) GB", PAGE
    )
    assert int(whole) >= run_folder + sum(map(int, parts[0]))


def test_facts_when_read_from_a_wheel_then_they_are_what_its_metadata_says(tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-9.9-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "sglang-9.9.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\nRequires-Python: >=3.11\n"
            "Requires-Dist: torch==9.1\nRequires-Dist: transformers==5.0\n"
            "Requires-Dist: tokenizers==0.1\nRequires-Dist: flashinfer_python[cu13]==0.7\n"
            'Requires-Dist: ninja\nRequires-Dist: torch==1.0; extra == "old"\n',
        )
    assert facts(wheel) == {
        "sglang": "9.9",
        "python": ">=3.11",
        "glibc": "2.34",
        "torch": "9.1",
        "transformers": "5.0",
        "tokenizers": "0.1",
        "cuda": [13],
        "compiles": ["flashinfer-python", "ninja"],
    }


def test_sglang_when_named_then_everywhere_the_version_of_the_facts() -> None:
    version = SGLANG["sglang"]
    assert f"sglang=={version}" in (ROOT / "Makefile").read_text()
    assert f"ARG SGLANG_IMAGE=lmsysorg/sglang:v{version}\n" in DOCKERFILE
    assert f"lmsysorg/sglang:v{version}" in (ROOT / "docker-compose.yaml").read_text()


def test_setup_when_torch_is_chosen_then_make_installs_its_lock(tmp_path: Path) -> None:
    def commands(*options: str) -> str:
        folder = tmp_path / "venv"
        make = ["make", "--dry-run", "setup", f"VENV={folder}", *options]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "install_torch.py requirements/torch-cpu.txt" in commands()
    assert "install_torch.py requirements/torch-cuda.txt" in commands("TORCH=cuda")
    # What is installed stays with every later target.
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/.torch").write_text("cuda\n")
    assert "install_torch.py requirements/torch-cuda.txt" in commands()


def test_sglang_gpu_when_made_then_its_stamp_comes_only_after_the_installation() -> None:
    """Where a line fails make stops: half an environment has no stamp."""
    # It says which directory it enters where make started these tests.
    make = ["make", "--dry-run", "--always-make", "--no-print-directory", "sglang-gpu"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    *before, last = done.stdout.splitlines()
    assert last == "touch .venv-sglang-gpu/.set-up"
    assert (
        f"-m pip install --quiet --disable-pip-version-check sglang=={SGLANG['sglang']}"
        in (before[-1])
    )
    assert not [line for line in before if ".set-up" in line or "|" in line or ";" in line]


def stage(name: str) -> str:
    """The lines of a stage of the Dockerfile, continued lines joined."""
    [text] = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    return str(text).replace("\\\n", " ")


def test_gpu_image_when_read_then_it_has_all_of_command_and_trainer_but_torch() -> None:
    lines = stage("gpu")
    copied = set(re.findall(r"requirements/([\w-]+\.txt)", lines))
    installed = set(re.findall(r"-r ([\w-]+\.txt)", lines))
    assert installed == copied
    there = set().union(*(names(FOLDER / lock) for lock in installed))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["launch"], *extras["trainer"]]
    absent = {canonicalize_name(Requirement(each).name) for each in needed} - there
    assert absent == {"torch"}, "torch is SGLang's"
    assert "--system-site-packages" in lines
    assert not [name for name in there if name.startswith(("nvidia-", "cuda-"))]


def test_gpu_image_when_run_then_it_finds_sglang_where_the_launcher_looks() -> None:
    lines = stage("gpu")
    [environment] = re.findall(r"python3 -m venv --system-site-packages (\S+)", lines)
    sglang = Path(environment).parent / ".venv-sglang-gpu"
    assert f">{sglang}/bin/python" in lines
    assert f"touch {sglang}/.set-up" in lines
    assert f"{sglang}/bin/python -c 'import sglang'" in lines
    assert f"ENV PATH={environment}/bin:$PATH" in lines
    assert DOCKERFILE.index("ARG SGLANG_IMAGE") < DOCKERFILE.index("FROM ")


def test_trainer_image_when_built_for_gpus_then_its_argument_chooses_the_lock() -> None:
    lines = stage("torch-packages")
    assert "ARG TORCH=cpu\n" in lines
    assert "install_torch.py torch-$TORCH.txt" in lines
    for choice in ("cpu", "cuda"):
        assert f"requirements/torch-{choice}.txt" in lines
        assert (FOLDER / f"torch-{choice}.txt").is_file()
    assert "args: {<<: *args, TORCH: cuda}" in (ROOT / "docker-compose.yaml").read_text()
