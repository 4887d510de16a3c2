"""A response that continues after the client disconnects, and a resumed stream: python examples/background.py

Needs ``chorale serve`` in another terminal, and ``pip install openai``.
"""

from __future__ import annotations

from common import KEY, URL, model_name
from openai import OpenAI


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    stream = client.responses.create(
        model=model_name(), input="What is 23 * 17?", background=True, stream=True, temperature=0
    )
    response_id, last = "", -1
    for event in stream:
        last = event.sequence_number
        if event.type == "response.created":
            response_id = event.response.id
        if last >= 3:  # simulate a lost connection; the response continues
            stream.close()
            break
    print(f"left {response_id} after event {last}")

    with client.responses.retrieve(response_id, stream=True, starting_after=last) as rest:
        for event in rest:
            assert event.sequence_number == last + 1, "no event is lost or sent twice"
            last = event.sequence_number
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
    print(f"\nlast event: {last}, status: {client.responses.retrieve(response_id).status}")


if __name__ == "__main__":
    main()
