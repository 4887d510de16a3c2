"""An id is the same in added, done, the terminal object and a GET; a streamed call can be answered."""

from __future__ import annotations

from tests.support.faces import WEATHER, request_body, send
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, in_rounds
from tests.support.server import Server, with_server
from tests.support.sse import frames

CALL = ANALYSIS + "T." + NEXT + PREAMBLE + "Wait." + NEXT + call("get_weather", "{}") + "<|call|>"


def test_ids_from_the_stream_to_the_store_and_the_next_turn() -> None:
    async def main(server: Server) -> None:
        body = request_body("responses", True, functions=[WEATHER])
        events = frames(await send(server, "responses", body))
        added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        final = events[-1]["response"]
        kept = (await server.http.get(f"/v1/responses/{final['id']}")).json()
        for items in (done, final["output"], kept["output"]):
            assert [item["id"] for item in items] == [item["id"] for item in added]
            assert items[-1]["call_id"] == added[-1]["call_id"]
        assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
        output = {"type": "function_call_output", "call_id": added[-1]["call_id"], "output": "21"}
        body = {"model": "demo", "previous_response_id": final["id"], "input": [output]}
        answer = (await send(server, "responses", body)).json()
        assert answer["output"][-1]["content"][0]["text"] == "21 degrees."

    with_server(in_rounds(CALL, FINAL + "21 degrees.<|return|>"), main)
