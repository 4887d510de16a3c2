"""URL parsing for checks, requests and redirects alike: two differing parsers would be a vulnerability."""

from __future__ import annotations

import re

import httpx2

from chorale.tools.errors import ToolError

MAX_URL_LEN = 8192
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")


def parse_url(text: str) -> httpx2.URL:
    """Parses an absolute http(s) URL without user information. Raises ``ToolError`` with the reason."""
    text = text.strip()
    if len(text) > MAX_URL_LEN:
        raise ToolError(f"the URL is longer than {MAX_URL_LEN} characters")
    if _FORBIDDEN.search(text):
        raise ToolError("the URL contains a space, a backslash or a control character")
    try:
        url = httpx2.URL(text)
        port = url.port
    except (httpx2.InvalidURL, ValueError, UnicodeError):
        raise ToolError("this is not a valid URL") from None
    if url.scheme not in ("http", "https"):
        raise ToolError(f"only http and https addresses can be opened, not {url.scheme or 'a bare name'!r}")
    if not url.host:
        raise ToolError("the URL has no host")
    if url.userinfo:
        raise ToolError("a URL with a user name or password is not allowed")
    if port is not None and not 0 < port < 65536:
        raise ToolError(f"{port} is not a valid port")
    return url


def join_url(base: httpx2.URL, location: str) -> httpx2.URL:
    """Resolves the target of a redirect or link by the same rules."""
    if _FORBIDDEN.search(location.strip()):
        raise ToolError("the target URL contains a space, a backslash or a control character")
    try:
        return parse_url(str(base.join(location.strip())))
    except (httpx2.InvalidURL, ValueError, UnicodeError):
        raise ToolError("the target is not a valid URL") from None


def domain_of(url: str) -> str:
    """Returns the host for display, empty if there is none."""
    try:
        return httpx2.URL(url).host
    except (httpx2.InvalidURL, ValueError, UnicodeError):
        return ""


def in_domains(host: str, domains: tuple[str, ...]) -> bool:
    """Returns whether ``host`` is in or below one of ``domains``; always True without domains."""
    lowered = _ascii(host.lower().rstrip("."))
    wanted = [_ascii(domain.lower().strip().strip(".")) for domain in domains]
    return not wanted or any(lowered == domain or lowered.endswith("." + domain) for domain in wanted)


def _ascii(host: str) -> str:
    """Converts an international name to its ASCII form ("xn--")."""
    if host.isascii():
        return host
    try:
        return httpx2.URL(scheme="http", host=host).raw_host.decode("ascii")
    except (httpx2.InvalidURL, ValueError, UnicodeError):
        return host
