"""Checks the TLS files of the server before anything is started, and loads them again when they change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path

from chorale.config.engine import ServerConfig
from chorale.errors import ConfigError

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 10.0  # interval of looking at the files


def check_tls(config: ServerConfig) -> None:
    """Loads the certificate, its key and the CA bundle. Raises ``ConfigError`` with the file names."""
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, config)
    try:
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except ssl.SSLError:
        raise ConfigError(f"--ssl-ciphers {config.ssl_ciphers}: no such ciphers") from None


async def refresh_tls(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Loads changed files into ``context``, which new connections use, until cancelled.

    Files that do not fit together are logged and tried again after their next change. A CA that was removed
    from the bundle stays trusted until a restart, because OpenSSL can only add.
    """
    seen = _stamp(config)
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        found = _stamp(config)
        if found == seen:
            continue
        seen = found
        try:
            # With another context, so that this one never has half of a pair.
            await asyncio.to_thread(check_tls, config)
            _load(context, config)
        except ConfigError as error:
            logger.error("the changed TLS files are not used: %s", error)
        else:
            logger.info("the changed TLS files are in use")


def _stamp(config: ServerConfig) -> list[tuple[int, int, int] | None]:
    """Returns what changes if a file is written or replaced. None: the file is missing."""
    found: list[tuple[int, int, int] | None] = []
    for path in filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)):
        try:
            status = Path(path).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _load(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Raises ``ConfigError`` with the file names."""
    assert config.ssl_certfile is not None
    named = {
        "--ssl-certfile": config.ssl_certfile,
        "--ssl-keyfile": config.ssl_keyfile,
        "--ssl-ca-certs": config.ssl_ca_certs,
    }
    variable = config.ssl_keyfile_password_env
    try:
        for path in filter(None, named.values()):
            with open(path, "rb"):  # OpenSSL's error does not name the file
                pass
        password = os.environ.get(variable) if variable else None
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # includes ssl.SSLError
        given = " ".join(f"{flag} {path}" for flag, path in named.items() if path)
        raise ConfigError(f"{given}: cannot be loaded as PEM files ({error})") from None
