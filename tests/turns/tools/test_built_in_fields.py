"""The fields of built-in tools in requests."""

from __future__ import annotations

import pytest

from chorale.requests.built_in_tools import read_mcp


@pytest.mark.parametrize(
    ("label", "here"),
    [
        ("code_interpreter", "python"),
        ("container", "python"),
        ("web_search_preview", "browser"),
        ("python", "python"),
        ("notes", "notes"),
    ],
)
def test_labels_of_vllm_mean_the_built_in_tools_unless_the_request_has_an_address(
    label: str, here: str
) -> None:
    tool = {"type": "mcp", "server_label": label}
    assert read_mcp(tool, "tools[0]", approvals=True).server_label == here
    addressed = {**tool, "server_url": "https://a.example/mcp"}
    assert read_mcp(addressed, "tools[0]", approvals=True).server_label == label
