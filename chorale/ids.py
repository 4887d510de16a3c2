"""Ids: a prefix that says what it names, and 32 hexadecimal digits. An id is drawn once and kept for life."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """``new_id("msg")`` -> ``msg_`` and 32 hex digits. Chat and Completions ids use ``-`` (see below)."""
    return f"{prefix}_{secrets.token_hex(16)}"


def new_completion_id(prefix: str) -> str:
    """``chatcmpl-`` / ``cmpl-`` and 32 hex digits, the form that OpenAI's endpoints use."""
    return f"{prefix}-{secrets.token_hex(16)}"
