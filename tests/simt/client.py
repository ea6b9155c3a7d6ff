"""Calls operations of a driver executable: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


class DeviceError(RuntimeError):
    """A kernel failed under the shim; the message is the shim's or the sanitizer's."""


@dataclass
class Buffer:
    """A kernel argument in global memory: input unless `output`, `shift` bytes off a 256-byte aligned address.

    A `guarded` input faults when it is read other than by a checked, counted load (``LDG`` and its kin).
    """

    name: str
    array: np.ndarray | None
    output: bool = False
    shift: int = 0
    guarded: bool = False


@dataclass(frozen=True)
class Count:
    """What a kernel read from one buffer: loads by threads, bytes, warp-wide requests, 32-byte sectors of those."""

    loads: int
    bytes: int
    requests: int
    sectors: int


class Device:
    """A running driver.

    Parameters
    ----------
    executable : Path
        From `simt.build.build`.
    seed : int
        Schedule; 0 runs threads in index order.
    workers : int
        OS threads over which blocks are spread.
    count : bool
        Keep byte counts (see `counts`).
    """

    def __init__(self, executable: Path, *, seed: int = 0, workers: int = 1, count: bool = False) -> None:
        command = [str(executable)]
        environment = dict(os.environ)
        if executable.name.startswith("tsan"):
            setarch = shutil.which("setarch")
            if setarch is None:
                raise RuntimeError("ThreadSanitizer needs a fixed address layout: setarch (util-linux) is missing")
            command = [setarch, "-R", *command]
        environment["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=0:exitcode=66"
        environment["UBSAN_OPTIONS"] = "print_stacktrace=1:exitcode=66"
        environment["TSAN_OPTIONS"] = "halt_on_error=1:exitcode=66:report_thread_leaks=0:report_signal_unsafe=0"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        self.counts: dict[tuple[str, str], Count] = {}
        self.options(seed=seed, workers=workers, count=count)

    def options(self, *, seed: int = 0, workers: int = 1, count: bool = False) -> None:
        """Sets the schedule and the counting of the calls to come."""
        self.call("simt.options", [seed, workers, count], [])

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the driver."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._log.close()

    def _died(self) -> DeviceError:
        code = self._process.wait()
        self._log.seek(0)
        return DeviceError(f"driver ended with code {code}\n{self._log.read().decode(errors='replace')[-20000:]}")

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise self._died()
        return data

    def call(self, op: str, scalars: Sequence[float], buffers: Sequence[Buffer]) -> list[np.ndarray]:
        """Runs one operation.

        Parameters
        ----------
        op : str
            Name the operation is registered under.
        scalars : sequence of float
            Its numbers, in its order.
        buffers : sequence of Buffer
            Its arrays, in its order; ``array=None`` passes a null pointer.

        Returns
        -------
        list of numpy.ndarray
            The output buffers after the call, in order (null ones left out).

        Raises
        ------
        DeviceError
            Any error that the shim, a sanitizer or the launcher reports.
        """
        assert self._process.stdin is not None
        name = op.encode()
        parts = [struct.pack("<II", 0x544D4953, len(name)), name, struct.pack("<I", len(scalars))]
        parts += [struct.pack("<d", float(s)) for s in scalars] + [struct.pack("<I", len(buffers))]
        payload = []
        for buffer in buffers:
            label = buffer.name.encode()
            data = None if buffer.array is None else np.ascontiguousarray(buffer.array)
            parts += [struct.pack("<I", len(label)), label]
            parts.append(
                struct.pack(
                    "<qII", -1 if data is None else data.nbytes, buffer.shift, buffer.output | buffer.guarded << 1
                )
            )
            if data is not None:
                payload.append(data.tobytes())
        try:
            self._process.stdin.write(b"".join(parts + payload))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        status, length = struct.unpack("<ii", self._read(8))
        text = self._read(length).decode()
        outputs = []
        for buffer in buffers:
            if buffer.output and buffer.array is not None:
                raw = self._read(buffer.array.nbytes)
                outputs.append(np.frombuffer(raw, buffer.array.dtype).reshape(buffer.array.shape).copy())
        if status:
            raise DeviceError(f"{op}: status {status}: {text}")
        self.counts = {}
        for line in text.splitlines():
            kernel, label, *numbers = line.split()
            self.counts[kernel, label] = Count(*map(int, numbers))
        return outputs
