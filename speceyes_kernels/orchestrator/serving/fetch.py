"""Pictures by https, from public addresses only: what a client names must not reach what only the server can."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urljoin, urlsplit

import anyio
import httpx

from ..settings import ServeSettings

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_PORT, _REDIRECTS, _AT_ONCE = 443, 3, 4
#: Ranges that carry an IPv4 address inside an IPv6 one, and where in it.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class FetchError(Exception):
    """A picture that is not to be had, or not allowed."""


async def resolve(host: str, port: int) -> list[str]:
    """The system's addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def is_public(address: str) -> bool:
    """Whether anybody on the internet could reach it; IPv4 addresses inside IPv6 ones are judged by themselves."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(v4 is not None and not is_public(str(v4)) for v4 in inner):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return ip.is_global and not ip.is_multicast


class Fetcher:
    """Gets pictures. Each host is resolved once, all its addresses must be public, and the connection goes to the one that
    was checked: a name that answers differently the second time gains nothing. Redirects are checked anew.

    Parameters
    ----------
    settings : ServeSettings
    resolver : callable, optional
    transport : optional
        Of httpx, instead of real connections.
    """

    def __init__(
        self, settings: ServeSettings, *, resolver: Resolve = resolve, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.settings, self._resolve = settings, resolver
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._transport = transport

    async def get(self, urls: Sequence[str]) -> dict[str, bytes]:
        """The pictures' bytes by URL.

        Raises
        ------
        FetchError
            The first that fails, in words that begin with its URL.
        """
        unique = list(dict.fromkeys(urls))
        tasks = [asyncio.ensure_future(self._one(url)) for url in unique]
        try:
            return dict(zip(unique, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, url: str) -> bytes:
        async with self._slots:
            try:
                with anyio.fail_after(self.settings.fetch_timeout):
                    return await self._follow(url)
            except TimeoutError:
                raise FetchError(f"{_short(url)}: not there within {self.settings.fetch_timeout:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
                raise FetchError(f"{_short(url)}: cannot be fetched: {type(error).__name__}") from None

    async def _follow(self, url: str) -> bytes:
        at = url
        for _ in range(_REDIRECTS + 1):
            host, address, target = await self._checked(at, url)
            # No proxy, no cookies, nobody's credentials: a request of nobody in particular.
            async with httpx.AsyncClient(transport=self._transport, trust_env=False, timeout=None) as client:
                request = client.build_request(
                    "GET", f"https://{address}{target}", headers={"Host": host, "Accept": "image/*"},
                    extensions={"sni_hostname": host},
                )  # fmt: skip
                response = await client.send(request, stream=True, follow_redirects=False)
                try:
                    if response.is_redirect:
                        at = urljoin(at, response.headers.get("location", ""))
                        continue
                    if response.status_code != 200:
                        raise FetchError(f"{_short(url)}: expected status 200, got {response.status_code}")
                    return await self._read(response, url)
                finally:
                    await response.aclose()
        raise FetchError(f"{_short(url)}: expected at most {_REDIRECTS} redirects, got more")

    async def _checked(self, at: str, url: str) -> tuple[str, str, str]:
        """Host, the address to connect to (in brackets where it is IPv6), path and query."""
        try:
            parts = urlsplit(at)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise FetchError(f"{_short(url)}: not a URL") from None
        if parts.scheme != "https" or not host or parts.username is not None or port not in (None, _PORT):
            raise FetchError(f"{_short(url)}: expected https://host/..., without a user and another port")
        addresses = await self._resolve(host, _PORT)
        if not addresses or not all(map(is_public, addresses)):
            raise FetchError(f"{_short(url)}: expected a host with public addresses only")
        target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        address = addresses[0]
        return host, f"[{address}]" if ":" in address else address, target if target.startswith("/") else f"/{target}"

    async def _read(self, response: httpx.Response, url: str) -> bytes:
        limit = self.settings.max_image_bytes
        parts, size = [], 0
        async for part in response.aiter_bytes():  # decompressed: the limit is of what is kept
            size += len(part)
            if size > limit:
                raise FetchError(f"{_short(url)}: expected at most {limit} bytes, got more")
            parts.append(part)
        return b"".join(parts)


def _short(url: str) -> str:
    return url if len(url) <= 80 else url[:77] + "..."
