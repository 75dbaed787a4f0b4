"""Tries the configured transport, then the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from areal.chassis.logging import get_logger
from areal.weights.adapters import check_against
from areal.weights.manifest import (
    PolicyVersion,
    WeightTensor,
    assemble_manifest,
    check_same_tensors,
    read_tensors,
    weight_files,
)
from areal.weights.publisher import NewVersion, Publisher, TransportError

_TRY_AGAIN_AFTER = 16


class FallbackPublisher:
    """Tries each in order; the one that worked is tried first for the next versions.

    After 16 versions it returns to the configured order, because the store or the volume may work
    again.
    """

    name = "fallback"

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        self._configured = tuple(publishers)
        self._publishers = list(publishers)
        self._fallen_back = 0
        """Versions until the configured order is tried again."""
        self._model: tuple[Path, PolicyVersion] | None = None
        self._log = get_logger(__name__)

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """See `Publisher`; the error names every way that was tried.

        Raises:
            InvalidInput: The model has other tensors, so no way can carry these.
        """
        self._check(new)
        if self._fallen_back:
            self._fallen_back -= 1
            if not self._fallen_back:
                self._publishers = list(self._configured)
        causes: list[str] = []
        for publisher in list(self._publishers):
            try:
                published = publisher.publish(new, announce)
            except TransportError as error:
                causes.append(f"{publisher.name}: {error}")
                continue
            if causes:
                self._log.warning(
                    "transport_fell_back",
                    version=new.version,
                    to=publisher.name,
                    cause="; ".join(causes)[:500],
                )
                self._publishers.remove(publisher)
                self._publishers.insert(0, publisher)
                self._fallen_back = _TRY_AGAIN_AFTER
            return published
        raise TransportError(f"version {new.version} cannot be published: {'; '.join(causes)}")

    def _check(self, new: NewVersion) -> None:
        """Refuses, once and before a byte is written, what every transport would refuse."""
        if self._model is None or self._model[0] != new.model:
            tensors = [tensor for file in weight_files(new.model) for tensor in read_tensors(file)]
            self._model = new.model, assemble_manifest(new.model, 0, 0, [], tensors)
        own = [WeightTensor(t.name, t.shape, t.dtype) for t in new.tensors]
        if new.adapter is not None:
            names = PolicyVersion(
                new.version, new.incarnation, "", tensors=tuple(own), adapter=new.adapter
            )
            # The digests of the model's tensors were not read here: weight-sync compares them.
            unread = replace(new.adapter, base_digest="")
            check_against(replace(names, adapter=unread), self._model[1])
            return
        check_same_tensors(
            assemble_manifest(new.model, new.version, new.incarnation, [], own), self._model[1]
        )
