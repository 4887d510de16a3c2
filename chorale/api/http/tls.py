"""The certificate of the server and its key, judged before anything is started."""

from __future__ import annotations

import os
import ssl

from chorale.config import ServerConfig
from chorale.errors import ConfigError


def check_tls(config: ServerConfig) -> None:
    """Read the certificate, its key and the authorities. Raises ``ConfigError`` that names the files."""
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
            with open(path, "rb"):  # OpenSSL's own error does not say which of them it is
                pass
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        password = os.environ.get(variable) if variable else None
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is one
        given = " ".join(f"{flag} {path}" for flag, path in named.items() if path)
        raise ConfigError(f"{given}: {error}") from None
