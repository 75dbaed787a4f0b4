"""A publish that ended early: whoever still reads the weights keeps them from changing."""

import threading

import pytest

from areal.config.training import TrainEngineConfig
from areal.errors import WaitTimeout
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.models.tiny import make_tiny_model


@pytest.fixture
def engine(tmp_path):
    engine = FSDPEngine(TrainEngineConfig(path=str(make_tiny_model(tmp_path, hidden_size=32))))
    engine.initialize()
    yield engine
    engine.destroy()


def test_wait_gathered_when_a_broadcast_was_left_alone_then_waits_until_it_has_read(
    engine, monkeypatch
):
    began, finish, ended = threading.Event(), threading.Event(), threading.Event()

    def read_slowly(again):
        for _ in again.buckets():
            began.set()
            assert finish.wait(60)
        ended.set()

    def deliver(tensors, again):
        threading.Thread(target=read_slowly, args=(again,), daemon=True).start()
        assert began.wait(60)
        raise TimeoutError("the broadcast is left alone")

    done = engine.export(None, deliver, twice=True)
    with pytest.raises(TimeoutError, match="left alone"):
        done.result(60)
    monkeypatch.setattr(engine.exporter, "_timeout_s", 0.2)
    with pytest.raises(WaitTimeout, match="the gathering of weights"):
        engine.exporter.wait_gathered()
    finish.set()
    assert ended.wait(60)
    engine.exporter.wait_gathered()


def test_wait_gathered_when_a_publish_failed_before_its_broadcast_then_weights_may_change(engine):
    def deliver(tensors, again):
        raise OSError("a full disk")

    with pytest.raises(OSError, match="a full disk"):
        engine.export(None, deliver, twice=True).result(60)
    engine.exporter.wait_gathered()
