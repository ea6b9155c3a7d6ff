"""Pictures by https: public addresses only, the address that was checked, redirects, limits."""

from __future__ import annotations

import asyncio
import base64

import httpx
import pytest
from funnel_cases import engines
from serving_cases import QUICK, data_url, serving

from speceyes_kernels.orchestrator.serving.fetch import Fetcher, is_public
from speceyes_kernels.orchestrator.settings import ServeSettings

PUBLIC = "93.184.216.34"


def picture_of(state, hosts, answers, **settings):
    """A server's fetcher whose names resolve by ``hosts`` and whose connections are answered by ``answers``; what it asked."""
    asked = []

    async def resolver(host, port):
        found = hosts[host]
        return found.pop(0) if found and isinstance(found[0], list) else found

    def answer(request):
        asked.append(
            (str(request.url), request.headers["host"], request.extensions["sni_hostname"], dict(request.headers))
        )
        return answers(request)

    state.fetcher = Fetcher(
        ServeSettings(fetch=True, **settings), resolver=resolver, transport=httpx.MockTransport(answer)
    )
    return asked


def with_picture(url):
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": url}]}
        ]
    }


def png(request):
    return httpx.Response(200, content=base64.b64decode(data_url().partition(",")[2]))


def test_pictures_by_https_come_from_the_address_that_was_checked():
    async def main():
        pair = engines(**QUICK)
        async with serving(pair, {"fetch": True}) as (client, state):
            # A name that is private when it is asked a second time.
            asked = picture_of(state, {"a.example": [[PUBLIC], ["127.0.0.1"]]}, png)
            response = await client.post("/v1/chat/completions", json=with_picture("https://a.example/b.png?c=d#e"))
            assert response.status_code == 200
            ((url, host, sni, headers),) = asked
            assert url == f"https://{PUBLIC}/b.png?c=d" and host == sni == "a.example"
            assert not {"cookie", "authorization"} & set(headers)
        assert [p.size for p in pair[1].calls[0].request.turns[-1].pictures] == [(4, 3)]

    asyncio.run(main())


def redirect(to):
    return lambda request: (
        httpx.Response(302, headers={"location": to}) if "/first" in str(request.url) else png(request)
    )


@pytest.mark.parametrize(
    ("url", "answers", "words"),
    [
        ("http://a.example/x.png", png, "an https URL"),
        ("ftp://a.example/x.png", png, "an https URL"),
        ("https://user@a.example/x.png", png, "without a user"),
        ("https://a.example:8443/x.png", png, "another port"),
        ("https://inside.example/x.png", png, "public addresses only"),
        ("https://both.example/x.png", png, "public addresses only"),
        ("https://nobody.example/x.png", png, "public addresses only"),
        ("https://[::1]/x.png", png, "public addresses only"),
        ("https://a.example/first", redirect("https://inside.example/x"), "public addresses only"),
        ("https://a.example/first", redirect("http://a.example/x"), "expected https"),
        ("https://a.example/first", redirect("//inside.example/x"), "public addresses only"),
        ("https://a.example/first", redirect("/first"), "at most 3 redirects"),
        ("https://a.example/x.png", lambda r: httpx.Response(404), "status 200, got 404"),
        ("https://a.example/x.png", lambda r: httpx.Response(200, content=b"x" * 2000), "at most 1000 bytes"),
        ("https://a.example/x.png", lambda r: httpx.Response(200, content=b"no picture"), "not an image"),
        (
            "https://a.example/x.png",
            lambda r: (_ for _ in ()).throw(httpx.ConnectError("refused by 10.0.0.1")),
            "cannot be fetched",
        ),
    ],
)
def test_what_is_not_fetched(url, answers, words):
    async def main():
        async with serving(serve={"fetch": True, "max_image_bytes": 1000}) as (client, state):
            hosts = {"a.example": [PUBLIC], "inside.example": ["10.0.0.1"], "both.example": [PUBLIC, "169.254.169.254"],
                     "nobody.example": [], "::1": ["::1"]}  # fmt: skip
            asked = picture_of(state, hosts, answers, max_image_bytes=1000)
            response = await client.post("/v1/chat/completions", json=with_picture(url))
            told = response.json()["error"]
            assert response.status_code == 400 and words in told["message"], told
            assert told["param"] == "messages.0.content.1.image_url"
            assert "10.0.0.1" not in told["message"]  # nothing is told about the server's own network
            assert all(PUBLIC in address for address, *_ in asked)

    asyncio.run(main())


def test_a_redirect_within_the_rules_is_followed():
    async def main():
        async with serving(serve={"fetch": True}) as (client, state):
            hosts = {"a.example": [PUBLIC], "b.example": ["2606:2800:220:1::1"]}
            asked = picture_of(state, hosts, redirect("https://b.example/x.png"))
            response = await client.post("/v1/chat/completions", json=with_picture("https://a.example/first"))
            assert response.status_code == 200
            assert [url for url, *_ in asked] == [f"https://{PUBLIC}/first", "https://[2606:2800:220:1::1]/x.png"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True), ("64:ff9b::808:808", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.0.1", False), ("100.64.0.1", False),
        ("169.254.169.254", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::", False),
        ("::1", False), ("fe80::1", False), ("fc00::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("2002:a9fe:a9fe::", False),
        ("fd00:ec2::254", False), ("localhost", False), ("", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address, public):
    assert is_public(address) is public
