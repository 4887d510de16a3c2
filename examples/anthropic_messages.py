"""Anthropic's SDK against Chorale, streaming with thinking: python examples/anthropic_messages.py

Needs ``chorale serve`` in another terminal, and ``pip install anthropic``.
"""

from __future__ import annotations

from anthropic import Anthropic
from common import KEY, URL, model_name


def main() -> None:
    client = Anthropic(base_url=URL, api_key=KEY)
    with client.messages.stream(
        model=model_name(),
        max_tokens=2048,
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
    ) as stream:
        for event in stream:
            if event.type == "content_block_start":
                print(
                    {"thinking": "Thinking: ", "text": "\n\nAnswer: "}.get(event.content_block.type, ""),
                    end="",
                )
            elif event.type == "thinking":
                print(event.thinking, end="", flush=True)
            elif event.type == "text":
                print(event.text, end="", flush=True)
        print(f"\n[{stream.get_final_message().usage.output_tokens} tokens]")


if __name__ == "__main__":
    main()
