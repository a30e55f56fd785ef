"""An append-only file of records that survives being cut off anywhere.

    magic | length, CRC-32, frame | length, CRC-32, frame | …

Numbers are 32-bit little-endian; a frame is a record or map in the codec of `dapo_async.codec`.
An append is one write, so a killed process loses nothing that `append` returned from, and leaves at
most one torn frame at the end. Readers stop before a torn end; reopening cuts it off. Damage
anywhere else is an error: history is never dropped silently.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dapo_async.codec import MAX_FRAME_BYTES, MalformedFrame, decode, decode_any, encode

__all__ = ["Journal", "MalformedFrame", "decode", "decode_any", "encode", "read_journal"]

MAGIC = b"dapo-async journal 1\n"
_HEADER = struct.Struct("<II")


class Journal:
    """The writing end. One process has a journal open for writing.

    Raises:
        MalformedFrame: the file is there and not a journal, or is damaged before its end.
        OSError: it can't be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            self._repair()
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Any, durable: bool = False) -> None:
        """Add a record of `dapo_async.types` or a map with text keys.

        With `durable` it survives a power cut too, not only the death of the process.

        Raises:
            ValueError: the record can't be encoded; names the field.
            OSError: it could not be written (disk full …); the file is as before.
        """
        frame = encode(record)
        self._write(_HEADER.pack(len(frame), zlib.crc32(frame)) + frame)
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair(self) -> None:
        """Cut off a torn end, or start an empty file."""
        self._file.seek(0)
        self._end = 0
        for end, _ in _frames(self._file, self.path):
            self._end = end
        self._file.truncate(self._end)
        if self._end == 0:
            self._write(MAGIC)

    def _write(self, data: bytes) -> None:
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(f"{self.path}: {written} of {len(data)} bytes written; disk full?")
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)


def read_journal(path: str | Path) -> Iterator[Any]:
    """The records and maps of a journal, oldest first, up to a torn end if there is one.

    Raises:
        MalformedFrame: not a journal, or damaged before its end; what comes before is yielded.
        OSError: the file can't be read.
    """
    with open(path, "rb") as file:
        for end, frame in _frames(file, Path(path)):
            if frame is None:
                continue
            try:
                yield decode_any(frame)
            except MalformedFrame as error:
                raise MalformedFrame(f"{path}, record before byte {end}: {error}") from None


def _frames(file: BinaryIO | Any, path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(end, frame) of every whole frame; the magic counts as the first, with frame None."""
    size = os.fstat(file.fileno()).st_size
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if size >= len(MAGIC) or not MAGIC.startswith(magic):
            raise MalformedFrame(f"{path} is not a journal")
        return  # the process died while it made the file
    end = len(MAGIC)
    yield end, None
    while size - end >= _HEADER.size:
        length, crc32 = _HEADER.unpack(file.read(_HEADER.size))
        after = end + _HEADER.size + length
        if after > size:
            return
        if length > MAX_FRAME_BYTES:
            raise MalformedFrame(f"{path} is damaged at byte {end}: a frame of {length} bytes")
        frame = file.read(length)
        if zlib.crc32(frame) != crc32:
            if after == size:
                return
            raise MalformedFrame(f"{path} is damaged at byte {end}: checksum differs")
        end = after
        yield end, frame
