"""Whether a server's weights are those of the version: compared with what the other servers hold.

Engines with checksums vote: of the digests seen for a version in one layout, the one held by most
servers is right. In a tie it is not the one that belongs to another version (a load that did not
happen), else the one seen first. So one server that lies or holds a torn load is
found whether it comes first, last or between, and a first liar is outvoted by the second honest
server's vote after the first's. Engines without checksums compare the logprobs of a fixed prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

from areal.weights.manifest import PolicyVersion
from areal_weight_sync.engine.base import EngineError, Fault, Fingerprint

_VERSIONS_REMEMBERED = 4
_COMPARED_WITH = 8
_T = TypeVar("_T")


class Confirmation:
    """The votes on the newest versions.

    Example:
        >>> confirmation.vote(12, "10.0.0.7:30000", Fingerprint("tp1:290", "9f86…"))
        []
    """

    def __init__(self, logprob_tolerance: float) -> None:
        self._tolerance = logprob_tolerance
        self._ballots: dict[int, _Ballot] = {}
        self._logprobs: dict[int, dict[str, list[float]]] = {}

    def vote(self, version: int, server_id: str, fingerprint: Fingerprint) -> list[str]:
        """Counts a server's checksum.

        Returns:
            Servers confirmed earlier that this vote leaves in the minority: to be checked again.

        Raises:
            EngineError: The server itself is in the minority.
        """
        ballot = _slot(self._ballots, version, _Ballot)
        ballot.put(server_id, fingerprint)
        known = {
            digest
            for other, earlier in self._ballots.items()
            if other != version
            for digest in earlier.digests()
        }
        right, most = ballot.winner(fingerprint.layout, known)
        if fingerprint.digest != right:
            raise EngineError(
                Fault.WRONG_WEIGHTS,
                f"weights of version {version} differ from those of {most} other server"
                f"{'s' if most > 1 else ''} (checksum {fingerprint.digest[:12]}, "
                f"theirs {right[:12]})",
            )
        return ballot.outvoted(fingerprint)

    def compare(self, version: int, server_id: str, logprobs: list[float]) -> None:
        """Compares a server's logprobs with the others' median.

        Raises:
            EngineError: They differ by more than the tolerance, or are not finite.
        """
        seen = _slot(self._logprobs, version, dict)
        seen.pop(server_id, None)
        others = list(islice(seen.values(), _COMPARED_WITH))
        if not all(-1e4 < value <= 1e-3 for value in logprobs):
            raise EngineError(
                Fault.WRONG_WEIGHTS, f"version {version}: logprobs of the probe are not finite"
            )
        if others:
            median = [statistics.median(column) for column in zip(*others, strict=True)]
            gap = statistics.fmean(abs(a - b) for a, b in zip(logprobs, median, strict=True))
            if gap > self._tolerance:
                raise EngineError(
                    Fault.WRONG_WEIGHTS,
                    f"version {version}: logprobs of the probe differ by {gap:.3f} nats from "
                    f"{len(others)} other server{'s' if len(others) > 1 else ''}",
                )
        seen[server_id] = logprobs

    def restart(self, version: int) -> None:
        """Forgets the votes on a version whose weights are created again."""
        self._ballots.pop(version, None)
        self._logprobs.pop(version, None)

    def forget(self, server_id: str) -> None:
        """Drops the votes of a server that has left or failed."""
        for ballot in self._ballots.values():
            ballot.drop(server_id)
        for seen in self._logprobs.values():
            seen.pop(server_id, None)


class _Ballot:
    """One version's votes; constant work per vote while all agree."""

    def __init__(self) -> None:
        self._votes: dict[str, Fingerprint] = {}
        self._counts: dict[Fingerprint, int] = {}  # in the order first seen

    def put(self, server_id: str, fingerprint: Fingerprint) -> None:
        self.drop(server_id)
        self._votes[server_id] = fingerprint
        self._counts[fingerprint] = self._counts.get(fingerprint, 0) + 1

    def drop(self, server_id: str) -> None:
        before = self._votes.pop(server_id, None)
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]

    def digests(self) -> list[str]:
        """Returns the distinct digests; there are few."""
        return [fingerprint.digest for fingerprint in self._counts]

    def winner(self, layout: str, known: set[str]) -> tuple[str, int]:
        """Returns digest and count; of equals, the one not `known` from other versions."""
        same = {f: count for f, count in self._counts.items() if f.layout == layout}
        best = max(same, key=lambda f: (same[f], f.digest not in known))
        return best.digest, same[best]

    def outvoted(self, right: Fingerprint) -> list[str]:
        if sum(f.layout == right.layout for f in self._counts) == 1:
            return []
        return [s for s, f in self._votes.items() if f.layout == right.layout and f != right]


def _slot(table: dict[int, _T], version: int, make: Callable[[], _T]) -> _T:
    """The version's entry; old versions are dropped."""
    if version not in table:
        table[version] = make()
        for stale in sorted(table)[:-_VERSIONS_REMEMBERED]:
            if stale != version:
                del table[stale]
    return table[version]


def probe_prompt(version: PolicyVersion) -> list[int]:
    """Returns token ids that every vocabulary has: an id beyond its own kills a server."""
    rows = [t.shape[0] for t in version.tensors if t.name.endswith("embed_tokens.weight")]
    vocabulary = min(rows, default=16)
    return [index * 7 % vocabulary for index in range(1, 17)]
