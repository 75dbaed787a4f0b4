"""Writes a step's groups while the next steps run; a checkpoint waits for its steps' files.

| consumes | waits for | unblocked by |
|---|---|---|
| memory of at most BEHIND steps, disk up to `keep_bytes` | the disk | the write; PATIENCE_S |

A file appears complete or not at all. A step that is repeated replaces its file; the groups are the
same. If the disk fails, that is logged once, and training continues without these files.
"""

from __future__ import annotations

import fnmatch
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from areal.chassis.files import replacing
from areal.chassis.logging import get_logger
from areal.errors import ArealError, InvalidInput
from areal.protocol.leases import Discarded
from areal.runs.rollouts.records import (
    Decode,
    discarded_name,
    discarded_table,
    file_name,
    step_of,
    table_of,
)
from areal.tokenizer import Tokenizer
from areal.types import TrajectoryGroup
from areal.weights.objects import ObjectStore
from areal.weights.publisher import TransportError

if TYPE_CHECKING:
    import pyarrow as pa

BEHIND = 4
PATIENCE_S = 60.0
_FILES = "step-*.parquet"
# Columns whose values repeat within a file. A dictionary for each column would take more time.
_REPEATED = ["step", "incarnation", "task_id", "outcome", "cause", "finish_reason"]
# Sizes are looked up whenever this rank has written such a part of what may be kept.
_CHECKS = 64


class RolloutWriter:
    """The files of one rank."""

    def __init__(
        self, folder: Path, rank: int, keep_bytes: int, model: str, mirror: str = ""
    ) -> None:
        """Writes nothing yet.

        Args:
            folder: Where the files go; all ranks' are in one.
            rank: This process's rank; rank 0 deletes the oldest steps above `keep_bytes`.
            keep_bytes: Limit for all files together; 0 keeps nothing.
            model: The model whose tokenizer made the ids.
            mirror: {s3,gs,az}://bucket/prefix that gets a copy of each file; "": none does.
        """
        self._mirror = ObjectStore(mirror) if mirror and keep_bytes else None
        self._folder = folder
        self._rank = rank
        self._keep_bytes = keep_bytes
        self._model = model
        self._decode: Decode | None = None
        self._loaded = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="areal-rollouts")
        self._writing: deque[Future[None]] = deque()
        self._unchecked = 0
        self._complained = False
        self._hangs = False
        self._log = get_logger(__name__)

    def resume(self, step: int) -> None:
        """Deletes what belongs to lost steps (rank 0, before any rank writes)."""
        self._copy(lambda store: store.remove(_above(step, store.files())))
        if self._folder.is_dir():
            lost = [path for path in self._folder.glob(_FILES) if step_of(path.name) > step]
            for path in [*lost, *self._folder.glob(f".{_FILES}.*tmp")]:
                path.unlink(missing_ok=True)

    def keep(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        step: int,
        incarnation: int,
        advantages: Callable[[], npt.NDArray[np.float32]] | None,
        discarded: Callable[[], Iterable[Sequence[Discarded]]] | None = None,
    ) -> None:
        """Passes a finished step's groups to the thread; waits if that is BEHIND steps late.

        Args:
            groups: What this rank trained on; their arrays do not change any more.
            step: The step that trained on them.
            incarnation: The trainer's incarnation.
            advantages: Called at once, if given: float32 [T] over all tokens of the groups.
            discarded: Asked by the thread for what ended untrained before the step's batch.
        """
        if not self._keep_bytes or not (groups or discarded):
            return
        self._wait(BEHIND - 1)
        if len(self._writing) == BEHIND:  # the disk hangs
            return
        found = advantages() if advantages is not None else None

        def write() -> None:
            model, decode = self._model, self._decoder()
            if groups:
                table = table_of(
                    groups,
                    step=step,
                    incarnation=incarnation,
                    advantages=found,
                    model=model,
                    decode=decode,
                )
                self._write(iter([table]), self._folder / file_name(step, self._rank))
            tables = (
                discarded_table(
                    some, step=step, incarnation=incarnation, model=model, decode=decode
                )
                for some in (discarded() if discarded else ())
            )
            self._write(tables, self._folder / discarded_name(step))

        self._writing.append(self._thread.submit(write))

    def settle(self) -> None:
        """Returns once everything handed in is written, or could not be."""
        self._wait(0)

    def close(self) -> None:
        """Writes what is left."""
        self.settle()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait(self, most: int) -> None:
        """Returns once at most that many steps are being written, or the disk hangs.

        A disk that has hung for PATIENCE_S is not waited for again until it has moved.
        """
        while len(self._writing) > most:
            oldest = self._writing[0]
            wait([oldest], 0.0 if self._hangs else PATIENCE_S)
            self._hangs = not oldest.done()
            if self._hangs:
                self._complain(f"not written in {PATIENCE_S:.0f} s")
                return
            self._writing.popleft()
            try:
                oldest.result()
            except CancelledError:  # its call to the ledger; a resumed trainer asks again
                self._complain("the trainer ended before the ledger answered")
            except (OSError, ArealError) as error:
                self._complain(str(error))

    def _complain(self, cause: str) -> None:
        if not self._complained:
            self._log.warning(
                "rollouts_not_kept",
                folder=str(self._folder),
                cause=cause,
                hint="training continues; set checkpoint.rollouts_gib=0 to keep none",
            )
        self._complained = True

    def _decoder(self) -> Decode | None:
        """Returns a function from ids to text; None until the model's tokenizer is loaded."""
        if self._model and not self._loaded:
            self._loaded = True
            try:
                self._decode = Tokenizer.load(Path(self._model)).decode
            except InvalidInput as error:
                self._log.warning("rollouts_without_texts", cause=str(error))
        return self._decode

    def _write(self, tables: Iterator[pa.Table], path: Path) -> None:
        """Writes tables of one schema, one at a time; nothing, if there are none."""
        from pyarrow import parquet

        first = next(tables, None)
        if first is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # Readers of whole folders (pandas, Arrow) pass over names that begin with a dot.
        with replacing(path) as temporary, temporary.open("wb") as file:
            with parquet.ParquetWriter(
                file, first.schema, compression="zstd", use_dictionary=_REPEATED
            ) as writer:
                writer.write_table(first)
                for table in tables:
                    writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
        _fsync(self._folder)  # a checkpoint that outlives the machine finds its steps
        self._copy(lambda store: store.put(path.name, path.read_bytes()))
        self._unchecked += path.stat().st_size
        if self._rank == 0 and self._unchecked > self._keep_bytes // _CHECKS:
            self._forget()

    def _forget(self) -> None:
        """Deletes the oldest steps, but never the newest, until the rest fits."""
        self._unchecked = 0
        sizes = {path: path.stat().st_size for path in self._folder.glob(_FILES)}
        total = sum(sizes.values())
        gone: list[Path] = []
        for step in sorted({step_of(path.name) for path in sizes})[:-1]:
            if total <= self._keep_bytes:
                break
            for path in [path for path in sizes if step_of(path.name) == step]:
                path.unlink(missing_ok=True)
                total -= sizes[path]
                gone.append(path)
        if gone:
            self._copy(lambda store: store.remove([path.name for path in gone]))

    def _copy(self, do: Callable[[ObjectStore], None]) -> None:
        """Changes the copies; a store that does not answer is not asked again."""
        if self._mirror is None:
            return
        try:
            do(self._mirror)
        except TransportError as error:
            self._mirror = None
            self._log.warning(
                "rollouts_not_copied", cause=str(error), hint="they stay in the run folder"
            )


def _above(step: int, names: Sequence[str]) -> list[str]:
    """Returns those of our files that belong to later steps."""
    return [name for name in fnmatch.filter(names, _FILES) if step_of(name) > step]


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
