"""Has pictures decoded by processes that may die: decoders are native code, and read bytes from anywhere."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from baton.pictures.process import LENGTHS
from baton.pictures.settings import PictureError, PictureSettings

COMMAND = (sys.executable, "-P", "-m", "baton.pictures.process")
DECODE_SECONDS = 20.0
"""The longest that one picture may take, from when its turn has come."""
WAIT_SECONDS = 30.0
"""The longest that it may wait for its turn."""
DIGEST_BYTES = 32


class PictureBusy(Exception):
    """Too many pictures are being decoded. One line."""


@dataclass(frozen=True, slots=True)
class Picture:
    digest: bytes
    """32 bytes: SHA-256 of the decoded pixels and of the settings."""
    pixels: npt.NDArray[np.uint8]
    """Resized, [height, width, 3]."""


class PictureDecoder:
    """Thread-safe. Processes start when they are first needed."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        width: int = 2,
        command: Sequence[str] = COMMAND,
        seconds: float = DECODE_SECONDS,
    ) -> None:
        """`width`: pictures that are decoded at a time."""
        self._settings = json.dumps(asdict(settings)).encode()
        self._command, self._seconds = command, seconds
        self._free: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        for _ in range(width):
            self._free.put(None)
        self._closed = False

    def decode(self, data: bytes) -> Picture:
        """Blocks. Raises PictureError, or PictureBusy."""
        try:
            process = self._free.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise PictureBusy("too many pictures are being decoded: send it again later") from None
        try:
            if process is None or process.poll() is not None:
                process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            return self._ask(process, data)
        except OSError as error:
            raise PictureBusy(f"no process for pictures can be started: {error.strerror}") from error
        finally:
            self._free.put(process)
            if self._closed and process is not None:
                process.kill()

    def _ask(self, process: subprocess.Popen[bytes], data: bytes) -> Picture:
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._seconds, end)
        timer.start()
        try:
            process.stdin.write(LENGTHS.pack(len(self._settings), len(data)) + self._settings)
            process.stdin.write(data)
            process.stdin.flush()
            done = process.stdout.read(1)
            lengths = process.stdout.read(LENGTHS.size)
            said, made = (process.stdout.read(length) for length in LENGTHS.unpack(lengths))
            answer = json.loads(said)
            if done == b"\x01":
                high, wide = answer["size"]
                pixels = np.frombuffer(made, np.uint8, offset=DIGEST_BYTES).reshape(high, wide, 3)
                return Picture(made[:DIGEST_BYTES], pixels)
        except PictureError:
            raise
        except Exception as error:  # the process has ended, or has said nonsense
            process.kill()
            process.wait()
            why = f"took longer than {self._seconds:g} s" if late.is_set() else "made its decoder end"
            raise PictureError(why) from error
        finally:
            timer.cancel()
        raise PictureError(answer["error"])

    def close(self) -> None:
        """Ends the processes that are free; others end when they are."""
        self._closed = True
        while True:
            try:
                process = self._free.get_nowait()
            except queue.Empty:
                return
            if process is not None:
                process.kill()
                process.wait()
