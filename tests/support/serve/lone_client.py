"""A client process for the tests to kill: submits endless requests, writes a line once each has a token."""

from __future__ import annotations

import asyncio
import sys

from chorale.client.remote import RemoteClient
from chorale.engine.types import GenerateRequest, SamplingSpec


async def main(directory: str, num_requests: int) -> None:
    client = RemoteClient(directory)
    client.start()
    while client.status.state != "ready":
        await asyncio.sleep(0.01)
    sampling = SamplingSpec(max_tokens=50_000, ignore_eos=True)
    streams = [
        client.submit(GenerateRequest(request_id=f"lone-{i}", prompt_token_ids=[1, 2], sampling=sampling))
        for i in range(num_requests)
    ]
    await asyncio.gather(*(anext(stream) for stream in streams))
    print("running", flush=True)
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
