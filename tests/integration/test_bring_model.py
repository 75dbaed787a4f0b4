"""`python -m areal_trainer.bring_model`, as the chart's Job runs it: real HTTP, real files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.hub_server import COMMIT, Hub, serving
from tests.integration.stack_tools import eventually
from tests.model_files import model_files, safetensors
from tests.ports import free_port
from tests.s3_server import BUCKET, start_s3

from areal.errors import WaitTimeout
from areal.weights.objects import ObjectStore
from areal_trainer import model_sources
from areal_trainer.model_folder import ready_file
from areal_trainer.model_sources import wait_for_copy

ROOT = Path(__file__).resolve().parents[2]
# huggingface_hub writes 10 MiB at a time.
BIG = 12 * 2**20
PLAIN = "def main(argv): pass\n"


class Job:
    """The Job's container: its volume is a folder."""

    def __init__(self, volume: Path) -> None:
        self.model = volume / "data" / "models" / "tiny"
        self.model.parent.mkdir(parents=True)
        self.log = volume / "log"
        self._volume = volume
        self.recipe(PLAIN)
        # Neither a fetch nor a copy needs torch: its import costs seconds and a GiB.
        torch = volume / "no" / "torch"
        torch.mkdir(parents=True)
        (torch / "__init__.py").write_text("raise ImportError('torch was imported')")

    def recipe(self, text: str) -> None:
        recipe = self._volume / "recipe.py"
        recipe.write_text(text)
        config = f"recipe: {recipe}\nmodel: {{path: models/tiny}}\n"
        (self._volume / "config.yaml").write_text(config)

    def start(self, source: str = "", deadline: float = 100.0, **variables: str) -> Any:
        path = f"{self._volume / 'no'}:{ROOT / 'services'}"
        variables = {"PYTHONPATH": path, "HOME": str(self._volume), "PATH": ""} | variables
        with self.log.open("w") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "areal_trainer.bring_model"),
                    *("--config", str(self._volume / "config.yaml"), "--model", str(self.model)),
                    *("--source", source, "--deadline", str(deadline)),
                ],
                env=variables,
                stdout=log,
                stderr=log,
                cwd=self._volume / "data",
            )

    def run(self, source: str = "", **more: Any) -> tuple[int, str]:
        code = self.start(source, **more).wait(120.0)
        return code, self.log.read_text()

    def content(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.model)): path.read_bytes()
            for path in self.model.rglob("*")
            if path.is_file()
        }

    @property
    def is_ready(self) -> bool:
        """What the other pods' init containers look at."""
        return Path(f"{self.model}.ready").is_file()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(model_files(BIG) | {"model.gguf": b"no", "pytorch_model.bin": b"no"})) as hub:
        yield hub


def test_model_when_it_is_on_the_hub_then_it_is_fetched_once(job: Job, hub: Hub) -> None:
    code, said = job.run("hf://lab/tiny@v1", HF_ENDPOINT=hub.url)
    assert code == 0, said
    assert job.content() == model_files(BIG), "what is not loaded is left there"
    assert job.is_ready
    assert COMMIT in said
    hub.failures = 1000
    code, said = job.run("hf://lab/tiny@v1", HF_ENDPOINT=hub.url)
    assert (code, hub.failures) == (0, 1000), said


def test_fetch_when_the_connection_is_lost_then_it_continues_within_the_file(
    job: Job, hub: Hub
) -> None:
    hub.cut_after["model.safetensors"] = BIG - 2**20
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url)
    assert code == 0, said
    assert hub.ranges == [f"bytes={10 * 2**20}-"]
    assert job.content() == model_files(BIG)


def test_fetch_when_it_is_killed_then_the_next_one_keeps_whole_files(job: Job, hub: Hub) -> None:
    hub.files["second.safetensors"] = safetensors(1000)
    hub.pause_after["model.safetensors"] = BIG - 2**20
    first = job.start("hf://lab/tiny", HF_ENDPOINT=hub.url)
    eventually(
        lambda: any(p.stat().st_size >= 10 * 2**20 for p in job.model.rglob("*.incomplete")),
        "10 MiB on the disk",
        60.0,
    )
    whole = ["config.json", "second.safetensors", "tokenizer.json"]
    eventually(lambda: {*whole} <= {*job.content()}, "the other files", 60.0)
    first.send_signal(signal.SIGKILL)
    first.wait(60.0)
    hub.resume.set()
    assert not job.is_ready
    hub.fetched.clear()
    assert list(job.model.rglob("*.incomplete"))
    assert job.run("hf://lab/tiny@v9", HF_ENDPOINT=hub.url)[0] == 2, "whatever becomes of it"
    assert not list(job.model.rglob("*.incomplete")), "space that would be used twice"
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url)
    assert code == 0, said
    assert hub.fetched == ["model.safetensors"]
    assert sorted(job.content()) == sorted(["model.safetensors", *whole]), "nothing half is left"
    assert job.content()["model.safetensors"] == hub.files["model.safetensors"]
    assert job.is_ready


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_fetch_when_a_file_arrives_damaged_then_it_is_fetched_again(
    job: Job, hub: Hub, file: str
) -> None:
    hub.damaged = {file}
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url)
    assert code == 0, said
    assert f"damaged or missing: {file}" in said
    assert job.content() == model_files(BIG)


def test_fetch_when_the_repository_is_private_then_the_token_opens_it_and_is_not_said(
    job: Job, hub: Hub
) -> None:
    hub.token = "hf_very_secret"
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url)
    assert code == 2, said
    assert "set HF_TOKEN (on Kubernetes in prepare.extraEnv" in said
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url, HF_TOKEN=hub.token)
    assert code == 0, said
    assert hub.token not in said


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("hf://lab/none", "hf://lab/none: no such repository"),
        ("hf://lab/tiny@v9", "hf://lab/tiny@v9: no such revision"),
    ],
)
def test_fetch_when_there_is_no_such_thing_then_one_line_says_so(
    job: Job, hub: Hub, source: str, sentence: str
) -> None:
    code, said = job.run(source, HF_ENDPOINT=hub.url)
    assert code == 2
    assert sentence in said
    assert "Traceback" not in said
    assert not job.is_ready


def test_fetch_when_the_repository_has_no_whole_model_then_what_it_lacks_is_said(
    job: Job, hub: Hub
) -> None:
    del hub.files["tokenizer.json"]
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url)
    assert (code, job.is_ready) == (2, False)
    assert "prepare.source hf://lab/tiny: no tokenizer.json" in said


def test_fetch_when_the_hub_is_busy_then_it_is_asked_again(job: Job, hub: Hub) -> None:
    hub.failures = 1
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url)
    assert code == 0, said
    assert job.is_ready


@pytest.mark.parametrize("begun", [False, True])
def test_fetch_when_the_hub_cannot_be_reached_then_the_deadline_ends_it_and_says_why(
    job: Job, begun: bool
) -> None:
    """What an earlier try has left must not pass for the model."""
    if begun:
        job.model.mkdir()
        (job.model / "config.json").write_text("{}")
    url = f"http://127.0.0.1:{free_port()}"
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=url, deadline=6.0)
    assert (code, job.is_ready) == (1, False)
    assert "trying again in" in said
    assert "for the model (hf://lab/tiny: the Hub cannot be reached: " in said
    assert "if a folder was meant, there is no 'lab/tiny' here: create it" in said
    assert "write ./lab/tiny" in said


def test_fetch_when_the_download_stands_still_then_the_deadline_ends_it(job: Job, hub: Hub) -> None:
    hub.stand_still = True
    code, said = job.run("hf://lab/tiny", HF_ENDPOINT=hub.url, deadline=12.0)
    assert (code, job.is_ready) == (1, False)
    assert "GiB in" in said
    assert "for the model" in said


def test_source_when_another_model_is_there_then_it_is_refused(job: Job, hub: Hub) -> None:
    assert job.run("hf://lab/tiny@v1", HF_ENDPOINT=hub.url)[0] == 0
    code, said = job.run("hf://lab/tiny@main", HF_ENDPOINT=hub.url)
    assert code == 2
    assert "already holds hf://lab/tiny@v1" in said
    assert "set model.path to another folder" in said


def test_model_when_it_is_on_another_claim_then_it_is_copied(job: Job, tmp_path: Path) -> None:
    """Links are followed: so the Hub's own cache lies on disks."""
    claim, blobs = tmp_path / "source" / "tiny", tmp_path / "source" / "blobs"
    claim.mkdir(parents=True)
    blobs.mkdir()
    for name, content in model_files().items():
        (blobs / name).write_bytes(content)
        (claim / name).symlink_to(f"../blobs/{name}")
    code, said = job.run(str(claim))
    assert code == 0, said
    assert job.content() == model_files()
    assert job.is_ready
    assert not any(path.is_symlink() for path in job.model.iterdir())


def test_copy_when_the_claim_has_no_such_folder_then_one_line_says_so(
    job: Job, tmp_path: Path
) -> None:
    code, said = job.run(str(tmp_path / "source" / "none"))
    assert (code, job.is_ready) == (2, False)
    assert "no folder 'none' on that claim" in said


def test_model_when_the_recipe_makes_it_then_it_is_made_once(job: Job) -> None:
    (job.log.parent / "no" / "torch" / "__init__.py").write_text("def set_num_threads(n): pass\n")
    job.recipe(
        "from pathlib import Path\n"
        "def prepare_model(config):\n"
        "    folder = Path(config.model.path)\n"
        "    folder.mkdir()\n"
        "    (folder / 'config.json').write_text('{}')\n" + PLAIN
    )
    code, said = job.run()
    assert code == 0, said
    assert job.is_ready
    assert job.run()[0] == 0, "a second time mkdir would fail"


def test_model_when_a_person_must_copy_it_then_the_command_is_said_and_nothing_fails(
    job: Job,
) -> None:
    process = job.start(POD_NAMESPACE="lab", HOSTNAME="areal-prepare-x")
    try:
        command = f"kubectl cp -c prepare FOLDER lab/areal-prepare-x:{job.model}"
        eventually(lambda: command in job.log.read_text(), "the command", 60.0)
        assert process.poll() is None
        assert job.model.is_dir(), "kubectl cp copies into it"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 143
        assert not job.is_ready
    finally:
        process.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_sources, "_LOOK_S", 0.05)
    monkeypatch.setattr(model_sources, "_QUIET_S", 0.5)


class Waiting:
    """`wait_for_copy` in a thread."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.said: list[str] = []
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        deadline = time.monotonic() + 60.0
        wait_for_copy(self.model, how="copy it", deadline=deadline, say=self.said.append)

    def is_over(self, within: float) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()


def unpack(archive: bytes, model: Path) -> None:
    """What `kubectl cp FOLDER POD:MODEL` does in the pod."""
    (model.parent / "tar").write_bytes(archive)
    with (model.parent / "tar").open("rb") as stream:
        subprocess.run(["tar", "-xmf", "-", "-C", str(model)], stdin=stream, check=False)


def archive_of(folder: Path, files: dict[str, bytes]) -> bytes:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    names = [f"{folder.name}/{name}" for name in sorted(files)]
    return subprocess.check_output(["tar", "-cf", "-", "-C", str(folder.parent), *names])


@pytest.mark.usefixtures("quick")
def test_copy_by_hand_when_it_was_interrupted_then_only_the_whole_one_counts(
    tmp_path: Path,
) -> None:
    files = model_files(200_000)
    archive, model = archive_of(tmp_path / "mine", files), tmp_path / "models" / "tiny"
    waiting = Waiting(model)
    eventually(model.is_dir, "the folder", 60.0)
    unpack(archive[:100_000], model)
    assert not waiting.is_over(1.5), "model.safetensors is a half"
    unpack(archive, model)
    assert waiting.is_over(30.0), waiting.said
    assert {path.name: path.read_bytes() for path in model.iterdir()} == files


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("place", [lambda model: model, lambda model: model / "other"])
def test_copy_by_hand_when_files_still_change_then_it_waits(
    tmp_path: Path, place: Callable[[Path], Path]
) -> None:
    """By other ways than kubectl, too: the volume may be mounted elsewhere."""
    model, files = tmp_path / "models" / "tiny", model_files()
    waiting = Waiting(model)
    eventually(model.is_dir, "the folder", 60.0)
    folder = place(model)
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for turn in range(20):
        (folder / "merges.txt").write_text("m" * turn)
        assert not waiting.is_over(0.1)
    assert waiting.is_over(30.0), waiting.said
    assert sorted(path.name for path in model.iterdir()) == sorted([*files, "merges.txt"])


@pytest.mark.usefixtures("quick")
def test_copy_by_hand_when_the_model_has_folders_of_its_own_then_they_come_along(
    tmp_path: Path,
) -> None:
    """A newer folder with a config.json inside of a model is not the model."""
    model = tmp_path / "models" / "tiny"
    (model / "onnx").mkdir(parents=True)
    for name, content in model_files().items():
        (model / name).write_bytes(content)
    (model / "onnx" / "config.json").write_text("{}")
    assert Waiting(model).is_over(30.0)
    assert {path.name for path in model.iterdir()} == {*model_files(), "onnx"}


@pytest.mark.usefixtures("quick")
def test_copy_by_hand_when_links_come_then_it_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    model = tmp_path / "models" / "tiny"
    (model / "mine").mkdir(parents=True)
    (model / "mine" / "config.json").symlink_to("../../blobs/0123")
    waiting = Waiting(model)
    eventually(lambda: "copy files, not links" in " ".join(waiting.said), "the line", 30.0)
    (model / "mine" / "config.json").unlink()
    for name, content in model_files().items():
        (model / "mine" / name).write_bytes(content)
    assert waiting.is_over(30.0), waiting.said


@pytest.mark.usefixtures("quick")
def test_copy_by_hand_when_it_does_not_come_then_the_deadline_says_what_to_do(
    tmp_path: Path,
) -> None:
    model = tmp_path / "models" / "tiny"
    with pytest.raises(WaitTimeout, match=r"a model in .*tiny \(no config.json; copy it\)"):
        wait_for_copy(model, how="copy it", deadline=time.monotonic(), say=print)


def test_model_when_it_is_in_an_object_store_then_it_is_fetched(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_s3(tmp_path / "s3", monkeypatch):
        store = ObjectStore(f"s3://{BUCKET}")
        for name, content in model_files().items():
            store.put(f"models/tiny/{name}", content)
        access = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        code, said = job.run(f"s3://{BUCKET}/models/tiny", **access)
        assert code == 0, said
        assert job.content() == model_files()
        assert job.is_ready
        job.model.rename(tmp_path / "other")
        Path(f"{job.model}.ready").unlink()
        code, said = job.run(f"s3://{BUCKET}/models/none", **access)
        assert code == 2
        assert "is empty" in said


def test_model_when_its_folder_cannot_be_written_then_one_line_says_so(tmp_path: Path) -> None:
    """As when someone else has copied it: a folder where the mark belongs is refused to all."""
    job = Job(tmp_path)
    job.model.mkdir()
    for name, content in model_files().items():
        (job.model / name).write_bytes(content)
    ready_file(job.model).mkdir()
    process = job.start()
    assert process.wait(100) == 1
    (line,) = [text for text in job.log.read_text().splitlines() if "must be able" in text]
    assert line.startswith(f"areal-trainer: '{ready_file(job.model)}': ")
    assert line.endswith(f": uid {os.getuid()} must be able to write in '{job.model.parent}'")
    assert "Traceback" not in job.log.read_text()
