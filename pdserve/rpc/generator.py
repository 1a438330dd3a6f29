"""What the gRPC services know of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pdserve.request import GenerateChunk, GenerateRequest, RankLoad, RequestId
from pdserve.rounds import RankRounds


class Generator(Protocol):
    """A node that answers. Fused and decode nodes are two of these behind one servicer."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The answer as it is computed; each sample ends with exactly one chunk whose delta carries `finish`.

        Closing the iterator aborts what is left. Raises a PdserveError where the request fails as a whole.
        """

    async def abort(self, request_id: RequestId) -> bool:
        """End a live request with finish reason `abort`; False if no such request lives."""

    async def loads(self, *, check_integrity: bool = False) -> Sequence[RankLoad]:
        """What each rank has on its hands now. check_integrity: InternalError where a rank's own tables disagree."""


class RoundSource(Protocol):
    """The ranks of a node, which remember their last rounds."""

    def __len__(self) -> int:
        """How many."""

    async def rounds(self, number: int, *, after: int | None, most: int) -> RankRounds:
        """The last rounds of one, `most` of those later than the one numbered `after`; None: of all it remembers.

        Answered between two rounds, however long the present one takes. Raises NotReady when the rank is lost.
        """


class Tokenizer(Protocol):
    """Text to tokens and back; thread safe."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`."""

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        """The model's prompt for `messages` (role, content), ready for `encode(add_special_tokens=False)`.

        Raises InvalidRequest when the model has no template or the template refuses the messages.
        """
