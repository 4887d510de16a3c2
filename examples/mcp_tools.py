"""An MCP server with a tool, and a model that calls the tool.

    python examples/mcp_tools.py serve 8001                      # terminal 1: the MCP server
    chorale serve --tool-allow-private-hosts                     # terminal 2: may call this machine
    python examples/mcp_tools.py ask http://127.0.0.1:8001/mcp   # terminal 3

Needs ``pip install openai mcp``. The demo model was not trained to call tools of MCP servers: with it, the
third command lists the tools and answers without them. A real model calls the tool.
"""

from __future__ import annotations

import argparse

from common import KEY, URL, model_name


def serve(port: int) -> None:
    from mcp.server import MCPServer

    server = MCPServer("stock")

    @server.tool()
    def in_stock(article: str) -> int:
        """How many pieces of an article are in stock."""
        return len(article)

    server.run(transport="streamable-http", host="127.0.0.1", port=port)


def ask(address: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    response = client.responses.create(
        model=model_name(),
        input="How many pieces of the article 'lamp' are in stock?",
        tools=[{"type": "mcp", "server_label": "stock", "server_url": address, "require_approval": "never"}],
        max_output_tokens=2000,
    )
    for item in response.output:
        if item.type == "mcp_list_tools":
            print("tools:", [tool.name for tool in item.tools])
        elif item.type == "mcp_call":
            print(f"{item.name}({item.arguments}) = {item.output}")
    print(response.output_text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="run the MCP server").add_argument("port", type=int)
    commands.add_parser("ask", help="ask the model").add_argument("address", help="URL of the MCP server")
    given = parser.parse_args()
    if given.command == "serve":
        serve(given.port)
    else:
        ask(given.address)
