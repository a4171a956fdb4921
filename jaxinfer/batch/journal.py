"""The output file of a batch job: append-only, in input order, each record exactly once whatever happens.

Record i of the output answers line i of the input that is not blank, so the number of whole records says where to go
on. Beside the output lies OUTPUT.job with what began it (digest of the input, model, parameters); a job that differs is
refused. Each record is one write, so kill -9 loses none that was written, and cuts at most the last, which is taken off
when the job goes on. The file is flushed to the disk every FSYNC_SECONDS and at the end: a power cut loses that much.

Knows: files. Does not know what a record means, except that its `error` says whether it failed.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from jaxinfer.errors import RequestError

FSYNC_SECONDS = 5.0


class Sink(Protocol):
    """Where records go, in order; `done` of them, `failed` among those, were there before."""

    done: int
    failed: int

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        ...

    def close(self) -> None:
        """Write no more."""
        ...


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of JSON, in readable UTF-8 where that exists (an id may hold half a surrogate pair)."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


class Pipe:
    """Records to an open stream, such as standard output: nothing to go on from."""

    def __init__(self, stream: BinaryIO) -> None:
        self.done = self.failed = 0
        self._stream = stream

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and flush it."""
        self._stream.write(encode(record))
        self._stream.flush()

    def close(self) -> None:
        """The stream belongs to somebody else and stays open."""


class Journal:
    """Records to a file, which this process locks."""

    def __init__(self, file: BinaryIO, done: int, failed: int) -> None:
        self.done, self.failed = done, failed
        self._file = file
        self._synced = time.monotonic()

    @classmethod
    def open(cls, path: Path, job: Mapping[str, Any], *, overwrite: bool = False) -> Self:
        """Begin `path` for `job`, or go on with it where it was begun by an equal job.

        Raises RequestError where the file belongs to another job, to none, or to a process that is running.
        """
        if path.exists() and not path.is_file():
            raise RequestError(
                f"{path} is no regular file, so a job cannot go on in it; choose a file, or - for a pipe"
            )
        begun_by = begun_by_path(path)
        file = open(path, "ab+", buffering=0)  # noqa: SIM115 (the journal closes it)
        try:
            _lock(file, path)
            if overwrite:
                file.truncate(0)
            elif os.fstat(file.fileno()).st_size:  # while it is empty, nothing would be mixed or lost
                _check_same_job(path, begun_by, job)
            _write_whole(begun_by, json.dumps(job, indent=1).encode())
            return cls(file, *_repair(file))
        except BaseException:
            file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record in one go; now and then see to it that it is on the disk."""
        data = memoryview(encode(record))
        while data:
            data = data[self._file.write(data) :]
        if time.monotonic() - self._synced > FSYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Flush to the disk and unlock."""
        os.fsync(self._file.fileno())
        self._file.close()


def begun_by_path(path: Path) -> Path:
    """Where the journal of `path` remembers what began it."""
    return path.with_name(path.name + ".job")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(
            f"{path} is being written by another batch job; wait for it or choose another file"
        ) from None


def _check_same_job(path: Path, begun_by: Path, job: Mapping[str, Any]) -> None:
    advice = "choose another output, or --overwrite it"
    if not begun_by.exists():
        raise RequestError(f"{path} exists and no batch job of ours began it; {advice}")
    try:
        before = json.loads(begun_by.read_bytes())
    except (ValueError, RecursionError):
        before = None
    if not isinstance(before, dict):
        raise RequestError(f"{begun_by} is damaged, so the job cannot go on; {advice}") from None
    changed = [name for name in job if before.get(name) != job[name]]
    if changed:
        raise RequestError(f"{path} was begun with another {' and '.join(changed)}, so it cannot go on; {advice}")


def _write_whole(path: Path, data: bytes) -> None:
    """Replace the file's content so that a crash leaves the old one or the new one."""
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _repair(file: BinaryIO) -> tuple[int, int]:
    """Cut the file behind its last whole record; how many records stay, and how many of those are errors."""
    done = failed = end = 0
    with open(file.fileno(), "rb", closefd=False) as reader:
        reader.seek(0)
        for line in reader:
            record = _whole_record(line)
            if record is None:
                break
            done += 1
            failed += record.get("error") is not None
            end += len(line)
    file.truncate(end)
    return done, failed


def _whole_record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # a power cut can leave blocks of zeros behind
        return None
    return record if isinstance(record, dict) else None
