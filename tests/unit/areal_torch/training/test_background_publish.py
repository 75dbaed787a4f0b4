"""One version on its way beside the next step."""

from concurrent.futures import Future
from threading import Timer

import pytest

from areal.errors import WaitTimeout
from areal.weights.publisher import TransportError
from areal_torch.training import background_publish
from areal_torch.training.background_publish import BackgroundPublish
from areal_torch.training.ranks import Ranks


def test_settle_when_it_takes_several_polls_then_waits_for_its_end(monkeypatch):
    monkeypatch.setattr(background_publish, "POLL_S", 0.01)
    publishing, done = BackgroundPublish(Ranks(0, 1)), Future()
    publishing.settle()
    publishing.begin(3, done, 1 << 20)
    assert publishing.pending
    (wait,) = publishing.waits()
    assert "version 3" in str(wait)
    Timer(0.1, done.set_result, [None]).start()
    publishing.settle()
    assert done.done()
    assert not publishing.pending
    assert list(publishing.waits()) == []


def test_settle_when_the_publishing_failed_then_raises_it_once():
    publishing, done = BackgroundPublish(Ranks(0, 1)), Future()
    publishing.begin(3, done, 1 << 20)
    done.set_exception(TransportError("version 3 cannot be published: disk: full"))
    with pytest.raises(TransportError, match="disk: full"):
        publishing.settle()
    publishing.settle()


def test_settle_when_the_volume_is_away_then_its_patience_is_that_of_the_bytes(monkeypatch):
    monkeypatch.setattr(background_publish, "POLL_S", 0.01)
    monkeypatch.setattr(background_publish, "patience_s", lambda size: size / 1000)
    monkeypatch.setattr(background_publish, "CALL_S", 0.0)
    publishing = BackgroundPublish(Ranks(0, 1))
    publishing.begin(3, Future(), 20)
    with pytest.raises(WaitTimeout, match=r"publishing version 3.*is the disk full or unmounted\?"):
        publishing.settle()
