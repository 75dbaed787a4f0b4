"""Hand-written fakes: an inference server's engine, a store, and model folders without torch."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import numpy as np

from areal.errors import StaleIncarnation, WrongStep
from areal.weights.broadcast import Seat
from areal.weights.manifest import (
    PolicyVersion,
    build_manifest,
    publish_dir,
    staging_dir,
    version_dir,
    write_manifest,
)
from areal_weight_sync.engine.base import EngineError, Fault, Fingerprint

TENSORS = {"model.embed_tokens.weight": (16, 4), "model.norm.weight": (4,)}


def write_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def make_model(folder: Path, fill: float = 0.0, shapes: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    shapes = TENSORS if shapes is None else shapes
    write_safetensors(
        folder / "model.safetensors",
        {name: np.full(shape, fill, "f4") for name, shape in shapes.items()},
    )
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    return folder


def publish_folder(root: Path, version: int, incarnation: int = 1, **model) -> PolicyVersion:
    """What a trainer does: write beside, manifest, rename."""
    staging = make_model(staging_dir(root, version, incarnation), fill=float(version), **model)
    final = version_dir(root, version, incarnation)
    manifest = build_manifest(staging, version, incarnation)
    write_manifest(manifest, staging)
    publish_dir(staging, final)
    from areal.weights.manifest import read_manifest

    return read_manifest(final)


class FakeEngine:
    """A server in memory. Attributes bend it; `calls` says what was asked of it."""

    def __init__(self, boot: str = "boot-1") -> None:
        self.boot = boot
        self.connections = 1
        self.version = "default"
        self.weights = "default"
        self.paused = False
        self.released = False
        self.wake_gate = asyncio.Event()
        self.wake_gate.set()
        self.mode = ""
        self.calls: list[str] = []
        self.requests = 0
        self.has_checksums = True
        self.down: EngineError | None = None
        self.late = 0  # so many next questions for the version are answered when `late_answers`
        self.late_answers = asyncio.Event()
        self.mute: EngineError | None = None  # of /generate only
        self.reports: str | None = None  # lies about its version
        self.holds: str | None = None  # lies about its weights
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.stages = False
        self.stage_gate = asyncio.Event()
        self.stage_gate.set()
        self.stage_error: EngineError | None = None
        self.load_error: EngineError | None = None
        self.fail_resume = 0
        self.aborts = 0
        self.nats = -1.0
        self.ranks = 1
        self.received: list[Seat] = []
        self.receive_error: EngineError | None = None
        self.loaded: dict[str, float] = {}  # adapters: what each adds to the logprobs
        self.most_loaded = 0
        self.lora_rank = 0
        self.lists = True  # the adapters that it took
        self.applies = lambda name: name  # the adapter that it computes with when this one is named

    def restart(self, boot: str, version: str) -> None:
        """By hand, with weights of its own under a version's name."""
        self.boot, self.version, self.weights = boot, version, "by hand"
        self.released = self.paused = False
        self.connections += 1
        self.loaded.clear()

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.down is not None:
            raise self.down

    async def weight_version(self, timeout: float = 2.0) -> str:
        await self._call("weight_version")
        if self.late:
            self.late -= 1
            await self.late_answers.wait()
        return self.version if self.reports is None else self.reports

    async def boot_id(self) -> str:
        await self._call("boot_id")
        return self.boot

    async def running(self) -> int:
        await self._call("running")
        return self.requests

    async def stage(self, version: PolicyVersion, *, timeout: float) -> Fingerprint | None:
        if not self.stages:
            return None
        await self._call(f"stage {version.version}")
        if self.stage_error is not None:
            raise self.stage_error
        try:
            async with asyncio.timeout(timeout):
                await self.stage_gate.wait()
        except TimeoutError:
            raise EngineError(Fault.TIMEOUT, f"stage: no answer within {timeout:.1f} s") from None
        return Fingerprint("tp1", f"w{version.version}" if self.holds is None else self.holds)

    async def receive(
        self, version: PolicyVersion, seat: Seat, *, timeout: float
    ) -> Fingerprint | None:
        await self._call(f"receive {version.version}")
        self.received.append(seat)
        if self.receive_error is not None:
            raise self.receive_error
        return Fingerprint("tp1", f"w{version.version}") if self.stages else None

    async def pause(self, mode: str) -> None:
        await self._call("pause")
        self.paused, self.mode = True, mode

    async def load(self, version: PolicyVersion, *, flush_cache: bool, timeout: float) -> None:
        await self._call(f"load {version.version}")
        assert not self.released, "there is no memory to load into"
        try:
            async with asyncio.timeout(timeout):
                await self.load_gate.wait()
        except TimeoutError:
            raise EngineError(Fault.TIMEOUT, f"load: no answer within {timeout:.1f} s") from None
        if self.load_error is not None:
            raise self.load_error
        self.flushed = flush_cache
        self.version, self.weights = version.name, f"w{version.version}"

    async def fingerprint(self, timeout: float) -> Fingerprint | None:
        await self._call("fingerprint")
        assert not self.released, "there are no weights to look at"
        if not self.has_checksums:
            return None
        return Fingerprint("tp1", self.weights if self.holds is None else self.holds)

    async def logprobs(self, prompt: list[int], version: str, adapter: str = "") -> list[float]:
        await self._call(f"logprobs {adapter}".strip())
        assert not self.paused, "a paused server generates nothing"
        if self.mute is not None:
            raise self.mute
        assert not adapter or adapter in self.loaded, "never loaded"
        nats = self.nats + self.loaded.get(self.applies(adapter), 0.0)
        return [nats] * (len(prompt) - 1)

    async def adapters(self) -> list[str]:
        await self._call("adapters")
        return list(self.loaded) if self.lists else []

    async def load_adapter(self, version: PolicyVersion, *, timeout: float) -> None:
        await self._call(f"load_adapter {version.adapter_name}")
        assert self.weights == "w0", "an adapter belongs to version 0"
        assert version.adapter_name not in self.loaded, "SGLang refuses a name that it has"
        if self.load_error is not None:
            raise self.load_error
        self.loaded[version.adapter_name] = version.adapter.size / 1000
        self.most_loaded = max(self.most_loaded, len(self.loaded))

    async def unload_adapter(self, name: str, *, timeout: float) -> None:
        await self._call(f"unload_adapter {name}")
        assert not self.requests, "SGLang waits for requests that use it"
        del self.loaded[name]

    async def resume(self) -> None:
        await self._call("resume")
        assert not self.released, "it would compute with memory that it does not have"
        assert self.weights != "garbage", "it would sample from undefined weights"
        if self.fail_resume:
            self.fail_resume -= 1
            raise EngineError(Fault.TIMEOUT, "/continue_generation: no answer within 10.0 s")
        self.paused = False

    async def sleep(self, mark: str) -> None:
        await self._call("sleep")
        assert not self.released, "SGLang ends itself when it releases twice"
        self.aborts += self.requests
        self.requests = 0
        self.paused, self.released, self.version, self.weights = True, True, mark, "garbage"

    async def wake(self, mark: str) -> None:
        await self._call("wake")
        await self.wake_gate.wait()
        assert self.released, "SGLang ends itself when it resumes what it has"
        self.released, self.version = False, mark

    async def abort_all(self) -> None:
        await self._call("abort_all")
        self.aborts += self.requests
        self.requests = 0


class FakeStore:
    """The rules of publish.lua, in memory."""

    def __init__(self) -> None:
        self.current: PolicyVersion | None = None
        self.incarnation = 0

    async def publish(self, version: PolicyVersion) -> None:
        await asyncio.sleep(0)
        if version.incarnation < self.incarnation:
            raise StaleIncarnation("stale")
        now = self.current
        if (
            now is not None
            and now.version == version.version
            and (version.stored > now.stored or version.incarnation > now.incarnation)
        ):
            self.current, self.incarnation = version, version.incarnation
            return
        if self.current is not None and version.version <= self.current.version:
            raise WrongStep("wrong")
        self.current, self.incarnation = version, version.incarnation
