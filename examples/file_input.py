"""A question about a text or PDF file: python examples/file_input.py [FILE "your question"]

Needs ``chorale serve`` in another terminal, and ``pip install openai``. For PDF files the server needs pypdf.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from common import KEY, URL, model_name
from openai import OpenAI


def main() -> None:
    name, content = "question.txt", b"What is 17 + 25?"
    question = "Answer the question in the file."
    if len(sys.argv) > 2:
        name, question = Path(sys.argv[1]).name, sys.argv[2]
        content = Path(sys.argv[1]).read_bytes()
    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    response = client.responses.create(
        model=model_name(),
        input=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_file",
                        "filename": name,
                        "file_data": base64.b64encode(content).decode(),
                    },
                    {"type": "input_text", "text": question},
                ],
            }
        ],
        temperature=0,
    )
    print(response.output_text)


if __name__ == "__main__":
    main()
