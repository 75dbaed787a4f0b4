"""Installs are reproducible: what is locked, how, and who installs from the locks."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.lock import BELOW, CUDA, wanted

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
TORCH = FOLDER / "torch-cpu.txt"
FILES = sorted(FOLDER.glob("*.txt"))
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def entries(lock: Path) -> list[str]:
    """One logical line for each entry."""
    text = lock.read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pins(lock: Path) -> dict[str, set[str]]:
    """Package to its versions: more than one where platforms differ."""
    found: dict[str, set[str]] = {}
    for entry in entries(lock):
        requirement = Requirement(entry.partition("--hash")[0])
        [version] = requirement.specifier
        found.setdefault(canonicalize_name(requirement.name), set()).add(version.version)
    return found


def test_locks_when_listed_then_they_are_those_that_are_written() -> None:
    assert {lock.name for lock in FILES} == {*BELOW, TORCH.name}


@pytest.mark.parametrize("lock", FILES, ids=lambda lock: lock.stem)
def test_lock_when_read_then_every_line_is_a_version_with_its_hashes(lock: Path) -> None:
    assert entries(lock)
    for entry in entries(lock):
        requirement, *hashes = entry.split(" --hash")
        parsed = Requirement(requirement)  # no options, no index, no editable
        assert parsed.url is None, entry
        assert [s.operator for s in parsed.specifier] == ["=="], requirement
        assert "*" not in str(parsed.specifier)
        assert hashes, f"{requirement}: no hash"
        assert all(HASH.fullmatch(f"--hash{each.rstrip()}") for each in hashes), requirement
    assert "://" not in lock.read_text()


@pytest.mark.parametrize("file", sorted(BELOW))
def test_lock_when_a_dependency_is_declared_then_it_has_that_version(
    pyproject: dict[str, Any], file: str
) -> None:
    locked = pins(FOLDER / file)
    for below in BELOW[file]:
        locked |= pins(FOLDER / below)
    for text in wanted(pyproject)[file]:
        requirement = Requirement(text)
        versions = locked.get(canonicalize_name(requirement.name))
        assert versions, f"{text} is not in requirements/{file}: make lock"
        assert all(v in requirement.specifier for v in versions), f"{text}, but {versions}"


def test_lock_when_extras_are_declared_then_each_requirement_of_them_is_locked(
    pyproject: dict[str, Any],
) -> None:
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    declared = {*project["dependencies"], *(r for e in extras.values() for r in e)}
    locked: dict[str, set[str]] = {}
    for file in BELOW:
        locked |= pins(FOLDER / file)
    for requirement in map(Requirement, sorted(declared)):
        if requirement.name != "torch":
            versions = locked[canonicalize_name(requirement.name)]
            assert all(version in requirement.specifier for version in versions), requirement


@pytest.mark.parametrize("file", sorted(BELOW))
def test_lock_when_a_package_requires_another_then_that_is_locked_too(file: str) -> None:
    # --no-deps installs what is locked and nothing else: a gap would be found by an import.
    locked = {name for each in (file, *BELOW[file]) for name in pins(FOLDER / each)}
    locked |= {"torch"} if "inference.txt" in BELOW[file] else set()  # apart
    for name, versions in pins(FOLDER / file).items():
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform, or not of `make setup`
            continue
        if package.version not in versions:
            continue
        for requirement in map(Requirement, package.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in locked, f"{name}: {requirement}"


def test_lock_when_installed_together_then_no_package_has_two_versions() -> None:
    every: dict[str, set[str]] = {}
    for file in BELOW:
        for name, versions in pins(FOLDER / file).items():
            assert every.setdefault(name, versions) == versions, f"{name} in {file}"


@pytest.mark.parametrize("file", sorted(BELOW))
def test_lock_when_a_layer_lies_below_then_it_repeats_nothing_of_it(file: str) -> None:
    for below in BELOW[file]:
        assert not set(pins(FOLDER / file)) & set(pins(FOLDER / below))


def test_torch_when_locked_then_the_cpu_build_of_the_declared_version(
    pyproject: dict[str, Any],
) -> None:
    [declared] = [
        Requirement(each)
        for each in pyproject["project"]["optional-dependencies"]["cpu"]
        if each.startswith("torch=")
    ]
    [version] = pins(TORCH)["torch"]
    assert f"torch{declared.specifier}" == f"torch=={version.removesuffix('+cpu')}"
    assert version.endswith("+cpu")
    others = {name for file in BELOW if file != CUDA for name in pins(FOLDER / file)}
    assert not [name for name in others if name == "torch" or name.startswith(("nvidia-", "cuda-"))]


def installs(text: str) -> list[str]:
    """Every `pip install` of a Dockerfile or Makefile, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [
        part.strip()
        for line in lines
        if not line.lstrip().startswith(("#", "PIP :="))
        for part in re.split(r"&&|;", line)
        if re.search(r"pip install|\$\(PIP\)", part)
    ]


@pytest.mark.parametrize("name", ["Dockerfile", "Makefile"])
def test_file_when_it_installs_then_only_locked_packages_or_this_repository(name: str) -> None:
    found = installs((ROOT / name).read_text())
    assert found
    for command in found:
        if re.search(
            r"sglang==|transformers==|\.venv-(harness|clients|verifiers|e2b|agents-sdk|liger)",
            command,
        ):
            continue  # environments of their own
        if "--no-index" in command:  # this repository, which downloads nothing
            assert {"--no-deps", "--no-build-isolation"} <= set(command.split()), command
        else:
            assert {"--no-deps", "--require-hashes"} <= set(command.split()), command


def test_sglang_for_gpus_when_installed_then_of_the_version_that_is_tested() -> None:
    """Its packages are not locked: which builds fit depends on the GPU's driver."""
    [pinned] = re.findall(r"sglang==([\d.]+)", (ROOT / "Makefile").read_text())
    assert f"sglang=={pinned}" in (ROOT / "tools/sglang_cpu/requirements.txt").read_text()


def test_layers_when_images_and_setup_are_made_then_each_lock_has_its_place() -> None:
    docker, make = ((ROOT / name).read_text() for name in ("Dockerfile", "Makefile"))
    of_images = {path.stem for path in FILES} - {
        "environments",
        "lock",
        "ray",
        "torch-cpu",
        "torch-cuda",
        "trackers",
    }
    torches = {"torch-cpu", "torch-cuda"}
    assert of_images == set(re.findall(r"requirements/([\w-]+)\.txt", docker)) - torches
    [layers] = re.findall(r"LOCKS := .*%\.txt,([a-z -]+)\)", make)
    assert set(layers.split()) == of_images
    assert "tools/install_torch.py requirements/torch-$(TORCH).txt" in make


def install_torch(
    lock: Path, wheels: Path, *, find: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Sees nothing but a folder of wheels, or the index; leaves this environment alone."""
    command = [sys.executable, ROOT / "tools/install_torch.py", lock]
    command += ["--no-index", "--find-links", wheels] if find else []
    command += ["--target", wheels / "installed"]
    # Nothing of this machine's pip.
    environment["PIP_CONFIG_FILE"] = "/dev/null"
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def make_wheel(folder: Path, version: str) -> str:
    """A wheel called torch; returns its SHA-256."""
    info = f"torch-{version}.dist-info"
    file = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("torch.py", f"__version__ = {version!r}\n")
        named = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", named)
        built = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", built)
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_torch_when_its_locked_build_is_there_then_it_is_taken(tmp_path: Path) -> None:
    digest = make_wheel(tmp_path, "1.0+cpu")
    make_wheel(tmp_path, "1.0")
    lock = tmp_path / "torch-cpu.txt"
    lock.write_text(f"torch==1.0+cpu --hash=sha256:{digest}\n")
    done = install_torch(lock, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'1.0+cpu'" in (tmp_path / "installed/torch.py").read_text()
    assert "not checked" not in done.stderr


def test_torch_when_no_index_has_the_locked_build_then_another_and_it_says_so(
    tmp_path: Path,
) -> None:
    make_wheel(tmp_path, "1.0")
    lock = tmp_path / "torch-cpu.txt"
    lock.write_text(f"torch==1.0+cpu --hash=sha256:{'0' * 64}\n")
    done = install_torch(lock, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'1.0'" in (tmp_path / "installed/torch.py").read_text()
    # PyPI's build would bring CUDA.
    assert "torch 1.0 from https://download.pytorch.org/whl/cpu, since pip's own" in done.stderr
    assert "not checked against a hash" in done.stderr


def test_torch_when_no_index_has_the_lock_for_gpus_then_nothing_replaces_it(
    tmp_path: Path,
) -> None:
    make_wheel(tmp_path, "2.0")
    lock = tmp_path / "torch-cuda.txt"
    lock.write_text(f"torch==1.0 --hash=sha256:{'0' * 64}\n")
    done = install_torch(lock, tmp_path)
    assert done.returncode != 0
    assert "No matching distribution found for torch==1.0" in done.stderr
    assert not (tmp_path / "installed").exists()


def test_torch_when_the_locked_build_has_another_hash_then_nothing_is_installed(
    tmp_path: Path,
) -> None:
    make_wheel(tmp_path, "1.0+cpu")
    lock = tmp_path / "torch-cpu.txt"
    lock.write_text(f"torch==1.0+cpu --hash=sha256:{'0' * 64}\n")
    done = install_torch(lock, tmp_path)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "installed").exists()


def test_torch_when_an_index_is_named_then_from_there_and_it_says_so(tmp_path: Path) -> None:
    digest = make_wheel(tmp_path, "1.0+cpu")
    lock = tmp_path / "torch-cpu.txt"
    lock.write_text(f"torch==1.0+cpu --hash=sha256:{digest}\n")
    page = tmp_path / "simple" / "torch"
    page.mkdir(parents=True)
    make_wheel(page, "1.0+cu128")
    [wheel] = page.glob("*.whl")
    (page / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    index = (tmp_path / "simple").as_uri()
    done = install_torch(lock, tmp_path, find=False, TORCH_INDEX=index)
    assert done.returncode == 0, done.stderr
    assert "'1.0+cu128'" in (tmp_path / "installed/torch.py").read_text()
    assert f"torch 1.0 from {index}: not checked against a hash" in done.stderr
