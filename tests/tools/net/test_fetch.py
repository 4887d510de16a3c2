"""Fetches: what is refused before a socket is opened, at each redirect, and while a body arrives."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
from collections.abc import Sequence

import pytest

from chorale.tools.errors import ToolError
from chorale.tools.net.addresses import AddressPolicy, is_public
from chorale.tools.net.fetch import BoundedBody, Fetched, Fetcher, FetchLimits
from chorale.tools.net.urls import in_domains, parse_url
from tests.support.tools.local_http import Handler, answer, serve

PRIVATE = [
    "0.0.0.0", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.1.2.3",
    "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192",
    "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1",
    "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "::127.0.0.1",
    "::10.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.1.2.3", "fe80::1",
    "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::", "2001::1", "2001:db8::1",
    "100::1", "3fff::1", "5f00::1", "4000::1",
]  # fmt: skip
PUBLIC = [
    "1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8",
    "2002:808:808::1",
]  # fmt: skip

BAD_URLS = [
    "file:///etc/passwd", "ftp://example.org/", "gopher://127.0.0.1:70/_x", "data:text/html,hi",
    "javascript:1",
    "//example.org/", "example.org", "http://", "http:///path", "http://user:pw@example.org/",
    "http://example.org@127.0.0.1/", "http://127.0.0.1\\@example.org/", "http://exam ple.org/", "http://a\r\nb/",
    "http://example.org:0/", "http://example.org:99999/", "http://[::1/", "http://example.org/\x00",
    "h" * 9000,
    "dict://127.0.0.1:11211/", "ldap://localhost/", "unix:/var/run/docker.sock", "http://\x7f/",
]  # fmt: skip
# Notations of addresses that must not be reached, judged after the system's own resolver read them.
DISGUISED = [
    "127.0.0.1", "127.1", "0177.0.0.1", "0x7f.0.0.1", "0x7f000001", "2130706433", "017700000001", "0",
    "0.0.0.0", "localhost", "LOCALHOST", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[0:0:0:0:0:0:0:1]", "127.0.0.1.", "169.254.169.254", "[fe80::1]", "10.0.0.1", "192.168.1.1",
    "172.16.0.1", "100.64.1.1", "0xa9fea9fe", "2852039166", "[64:ff9b::7f00:1]", "224.0.0.1",
    "255.255.255.255", "１２７.0.0.1", "127。0。0。1", "⑫7.0.0.1",
]  # fmt: skip


BOMB = gzip.compress(bytes(10_000_000))


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_are_refused(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert not AddressPolicy().allows(text)
    assert AddressPolicy(allow_private=True).allows(text)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_not(text: str) -> None:
    assert AddressPolicy().allows(text)


@pytest.mark.parametrize("url", BAD_URLS)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ToolError):
        parse_url(url)


def test_domains_include_their_subdomains() -> None:
    assert in_domains("docs.python.org", ("python.org",))
    assert in_domains("python.org", ("Python.org.",))
    assert not in_domains("evilpython.org", ("python.org",))
    assert in_domains("anything", ())
    for domain in ("münchen.de", "MÜNCHEN.de", "xn--mnchen-3ya.de"):
        for host in ("xn--mnchen-3ya.de", "www.münchen.de", "www.xn--mnchen-3ya.de"):
            assert in_domains(parse_url(f"http://{host}/").host, (domain,))
    assert not in_domains("munchen.de", ("münchen.de",))
    assert not in_domains("e.org", ("é.org/e.org",))


class Outside(AddressPolicy):
    """Of the loopback addresses, only the first is public."""

    def allows(self, text: str) -> bool:
        return text == "127.0.0.1"


@pytest.mark.parametrize("host", DISGUISED)
async def test_disguised_addresses_are_not_connected_to(host: str) -> None:
    touched: list[str] = []

    async def handler(writer: asyncio.StreamWriter, head: bytes) -> None:
        touched.append(head.decode())

    async with serve({"/": handler}) as port:
        fetcher = Fetcher(AddressPolicy(), FetchLimits(seconds=3))
        with pytest.raises(ToolError):
            await fetcher.get(f"http://{host}:{port}/")
        await fetcher.aclose()
    assert touched == []


class Names:
    """A resolver that answers from a script, the last answer again and again."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def get(
    routes: dict[str, Handler],
    path: str = "/",
    *,
    limits: FetchLimits | None = None,
    **domains: tuple[str, ...],
) -> Fetched:
    """Fetch from the local server with private addresses allowed."""
    async with serve(routes) as port:
        fetcher = Fetcher(AddressPolicy(allow_private=True), limits or FetchLimits(seconds=5))
        try:
            return await fetcher.get(f"http://127.0.0.1:{port}{path}", **domains)
        finally:
            await fetcher.aclose()


async def test_a_rebinding_name_is_resolved_once_and_its_first_answer_used() -> None:
    """The second answer would be the attack: nothing asks for it within a request."""

    async with serve({"/": answer(body=b"secret")}) as port:
        names = Names(["93.184.216.34"], ["127.0.0.1"])
        fetcher = Fetcher(AddressPolicy(), FetchLimits(seconds=0.3), resolve=names)
        with pytest.raises(ToolError, match=r"in time|within|could not be reached"):
            await fetcher.get(f"http://rebind.example:{port}/")
        assert names.num_asked == 1
        with pytest.raises(ToolError, match="not a public address"):
            await fetcher.get(f"http://rebind.example:{port}/")
        await fetcher.aclose()


async def test_only_the_public_address_of_a_host_is_used() -> None:
    async with serve({"/": answer(body=b"public")}) as port:
        touched: list[object] = []
        private = await asyncio.start_server(lambda *ends: touched.append(ends), "127.0.0.2", port)
        fetcher = Fetcher(Outside(), FetchLimits(seconds=5), resolve=Names(["127.0.0.2", "127.0.0.1"]))
        assert (await fetcher.get(f"http://mixed.example:{port}/")).body == b"public"
        assert touched == []
        await fetcher.aclose()
        private.close()


async def test_redirects_are_followed_to_the_page() -> None:
    routes = {
        "/": answer("302 Found", location="/b"),
        "/b": answer("301 Moved", location="c?x=1"),
        "/c": answer(body=b"here", content_type='Text/HTML; charset="UTF-8"'),
    }
    fetched = await get(routes)
    assert fetched.body == b"here"
    assert fetched.content_type == "text/html"
    assert fetched.charset == "utf-8"
    assert fetched.url.endswith("/c?x=1")


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "http://u:p@127.0.0.1/", "http:\\\\127.0.0.1/", "ftp://127.0.0.1/", "http://"],
)
async def test_redirect_targets_follow_the_url_rules(location: str) -> None:
    with pytest.raises(ToolError):
        await get({"/": answer("302 Found", location=location)})


async def test_a_redirect_to_a_private_address_is_refused() -> None:
    """The first host is judged public by a scripted resolver; its redirect goes to loopback by name."""

    touched: list[bytes] = []

    async def secret(writer: asyncio.StreamWriter, head: bytes) -> None:
        touched.append(head)

    async with (
        serve({"/secret": secret}) as port,
        serve({"/": answer("302 Found", location=f"http://inside.example:{port}/secret")}) as first,
    ):

        async def resolve(host: str, _port: int) -> Sequence[str]:
            return ["127.0.0.1"] if host == "outside.example" else ["127.0.0.2"]

        fetcher = Fetcher(Outside(), FetchLimits(seconds=3), resolve=resolve)
        with pytest.raises(ToolError, match=r"inside\.example is not a public address"):
            await fetcher.get(f"http://outside.example:{first}/")
        await fetcher.aclose()
    assert touched == []


@pytest.mark.parametrize(
    ("header", "kind", "charset"),
    [
        ("text/html", "text/html", None),
        ("TEXT/Plain ; Charset = x; charset='Latin-1' ; a=b", "text/plain", "latin-1"),
        ("; charset=", "", None),
    ],
)
async def test_content_type_and_charset_are_parsed(header: str, kind: str, charset: str | None) -> None:
    fetched = await get({"/": answer(body=b"x", content_type=header)})
    assert (fetched.content_type, fetched.charset) == (kind, charset)


async def test_a_redirect_out_of_the_allowed_domains_is_refused() -> None:
    routes = {"/": answer("302 Found", location="http://other.example/")}
    with pytest.raises(ToolError, match="outside the allowed domains"):
        await get(routes, domains=("127.0.0.1",))


async def test_five_redirects_are_followed_and_six_are_not() -> None:
    routes = {f"/{number}": answer("302 Found", location=f"/{number + 1}") for number in range(6)}
    assert (await get({**routes, "/5": answer(body=b"here")}, "/0")).body == b"here"
    with pytest.raises(ToolError, match="more than 5 redirects"):
        await get({**routes, "/6": answer(body=b"here")}, "/0")


async def test_a_slow_body_is_cut_off() -> None:
    async def drip(writer: asyncio.StreamWriter, _head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    with pytest.raises(ToolError, match=r"within 0\.4 s"):
        await get({"/": drip}, limits=FetchLimits(seconds=0.4))


@pytest.mark.parametrize(
    ("body", "encoding", "max_bytes", "reason"),
    [
        (BOMB, "gzip", 2**30, "expands too much"),
        (BOMB, "gzip", 2**20, "larger than"),
        (b"not gzip at all", "gzip", 2**20, "damaged"),
        (b"x", "br", 2**20, "not requested"),
        (b"x" * 2000, "identity", 1000, "larger than 1000 bytes"),
    ],
    ids=["ratio", "bomb", "damaged", "encoding", "size"],
)
async def test_bad_bodies_are_refused(body: bytes, encoding: str, max_bytes: int, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        await get({"/": answer(body=body, content_encoding=encoding)}, limits=FetchLimits(5, max_bytes))


async def test_a_compressed_body_is_decompressed() -> None:
    page = b"hello " * 1000
    assert (await get({"/": answer(body=gzip.compress(page), content_encoding="gzip")})).body == page


def test_a_decompression_bomb_is_stopped_early() -> None:
    body = BoundedBody("gzip", 1000)
    with pytest.raises(ToolError, match="larger"):
        body.feed(BOMB)
    assert sum(map(len, body._parts)) <= 1000


async def test_a_closed_port_raises_a_tool_error() -> None:
    fetcher = Fetcher(AddressPolicy(allow_private=True), FetchLimits(seconds=2))
    with pytest.raises(ToolError, match="could not be reached"):
        await fetcher.get("http://127.0.0.1:1/")
    await fetcher.aclose()
