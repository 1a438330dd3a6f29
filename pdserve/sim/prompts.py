"""Tokens for prompts of which only lengths and common beginnings are known.

a piece named 7        7 7 7 … 7         equal names are equal tokens, so the prefix cache hits where it should
a prompt by itself     -5 -5 -5 … -5     like no other request's
an answer              -1 -1 -1 … -1
"""

from __future__ import annotations

from pdserve.errors import InvalidRequest
from pdserve.sim.workload import SimRequest

ANSWER_TOKEN = -1
_FIRST_OF_ITS_OWN = -2
MAX_TOKEN = 2**63 - 1


def prompt_tokens(request: SimRequest) -> list[int]:
    """num_prompt_tokens tokens. Raises InvalidRequest where hash_ids say less than that, or are no names.

    The last piece is cut to what is left of the prompt.
    """
    num_tokens = request.num_prompt_tokens
    if not request.hash_ids:
        return [_FIRST_OF_ITS_OWN - request.number] * num_tokens
    size = request.hash_block_tokens
    tokens: list[int] = []
    for name in request.hash_ids:
        tokens += [name] * size
    if len(tokens) < num_tokens:
        raise InvalidRequest(
            f"hash_ids of request {request.number} name {len(request.hash_ids)} pieces of {size} tokens, "
            f"its prompt has {num_tokens}: give one a piece, or none",
            field="hash_ids",
        )
    if not all(0 <= name <= MAX_TOKEN for name in request.hash_ids):
        raise InvalidRequest(
            f"hash_ids of request {request.number} hold {min(request.hash_ids)}: names are numbers from 0 on",
            "hash_ids",
        )
    return tokens[:num_tokens]
