"""The weights of SGLang's model: staged, installed and read through its scheduler processes.

Spec: docs/protocol.md, "Weights".
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from rolloutbus.bus.weights.manifest import ALIGN_BYTES, DTYPES
from rolloutbus.bus.weights.tensor_files import LENGTH_BYTES, header_bytes, parse_header
from rolloutbus.bus.wire.errors import EngineFailed, RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.engine_worker.engine import (
    Bytes,
    EngineBusy,
    InFlight,
    TensorRange,
    TensorSpec,
    WeightSwap,
)
from rolloutbus.engine_worker.engines.sglang.pausing import Pausing
from rolloutbus.engine_worker.engines.sglang.schedulers.connection import Reports, Schedulers
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    CheckpointTensor,
    FindTensors,
    GiveBackSpares,
    Halt,
    Install,
    Lent,
    Placed,
    Read,
    SchedulerAnswer,
    Stage,
    Swapped,
    TensorRows,
    Unstage,
    VersionStaged,
)
from rolloutbus.engine_worker.engines.shared.made_up_weights import checkpoint_tensors
from rolloutbus.engine_worker.weights.buffers import SpareBuffer, Whereabouts, shared_buffer
from rolloutbus.engine_worker.weights.checks import require_bytes
from rolloutbus.engine_worker.weights.raw_tensor import HandleBook, RawTensor
from rolloutbus.engine_worker.weights.torch_tensors import DTYPE_NAMES


def tensors_of(model: Path) -> Sequence[CheckpointTensor]:
    """All of them by name, in the order of the files; without files, as the configuration says.

    Raises:
        ValueError: a file is none of the safetensors format; names it. Or there is none, and the
            configuration does not tell.
    """
    found: dict[str, CheckpointTensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            try:
                text = file.read(header_bytes(file.read(LENGTH_BYTES)))
                ranges = parse_header(text, path.stat().st_size)
            except RemoteProtocolError as error:
                raise ValueError(f"model: {path}: {error}") from error
        in_order = sorted(ranges.items(), key=lambda item: item[1].start)
        for name, place in in_order:
            found.setdefault(name, CheckpointTensor(name, place.dtype, place.shape))
    return [*found.values()] or _tensors_to_come(model)


def _tensors_to_come(model: Path) -> Sequence[CheckpointTensor]:
    """Those that a trainer is to bring to a model without files."""
    return [
        CheckpointTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in checkpoint_tensors(model).items()
    ]


class _Piece(NamedTuple):
    """Part of an answer that some bytes asked for are in."""

    rows: TensorRows
    skip_bytes: int
    """In the first row, before what was asked for."""


def one_outcome(reports: Reports) -> Swapped:
    """How an update of all schedulers has ended; torn: some have done it and others have not."""
    swaps = {rank: each for rank, each in reports.items() if isinstance(each, Swapped)}
    failed = {rank: each for rank, each in swaps.items() if each.problem}
    if not failed:
        # Schedulers of one replica have the same requests.
        own = [each for rank, each in swaps.items() if rank.is_first]
        return Swapped(
            own[0].version,
            max(each.stall_ms for each in swaps.values()),
            sum(each.n_retracted for each in own),
            sum(each.n_aborted for each in own),
        )
    rank, first = min(failed.items())
    if len(failed) == len(swaps):
        return first if not any(each.is_torn for each in failed.values()) else _torn(first)
    others = ", ".join(str(rank) for rank in sorted(swaps.keys() - failed.keys()))
    return _torn(first, f"; only {others} took the version, {rank} did not")


def _torn(report: Swapped, more: str = "") -> Swapped:
    problem = report.problem + more
    return structs.replace(report, problem=problem, is_busy=False, is_torn=True)


def held_between(
    tensors: Sequence[CheckpointTensor], surveys: Collection[SchedulerAnswer]
) -> tuple[dict[str, TensorSpec], frozenset[str]]:
    """What the schedulers keep between them, by name, and the names of what they cannot read.

    Each stage has layers of its own, and what a tensor is shared by may be read from any.
    """
    dtypes: dict[str, str] = {}
    readable: set[str] = set()
    for survey in surveys:
        mine = {t.name: dtype for t, dtype in zip(tensors, survey.dtypes, strict=True) if dtype}
        dtypes |= mine
        readable |= mine.keys() - set(survey.unreadable)
    specs = {each.name: _spec(each, dtypes[each.name]) for each in tensors if each.name in dtypes}
    return specs, frozenset(dtypes.keys() - readable)


class SglangWeights:
    """Implements `WeightSink` and `SharesMemory`."""

    def __init__(
        self, schedulers: Schedulers, pausing: Pausing, model: Path, *, is_whole: bool
    ) -> None:
        """Find out what the model keeps of the checkpoint in the directory `model`.

        `is_whole`: all of the model comes from there.

        Raises:
            ValueError: a file is no checkpoint, or a part of the model is in none.
        """
        self._schedulers = schedulers
        self._pausing = pausing
        self._lock = threading.Lock()
        """One update at a time."""
        self._staging = threading.Lock()
        self._reading = threading.Lock()
        self._spare = SpareBuffer(make=shared_buffer)
        self._answers = shared_buffer(0)
        self._staged: dict[int, Bytes | None] = {}
        """By version: the copy of its bytes that is ours, if there had to be one."""
        self.handles = HandleBook()
        """See `SharesMemory`."""
        self.version = 0
        self.n_calls = 0
        """Updates that wait, or are being made."""
        tensors = tensors_of(model)
        surveys = [*schedulers.ask(FindTensors(list(tensors))).values()]
        unfilled = sorted({name for each in surveys for name in each.unfilled})
        if is_whole and unfilled:
            n, first = len(unfilled), unfilled[0]
            raise ValueError(f"model: the checkpoint lacks {n} parameters of the model: {first}, …")
        self._specs, self._unreadable = held_between(tensors, surveys)

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSink`: names of the checkpoint, types that the model keeps them in."""
        return [*self._specs.values()]

    def shared_buffer(self, size_bytes: int) -> Bytes:
        """See `SharesMemory`."""
        return shared_buffer(size_bytes)

    def stage(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        """See `WeightSink`.

        Raises:
            ValueError: the tensors do not fit the model; names them.
            EngineFailed: not in this engine, or there was no room for them.
        """
        # Refused here, an update is refused for everybody; refused later, this worker lacks it.
        self._pausing.guard.check_takes_updates()
        require_bytes(self._specs, tensors)
        with self._staging:
            self.unstage(version)
            expected = self._schedulers.expect(VersionStaged, version)
            self._staged[version], order = self._placed(version, tensors)
            self._schedulers.ask(order)
            reports = self._schedulers.wait(expected, is_patient=False)
            if version not in self._staged:  # given up meanwhile: schedulers keep what they stage
                self._schedulers.ask(Unstage(version))
                raise EngineFailed(_failed(version, "it was given up while it was staged"))
        for report in reports.values():
            assert isinstance(report, VersionStaged)
            if report.problem:
                self.unstage(version)
                raise EngineFailed(_failed(version, report.problem))

    def unstage(self, version: int) -> None:
        """See `WeightSink`."""
        try:
            copy = self._staged.pop(version)
        except KeyError:
            return
        self._schedulers.ask(Unstage(version))
        if copy is not None:
            self._spare.give_back(copy)

    def give_back_spares(self) -> None:
        """See `WeightSink`."""
        self._schedulers.ask(GiveBackSpares())

    def install(
        self, version: int, tensors: Mapping[str, RawTensor], in_flight: InFlight
    ) -> WeightSwap:
        """See `WeightSink`.

        Raises:
            ValueError: tensors do not fit, by name; nothing was touched.
            EngineBusy: the weights are asleep, or `finish_old` was asked for while paused with
                requests running, which would never end.
            EngineFailed: the model does not take them; `is_torn` tells whether it is spoiled.
        """
        self.n_calls += 1
        try:
            with self._lock:
                if version not in self._staged:
                    self.stage(version, tensors)
                try:
                    return self._swap(self._install(version, in_flight))
                finally:
                    self.unstage(version)
        finally:
            self.n_calls -= 1

    def read_ranges(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        """See `WeightSource`.

        Raises:
            EngineFailed: `unsupported`: the model keeps something else than a copy of the tensor.
        """
        pieces: list[_Piece] = []
        end = 0
        for asked in ranges:
            pieces.append(self._piece(asked, end))
            last = pieces[-1].rows
            end = _aligned(last.offset + last.n * self._row_bytes(last.name))
        if self._pausing.guard.is_torn:
            raise EngineBusy("the weights are of no version: update them first")
        with self._reading:
            rows = [each.rows for each in pieces if each.rows.n]
            # A range of no bytes asks for the version only: there is no room for it to lie in.
            file = self._room(end) if rows else ""
            answers = self._schedulers.ask(Read(file, rows))
            starts = [each.rows.offset + each.skip_bytes for each in pieces]
            found = [
                self._answers[start : start + asked.size_bytes].copy()
                for start, asked in zip(starts, ranges, strict=True)
            ]
        versions = {each.version for each in answers.values()}
        if len(versions) > 1:
            raise EngineBusy(f"the weights are being changed: they are of versions {versions}")
        return versions.pop(), found

    def _install(self, version: int, in_flight: InFlight) -> Swapped:
        self._pausing.begin_update(in_flight)
        is_torn = self._pausing.guard.is_torn
        try:
            expected = self._schedulers.expect(Swapped, version)
            self._schedulers.ask(Install(version, in_flight))
            report = one_outcome(
                self._schedulers.wait(expected, is_patient=in_flight == "finish_old")
            )
            if report.is_torn:
                # Those that have the version would go on with it, and the others without.
                self._schedulers.ask(Halt())
            is_torn = report.is_torn or (is_torn and bool(report.problem))
            if not report.problem:
                self.version = version
        finally:
            self._pausing.end_update(is_torn=is_torn)
        return report

    @staticmethod
    def _swap(report: Swapped) -> WeightSwap:
        if report.is_busy:
            raise EngineBusy(report.problem)
        if report.problem:
            raise EngineFailed(_failed(report.version, report.problem))
        return WeightSwap(report.version, report.stall_ms, report.n_retracted, report.n_aborted)

    def _placed(self, version: int, tensors: Mapping[str, RawTensor]) -> tuple[Bytes | None, Stage]:
        """The order to stage these bytes; what no other process can see is copied first."""
        lent: list[Lent] = []
        seen: dict[str, Bytes] = {}
        hidden: dict[str, RawTensor] = {}
        there = Whereabouts()
        for name, raw in tensors.items():
            if not raw.nbytes:
                continue
            if not isinstance(raw, np.ndarray):
                found = self.handles.find(int(raw.data_ptr()), raw.nbytes)
                if found is not None:
                    lent.append(Lent(self._tensor(name), *found))
                    continue
            elif there.of(raw) is not None:
                seen[name] = raw
                continue
            hidden[name] = raw
        copy: Bytes | None = None
        if hidden:
            copy = self._spare.take(sum(_aligned(raw.nbytes) for raw in hidden.values()))
            seen |= _copied(hidden, copy)
        files: dict[str, int] = {}
        placed = self._in_files(seen, files)
        return copy, Stage(version, [*files], placed, lent)

    def _in_files(self, contents: Mapping[str, Bytes], files: dict[str, int]) -> list[Placed]:
        """Where these lie; `files` gets each file, and its number."""
        there = Whereabouts()
        placed: list[Placed] = []
        for name, raw in contents.items():
            place = there.of(raw)
            assert place is not None, "it was mapped for this"
            file = files.setdefault(place.path, len(files))
            placed.append(Placed(self._tensor(name), file, place.offset))
        return placed

    def _tensor(self, name: str) -> CheckpointTensor:
        spec = self._specs[name]
        return CheckpointTensor(name, spec.dtype, spec.shape)

    def _piece(self, asked: TensorRange, offset: int) -> _Piece:
        name, start, size_bytes = asked
        spec = self._specs.get(name)
        if spec is None:
            raise ValueError(f"there is no tensor {name!r}")
        if not 0 <= start <= start + size_bytes <= spec.size_bytes:
            raise ValueError(
                f"tensor {name!r} has {spec.size_bytes} bytes, not {start} + {size_bytes}"
            )
        if name in self._unreadable:
            message = f"SGLang keeps no plain copy of {name!r}: it cannot be read back"
            raise EngineFailed(Problem("unsupported", message, "not_started", field="names"))
        row_bytes = self._row_bytes(name)
        first = start // row_bytes if row_bytes else 0
        stop = -(-(start + size_bytes) // row_bytes) if row_bytes else 0
        return _Piece(TensorRows(name, first, stop - first, offset), start - first * row_bytes)

    def _row_bytes(self, name: str) -> int:
        spec = self._specs[name]
        return prod(spec.shape[1:]) * DTYPES[spec.dtype].size_bytes

    def _room(self, size_bytes: int) -> str:
        """A file for answers of this size; its content is `_answers`."""
        if len(self._answers) < size_bytes:
            self._answers = shared_buffer(size_bytes)
        place = Whereabouts().of(self._answers[:1])
        assert place is not None, "it was mapped for this"
        return place.path


def _spec(tensor: CheckpointTensor, dtype: str) -> TensorSpec:
    return TensorSpec(
        tensor.name, dtype, tensor.shape, prod(tensor.shape) * DTYPES[dtype].size_bytes
    )


def _copied(tensors: Mapping[str, RawTensor], memory: Bytes) -> dict[str, Bytes]:
    """The same bytes, one after another in `memory`."""
    found: dict[str, Bytes] = {}
    start = 0
    for name, raw in tensors.items():
        into = memory[start : start + raw.nbytes]
        into[:] = raw if isinstance(raw, np.ndarray) else raw.cpu().numpy()
        found[name] = into
        start += _aligned(raw.nbytes)
    return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _failed(version: int, why: str) -> Problem:
    return Problem("update_failed", f"version {version}: {why}"[:500], "failed")
