"""Checks the TLS certificate and key of the server before anything is started."""

from __future__ import annotations

import os
import ssl

from chorale.config.engine import ServerConfig
from chorale.errors import ConfigError


def check_tls(config: ServerConfig) -> None:
    """Loads the certificate, its key and the CA bundle. Raises ``ConfigError`` with the file names."""
    if config.ssl_certfile is None:
        return
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
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        password = os.environ.get(variable) if variable else None
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # includes ssl.SSLError
        given = " ".join(f"{flag} {path}" for flag, path in named.items() if path)
        raise ConfigError(f"{given}: cannot be loaded as PEM files ({error})") from None
