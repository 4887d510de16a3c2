"""BatchService: the state that the endpoints of files and batches share in a server process."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from chorale.client.shares import Shares
from chorale.config.engine import ServerConfig
from chorale.errors import ConfigError
from chorale.jobs.contents import Contents, open_contents
from chorale.store.database.sqlite import MEMORY
from chorale.store.store import ResponseStore

logger = logging.getLogger(__name__)


_NO_STORE = "--batch-storage needs a persistent store: name a file with --response-store"
NONE = "none"  # value of --batch-storage that turns files and batches off


@dataclass(slots=True)
class BatchService:
    contents: Contents
    uploads: Shares = field(default_factory=Shares)  # uploads in progress
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # wakes the runner

    def wake(self) -> None:
        """Makes the runner look at the store now: a batch was created or cancelled by this process."""
        self.woken.set()


def open_service(config: ServerConfig, store: ResponseStore) -> BatchService | None:
    """Opens the storage of files. Returns None if files and batches are off. Blocks.

    Raises ``ConfigError`` if the storage that the operator named cannot be used.
    """
    location = _location(config, store)
    if location is None:
        return None
    try:
        contents = open_contents(location)
    except ConfigError as error:
        if config.batch_storage is not None:
            raise
        logger.warning("files and batches are off: %s", error)
        return None
    return BatchService(contents)


def check_batch_storage(config: ServerConfig) -> None:
    """Checks that the storage named by the operator can be used. Raises ``ConfigError``. Blocks."""
    if config.batch_storage not in (None, NONE):
        if config.response_store == MEMORY:
            raise ConfigError(_NO_STORE)
        open_contents(config.batch_storage)


def _location(config: ServerConfig, store: ResponseStore) -> str | None:
    if config.batch_storage == NONE:
        return None
    if store.path == MEMORY:
        if config.batch_storage is not None:
            raise ConfigError(_NO_STORE)
        return None
    if config.batch_storage is not None:
        return config.batch_storage
    if store.path is None:
        logger.info("files and batches are off: --batch-storage names no storage that all servers share")
        return None
    return f"{store.path}.files"
