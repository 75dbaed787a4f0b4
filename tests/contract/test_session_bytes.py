"""What a session sends over each hop behind the gateway grows with its tokens, not their square."""

from __future__ import annotations

import pytest
from tests.ledger_support import Book
from tests.session_hops import Hops

TOKENS = 640
"""Of a turn: about 400 from the agent, 240 sampled. 50 turns have 32,000."""
# A token as the ledger keeps it: an id of up to 3 bytes; if sampled, 8 of logprob, 1 of version and
# about 1 of text. What ends the session reads all once more; a call by itself costs the rest.
MOST_PER_TOKEN = 14.0
PER_CALL = 3000


async def chat(hops: Hops, turns: int, workers: int) -> None:
    served = [hops.worker() for _ in range(workers)]
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}: ".ljust(389, "?")})
        body = {"messages": messages, "max_tokens": 240}
        answer = await hops.ask(served[turn % workers], "/v1/chat/completions", body)
        messages.append(answer["choices"][0]["message"])
    await hops.ask(served[0], "/end", {"reward": 1.0})


async def tokens(hops: Hops, turns: int, workers: int) -> None:
    served = [hops.worker() for _ in range(workers)]
    ids: list[int] = []
    for turn in range(turns):
        ids += [60 + turn % 7] * 400
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 240}}
        answer = await hops.ask(served[turn % workers], "/inference/v1/generate", body)
        ids += answer["choices"][0]["token_ids"]
    await hops.ask(served[0], "/end", {"reward": 1.0})


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("drive", [chat, tokens])
async def test_session_when_it_has_many_turns_then_each_token_is_written_once_and_read_once(
    book: Book, drive, workers
):
    found = {}
    for turns in (10, 50):
        hops = Hops(book)
        await hops.open(f"s{turns}")
        before = await hops.redis_bytes()
        await drive(hops, turns, workers)
        sent = hops.sent + await hops.redis_bytes()
        sent.subtract(before)
        found[turns] = sent
        assert hops.groups.group is not None
        [trajectory] = hops.groups.group.trajectories
        assert len(trajectory.input_ids) == pytest.approx(TOKENS * turns, rel=0.02)
        prompt = hops.sampler.prompts[-1]
        assert trajectory.input_ids[: len(prompt)].tolist() == prompt
        assert int(trajectory.loss_mask.sum()) == 240 * turns
        print(f"{drive.__name__}, {workers} workers, {turns} turns: {dict(sent)}")
    for hop in ("written", "read", "redis in", "redis out"):
        assert found[50][hop] < 5.5 * found[10][hop], hop
        copies = 1 if hop in ("written", "redis in") else workers + 1
        # What completes the session sends its trajectory once more.
        copies += hop == "redis in"
        most = MOST_PER_TOKEN * 32_000 * copies + PER_CALL * 50
        assert found[50][hop] < most, (hop, found[50][hop], most)
