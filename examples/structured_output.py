"""An answer that is an instance of a pydantic class: python examples/structured_output.py

Needs ``chorale serve`` in another terminal, and ``pip install openai``.
"""

from __future__ import annotations

from common import KEY, URL, model_name
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int
    city: str


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    response = client.responses.parse(
        model=model_name(),
        input="Extract the person: Anna Berg is 34 years old and lives in Oslo.",
        text_format=Person,
        temperature=0,
    )
    print(repr(response.output_parsed))


if __name__ == "__main__":
    main()
