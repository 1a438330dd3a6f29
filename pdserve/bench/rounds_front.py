"""The front's end of the round bench, as a process of its own: `python -m pdserve.bench.rounds_front ENDPOINT WORK`.

Waits for the rank, hands in all requests, takes every output as it comes, and sends Stop when all have ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass

from pdserve.engine.channel import FrontChannel
from pdserve.engine.messages import FromRank, Loading, Outputs, Stop, Submit, ToRank
from pdserve.request import FUSED, RequestId, SamplingParams, TokenRequest

MAX_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Work:
    """num_requests that decode side by side, num_tokens each; temperature 0 is greedy."""

    num_requests: int
    num_tokens: int
    temperature: float

    def words(self) -> str:
        return json.dumps(asdict(self))

    def requests(self) -> list[TokenRequest]:
        """Prompts of 1 to MAX_PROMPT_TOKENS tokens, so that their blocks fill up in different rounds."""
        sampling = SamplingParams(self.num_tokens, temperature=self.temperature, top_p=0.95, ignore_eos=True)
        return [
            TokenRequest(RequestId(f"request-{number}"), tuple(range(number % MAX_PROMPT_TOKENS + 1)), sampling)
            for number in range(self.num_requests)
        ]


async def serve(endpoint: str, work: Work) -> None:
    channel: FrontChannel[FromRank, ToRank] = FrontChannel(endpoint, FromRank)
    num_left = work.num_requests
    ended = asyncio.Event()

    def on_message(message: FromRank) -> None:
        nonlocal num_left
        if isinstance(message, Loading):
            for request in work.requests():
                channel.send(Submit(request, FUSED))
        elif isinstance(message, Outputs):
            num_left -= sum(output.finish is not None for output in message.outputs)
            if num_left == 0:
                ended.set()

    channel.listen(on_message)
    await ended.wait()
    channel.send(Stop())
    # The socket drops what it still holds when it closes: the rank's process ends this one.
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Work(**json.loads(sys.argv[2]))))
