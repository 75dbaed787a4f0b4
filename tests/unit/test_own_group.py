"""A test that signals a process before it is up must not end the whole run."""

from __future__ import annotations

import os

import pytest


@pytest.mark.parametrize("signal", [os.kill, os.killpg])
def test_signal_when_a_process_is_not_up_yet_then_the_run_is_spared(signal) -> None:
    with pytest.raises(ProcessLookupError, match="was not up yet"):
        signal(0, 0)
