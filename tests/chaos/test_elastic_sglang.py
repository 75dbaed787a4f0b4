"""`make elastic-sglang`: the arithmetic run on two real SGLang servers; one joins, one is killed.

ELASTIC_SEED=1 ELASTIC_STEPS=200 make elastic-sglang

With a token, so that SGLang reads it from its `--config` file. Who is killed with -9, and when, is
the seed's; not before the newcomer serves.
"""

from __future__ import annotations

import os
import random
import secrets
from pathlib import Path

import pytest
from tests.chaos.books import Check
from tests.chaos.elastic_run import KILL, Plan, train
from tests.contract.engines import SERVE

SEED = int(os.environ.get("ELASTIC_SEED", "0"))
STEPS = int(os.environ.get("ELASTIC_STEPS", "160"))
READY_S = 500.0
"""SGLang imports for half a minute on an idle machine, for minutes on a busy one."""

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("AREAL_TEST_SGLANG"), reason="make elastic-sglang"),
]


def test_training_when_a_real_sglang_joins_and_one_dies_then_nothing_is_lost(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    kill_at = random.Random(SEED).randrange(STEPS // 4, STEPS // 2)
    run = train(
        Plan(
            f"sglang-{SEED}",
            STEPS,
            ((STEPS // 20, 3), (kill_at, KILL)),
            SEED,
            (
                f"stack.inference_command={SERVE}",
                f"security.dir={tmp_path}",
            ),
            READY_S,
            # Prompts may begin under more than one earlier version, which is not taken apart.
            tolerance=0.05,
        ),
        tmp_path / "elastic",
    )
    secret = token.read_text()
    told = [log.name for log in run.stack.run_dir.glob("logs/*") if secret in log.read_text()]
    run.checks += [
        Check("the token is in no log", not told, ", ".join(told)),
        # No server drains here: only an update could abort, and in place it must not.
        Check(
            "requests were interrupted by the kill, none by updates",
            "failure" in run.interruptions and "abort" not in run.interruptions,
            str(run.interruptions),
        ),
        Check(
            "all three took traffic",
            len(run.tokens) == 3 and min(run.tokens.values()) > 0,
            ", ".join(f"{tokens:.0f}" for tokens in run.tokens.values()) + " tokens",
        ),
        Check(
            "none served before it was at the current version, or the one just before",
            all(ours >= current - 1 for times in run.joined.values() for ours, current in times),
            str(list(run.joined.values())),
        ),
    ]
    print(f"\nseed {SEED}, {STEPS} steps:")
    run.report()
    assert not run.broken(), run.broken()
