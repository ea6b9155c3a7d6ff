"""One isolated process from the host's side: code in, frames out, no byte of them believed before it is checked."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio
import anyio.abc

from .isolate import EXIT_CPU, EXIT_HOST_GONE, EXIT_REFUSED, EXIT_TIME

_MAX_RESULT = 65536


@dataclass(frozen=True)
class Limits:
    """What sandboxed code may use.

    Attributes
    ----------
    wall_s : float
        Seconds of one call, its pictures' way in and out included; the start of the process is not.
    cpu_s : int
        Seconds of CPU time of a session.
    session_s : float
        Seconds that a session may stay open.
    memory_bytes : int
        Address space.
    threads : int
        Threads; another process is never allowed.
    folder_bytes, files : int
        Size of the sandbox's own folder (held in memory) and of one file, and number of its files.
    descriptors : int
        Open files.
    output_bytes : int
        Printed text of one call; at one byte more the session is killed.
    pictures, pixels : int
        Pictures that a call returns, and pixels of each.
    """

    wall_s: float = 10.0
    cpu_s: int = 20
    session_s: float = 600.0
    memory_bytes: int = 2 << 30
    threads: int = 16
    folder_bytes: int = 512 << 20
    files: int = 1024
    descriptors: int = 64
    output_bytes: int = 1 << 20
    pictures: int = 4
    pixels: int = 64_000_000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} is {value!r}; expected a number above 0")


@dataclass(frozen=True)
class Pixels:
    """A picture as raw RGB.

    Attributes
    ----------
    width, height : int
    rgb : bytes
        ``width * height * 3`` bytes, row by row.
    """

    width: int
    height: int
    rgb: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1 or len(self.rgb) != self.width * self.height * 3:
            raise ValueError(f"{len(self.rgb)} bytes for {self.width} x {self.height} RGB pixels")


@dataclass(frozen=True)
class Output:
    """What a call gave.

    Attributes
    ----------
    text : str
        What it printed.
    pictures : tuple of Pixels
        Picture files that it wrote, oldest first.
    error : str or None
        Its traceback, or why it was ended.
    ended : bool
        Whether the session is over, its variables gone.
    """

    text: str
    pictures: tuple[Pixels, ...] = ()
    error: str | None = None
    ended: bool = False


class Ended(Exception):
    """The session cannot go on; the message says why."""


class Session:
    """One isolated process; variables stay from call to call. From `Sandbox.open`; close it with `aclose`."""

    def __init__(self, process: anyio.abc.Process, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._text = bytearray()
        self._pictures: list[Pixels] = []
        self._buffer = bytearray()
        self._over = False

    async def run(
        self, code: str, pictures: Mapping[str, Pixels] | None = None, names: Mapping[str, str] | None = None
    ) -> Output:
        """Run code; never raises for what the code does.

        Parameters
        ----------
        code : str
        pictures : mapping of str to Pixels, optional
            Pictures to put into its folder, by file name.
        names : mapping of str to str, optional
            Variables to set first.

        Returns
        -------
        Output
        """
        pictures = pictures or {}
        for name in pictures:
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"{name!r} is no file name")
        if self._over:
            return Output("", error="the session is over", ended=True)
        self._text, self._pictures = bytearray(), []
        error: str | None = f"ended: it ran longer than {self._limits.wall_s:g} s"
        finished = False
        try:
            with anyio.move_on_after(self._limits.wall_s):
                async with anyio.create_task_group() as group:
                    group.start_soon(self._send, code, pictures, dict(names or {}))
                    try:
                        said = (await self.result()).get("error")
                        error, finished = None if said is None else str(said), True
                    except Ended as end:
                        error = f"ended: {end}"
                    group.cancel_scope.cancel()
        finally:
            if not finished:
                await self.aclose()
        text = self._text.decode(errors="replace")
        return Output(text, tuple(self._pictures), error, self._over)

    async def aclose(self) -> None:
        """Kill the process and wait for its end."""
        self._over = True
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.aclose()

    async def _send(self, code: str, pictures: Mapping[str, Pixels], names: dict[str, str]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        request = json.dumps({"code": code, "pictures": list(pictures), "names": names}).encode()
        try:
            for picture in pictures.values():
                await stdin.send(b"P" + struct.pack("<III", len(picture.rgb) + 8, picture.width, picture.height))
                for start in range(0, len(picture.rgb), 1 << 20):
                    await stdin.send(picture.rgb[start : start + (1 << 20)])
            await stdin.send(b"C" + struct.pack("<I", len(request)) + request)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # its end is read from the other pipe, with the reason

    async def _read(self, size: int) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        while len(self._buffer) < size:
            try:
                self._buffer += await stdout.receive(1 << 18)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                raise Ended(self._why(await self._process.wait())) from None
        content = bytes(self._buffer[:size])
        del self._buffer[:size]
        return content

    async def result(self) -> dict[str, Any]:
        """Read frames to the result; no length or kind is believed before it is checked."""
        limits = self._limits
        while True:
            kind, size = struct.unpack("<cI", await self._read(5))
            if kind == b"O":
                if len(self._text) + size > limits.output_bytes:
                    if len(self._text) < limits.output_bytes:
                        self._text += await self._read(limits.output_bytes - len(self._text))
                    raise Ended(f"it printed more than {limits.output_bytes} bytes")
                self._text += await self._read(size)
            elif kind == b"P":
                self._pictures.append(await self._picture(size))
            elif kind in (b"R", b"X") and size <= _MAX_RESULT:
                try:
                    content = json.loads(await self._read(size))
                except (ValueError, RecursionError):
                    raise Ended("its reply is no JSON") from None
                if not isinstance(content, dict):
                    raise Ended("its reply is no JSON object")
                if kind == b"X":
                    raise Ended(str(content.get("reason"))[:2000])
                return content
            else:
                raise Ended(f"its reply holds a frame {kind!r} of {size} bytes")

    async def _picture(self, size: int) -> Pixels:
        if len(self._pictures) >= self._limits.pictures or not 8 < size <= 8 + 3 * self._limits.pixels:
            raise Ended(f"it returned more than {self._limits.pictures} pictures of {self._limits.pixels} pixels")
        width, height = struct.unpack("<II", await self._read(8))
        if width * height * 3 != size - 8:
            raise Ended(f"it returned {size - 8} bytes as a picture of {width} x {height}")
        return Pixels(width, height, await self._read(size - 8))

    def _why(self, status: int) -> str:
        known = {
            EXIT_CPU: f"it used more than {self._limits.cpu_s} s of CPU time",
            EXIT_TIME: f"the session was open longer than {self._limits.session_s:g} s",
            EXIT_HOST_GONE: "the host closed it",
            EXIT_REFUSED: "it could not be isolated",
            0: "it ended by itself",
        }
        if status in known:
            return known[status]
        return f"signal {status - 128} ended it" if 128 < status < 250 else f"it ended with status {status}"
