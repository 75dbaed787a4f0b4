"""The trainer's end of a chain of deltas: the version before, in its memory."""

from __future__ import annotations

from areal.weights import delta
from areal.weights.manifest import DeltaFile, PolicyVersion, version_name
from areal.weights.publisher import NewVersion
from areal.weights.safetensors import digest_of


class DeltaChain:
    """What the next delta starts from. One for all transports: it holds a copy of the model.

    A trainer that has just started holds nothing, so its first version travels whole; so does what
    follows a version that the other side has lost, and a delta that would not pay.
    """

    def __init__(self) -> None:
        self._before: tuple[PolicyVersion, NewVersion] | None = None

    def encode(self, new: NewVersion) -> tuple[DeltaFile, bytes] | None:
        """The delta to `new` and its description; None: it must travel whole."""
        if self._before is None:
            return None
        base, before = self._before
        if _kinds(before) != _kinds(new):
            return None
        held = {tensor.name: tensor.data for tensor in before.tensors}
        raw = delta.encode(new.tensors, held, base.digest)
        if raw is None:
            return None
        name = version_name(base.version, base.incarnation)
        return DeltaFile(name, base.digest, len(raw), digest_of(raw)), raw

    def advance(self, manifest: PolicyVersion, new: NewVersion) -> None:
        """`new` was published: the next delta starts from it."""
        self._before = manifest, new


def _kinds(version: NewVersion) -> dict[str, tuple[tuple[int, ...], str]]:
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in version.tensors}
