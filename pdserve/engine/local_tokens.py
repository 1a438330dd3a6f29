"""Answers that are prefilled and decoded on one rank of this node."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pdserve.engine.front import delta_of
from pdserve.engine.messages import Output
from pdserve.engine.ranks import Ranks
from pdserve.request import FUSED, RankLoad, RequestId, TokenDelta, TokenRequest


class LocalTokens:
    """A token source that prefills and decodes on one rank of this node."""

    def __init__(self, ranks: Ranks, placement: str = "local;reason=fused") -> None:
        self._ranks = ranks
        self._placement = placement

    async def stream(self, request: TokenRequest) -> AsyncIterator[TokenDelta]:
        """Tokens as the rank draws them; closing the iterator aborts the request."""
        rank = self._ranks.choose(request)
        inbox = rank.open(request, FUSED)
        is_over = False
        try:
            while not is_over:
                message = await inbox.get()
                if isinstance(message, Exception):
                    is_over = True
                    raise message
                assert isinstance(message, Output)
                is_over = message.finish is not None or bool(message.error_name)
                yield delta_of(message, self._placement)
        finally:
            rank.close(request.request_id, is_over=is_over)

    async def abort(self, request_id: RequestId) -> bool:
        return self._ranks.abort(request_id)

    async def loads(self, *, check_integrity: bool = False) -> list[RankLoad]:
        return await self._ranks.loads(check_integrity=check_integrity)
