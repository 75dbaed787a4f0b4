"""Turns the model calls of one session into trajectories, without changing a sampled id.

A call whose prompt begins with another call's prompt and answer extends it. So the calls of a
session form trees, and what becomes a trajectory is a chain in one of them:

    root ── a ── b ── c        one trajectory: three answers, the loss covers each of them
                 └─── d ── e   a branch: another; b's ids and what is before them are context here
    root'                      a sub-agent, or a history that was rewritten: a third one

Each sampled id is trained on exactly once: in the trajectory of the first call that extends it.
Every other branch shows it as context. Nothing is decoded, compared as text, or encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from areal.errors import InvalidInput, WorkflowError
from areal.types import LLMResponse, Trajectory
from areal.workflows.base import assemble_trajectory


@dataclass(frozen=True)
class Call:
    """One answer of the model within a session."""

    response: LLMResponse
    """Prompt, the exact ids sampled, their logprobs and versions. No ids: the call failed."""
    retry: bool = False
    """The client's SDK says that this request repeats an earlier one whose answer it never
    received."""
    key: str = ""
    """What the client says identifies the request, also when it is repeated; may be empty."""
    delivered: bool = True
    """Whether, as far as the server knows, the complete answer was sent to the client."""
    reward: float | None = None
    """The reward of this one answer."""
    text: str = ""
    """The answer's text for display."""
    outline: str = ""
    """See `areal.agents.outlines`; may be empty."""


@dataclass(frozen=True)
class Merged:
    """The trajectories and rewards of a session."""

    trajectories: list[Trajectory]
    """Trajectories in the order of their first own calls; the caller sets `trajectory_id`."""
    chains: list[list[int]]
    """For each trajectory the calls that its loss covers, as indexes."""
    orphans: list[int]
    """Calls whose answer was never used, because the SDK repeated the request."""
    dropped: int = 0
    """How many of the orphans had an answer, which no trajectory contains."""
    outlines: list[str] = field(default_factory=list)
    """Outlines of all calls."""


def merge(calls: Sequence[Call], outcome: float | None = None) -> Merged:
    """Makes trajectories of a session's calls.

    Args:
        calls: In the order in which the requests arrived.
        outcome: The session's reward: placed on the last sampled token of every trajectory whose
            last call has no reward of its own. A call's own reward is on that call's last token.

    Raises:
        InvalidInput: There is no reward at all.
        WorkflowError: No token was sampled.
    """
    parents = _parents(calls)
    orphans = _orphans(calls, parents)
    kept = [i for i, c in enumerate(calls) if c.response.output_tokens and i not in orphans]
    if not kept:
        raise WorkflowError("session: no token was sampled")
    if outcome is None and all(calls[i].reward is None for i in kept):
        raise InvalidInput(
            "reward: none was sent; expected a number, for the session or for an answer"
        )
    chains = _chains(kept, parents)
    dropped = sum(bool(calls[i].response.output_tokens) for i in orphans)
    trajectories = [_trajectory(calls, chain, outcome) for chain in chains]
    outlines = [call.outline for call in calls]
    return Merged(trajectories, chains, sorted(orphans), dropped, outlines)


def _parents(calls: Sequence[Call]) -> list[int | None]:
    """Returns, for each call, the earlier one that it extends furthest; of equals, the latest."""
    wholes: list[bytes] = []
    parents: list[int | None] = []
    for call in calls:
        response = call.response
        prompt = _packed(response.input_tokens)
        found: int | None = None
        for index, whole in enumerate(wholes):
            longest = found is None or len(whole) >= len(wholes[found])
            if whole and longest and prompt.startswith(whole):
                found = index
        parents.append(found)
        answered = bool(response.output_tokens)
        wholes.append(prompt + _packed(response.output_tokens) if answered else b"")
    return parents


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def _orphans(calls: Sequence[Call], parents: Sequence[int | None]) -> set[int]:
    """Returns, for each repeated request, the earlier call: same prompt, never extended."""
    used = set(parents)
    orphans: set[int] = set()
    prompts: dict[bytes, list[int]] = {}
    for index, call in enumerate(calls):
        same = prompts.setdefault(_packed(call.response.input_tokens), [])
        if call.retry or call.key:
            free = [i for i in same if i not in used and i not in orphans]
            orphans.update(_repeated(calls, call, free)[-1:])
        same.append(index)
    return orphans


def _repeated(calls: Sequence[Call], call: Call, free: Sequence[int]) -> list[int]:
    """The calls one of which `call` may repeat, the likeliest last.

    An answer that the agent has seen must stay: one with a reward, and one that was delivered,
    unless the client itself says that this is the request that it repeats. A call without an answer
    comes before all others, since nothing is lost with it; then a first try, before retries.
    """
    free = [i for i in free if calls[i].reward is None]
    lost = [i for i in free if not (calls[i].delivered and calls[i].response.output_tokens)]
    mine = [i for i in free if call.key and calls[i].key == call.key]
    # A client may give all its requests one key. So without the SDK's word for it, a delivered
    # answer is no proof of a repeated request.
    found = [i for i in mine if i in lost] or (mine if call.retry else [])
    if not found and call.retry:
        found = [i for i in lost if not (call.key and calls[i].key)]
    return sorted(found, key=lambda i: (not calls[i].response.output_tokens, not calls[i].retry, i))


def _chains(kept: Sequence[int], parents: Sequence[int | None]) -> list[list[int]]:
    """Puts each kept call into one chain; a chain continues with the first call that extends it."""
    chains: list[list[int]] = []
    chain_of: dict[int, list[int]] = {}  # by a chain's last call
    for index in kept:
        parent = parents[index]
        chain = chain_of.pop(parent, None) if parent is not None else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(index)
        chain_of[index] = chain
    return chains


def _trajectory(calls: Sequence[Call], chain: Sequence[int], outcome: float | None) -> Trajectory:
    turns = [(len(calls[i].response.input_tokens), calls[i].response) for i in chain]
    last = turns[-1][1]
    own = [calls[i].reward for i in chain]
    if own[-1] is None:
        own[-1] = outcome
    # A reward of 0 may have parts (areal.rubric).
    rewards = [0.0 if reward is None else reward for reward in own]
    ids = [*last.input_tokens, *last.output_tokens]
    text = calls[chain[-1]].text
    return assemble_trajectory(ids, turns, rewards, text)
