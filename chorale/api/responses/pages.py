"""Pagination: the query parameters of all list endpoints, and the page object."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic_core import PydanticKnownError
from starlette.datastructures import QueryParams

from chorale.api.fields import Include
from chorale.api.limits import LIMITS
from chorale.errors import invalid
from chorale.store.database.sql import Page
from chorale.tracing.ignored import unknown_field

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_TRUE, _FALSE = ("true", "1"), ("false", "0")


def read_page(query: QueryParams, *others: str, default_order: str = "asc", limit: str = "limit") -> Page:
    """Parses the query of a list. Raises ``RequestError`` if it is invalid.

    ``others``: further allowed names; ``limit``: name of the range of ``limit`` in ``LIMITS``.
    """
    check_names(query, "after", "limit", "order", *others)
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        raise invalid("order", "must be 'asc' or 'desc'")
    number = read_number(query, "limit", int(LIMITS[limit].default), limit)
    return Page(query.get("after"), number, order == "desc")


def read_item_page(query: QueryParams) -> Page:
    """Parses the query of a list of items, by default newest first."""
    asked = read_page(query, "before", "include", "include[]", default_order="desc")
    check_include(query)
    if query.get("before") is not None:
        raise invalid("before", "is not supported; use 'after' and 'order'")
    return asked


def check_names(query: QueryParams, *names: str) -> None:
    for name in query:
        if name not in names:
            unknown_field(name, names)


def check_include(query: QueryParams) -> None:
    """Validates the values of ``include``. Stored items already contain the fields that they name."""
    for value in (*query.getlist("include"), *query.getlist("include[]")):
        if value not in get_args(Include):
            raise invalid("include", f"{value[:64]!r} is not one of {', '.join(get_args(Include))}")


def read_number(query: QueryParams, name: str, default: int, limit: str | None = None) -> int:
    """Returns a number from the query. ``limit``: its name in ``LIMITS``, if different."""
    text = query.get(name)
    if text is None:
        return default
    try:
        return int(LIMITS[limit or name].check(int(text) if _INTEGER.fullmatch(text) else text))
    except PydanticKnownError as error:
        raise invalid(name, error.message()) from None


def read_flag(query: QueryParams, name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in (*_TRUE, *_FALSE):
        raise invalid(name, "must be true or false")
    return text in _TRUE


def cut(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """Returns a page of ``items``, which must be in ascending order."""
    ordered = list(reversed(items)) if page.newest_first else list(items)
    if page.after is not None:
        position = next((i for i, item in enumerate(ordered) if item["id"] == page.after), None)
        if position is None:
            raise invalid("after", f"{page.after[:128]!r} is not in this list")
        ordered = ordered[position + 1 :]
    return page_object(ordered[: page.limit], len(ordered) > page.limit)


def page_object(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
