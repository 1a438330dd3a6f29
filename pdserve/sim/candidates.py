"""The deployments that a tuner looks at: a coarse field to begin with, and the neighbours of one.

Knobs change, what is paid for doesn't: the number of ranks, their slots and their KV stay as they were, but for what
`shapes` yields. A combination that a node would refuse is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdserve.errors import StartupError
from pdserve.sim.deployment import Deployment

Knobs = Mapping[str, Any]

# Steps of each knob; a neighbour is one step away. None = not set.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HOLD_BUDGETS = (30, 120, 480, 1920)
MAX_OPEN = (None, 1, 2, 4, 8)
# Of --chunked-prefill-size as it was given. No more than that: it takes memory that no cost file tells of, and the
# costs were not measured there.
CHUNK_SHARES = (0.125, 0.25, 0.5, 1)
MIN_REMOTE = (0, 128, 512, 2048, 8192)
MAX_RATIOS = 8
FILL_SHARES = (None, 0.25, 0.5, 1)

POLICIES: tuple[Knobs, ...] = (
    {},
    {"enable_mixed_batch": True},
    *({"decode_interleave_every": n} for n in (1, 2, 4, 8)),
    *({"prefill_decode_interval": k, "prefill_hold_budget": 480} for k in (1, 2, 4, 8, 16)),
    *({"prefill_attempt_interval": a, "prefill_any_attempt_interval": 4 * a} for a in (2, 4, 8, 16, 32)),
    *(
        {"prefill_attempt_interval": a, "prefill_any_attempt_interval": 4 * a, "prefill_max_open_rounds": 1}
        for a in (2, 4, 8, 16)
    ),
    {"prefill_attempt_interval": 4, "prefill_any_attempt_interval": 32, "prefill_fill_tokens": "auto"},
    {"enable_mixed_batch": True, "prefill_decode_interval": 2, "prefill_hold_budget": 480},
)


def coarse(default: Deployment, like: Deployment | None = None) -> list[Deployment]:
    """Every policy at some chunk sizes, the default first. like: whose chunk size the steps are shares of."""
    like = like or default
    plain = default.without_policies().replace(enable_mixed_batch=False)
    sizes = [size for size in chunk_sizes(like) if size >= like.chunked_prefill_size // 4]
    policies = [policy for policy in POLICIES if _makes_sense(plain, policy)]
    found = (plain.replace(**policy, chunked_prefill_size=size) for size in sizes for policy in policies)
    return _valid([default, *found])


def _makes_sense(deployment: Deployment, policy: Knobs) -> bool:
    """Prefill nodes leave decode nodes nothing to pace; one rank has no others to fill a round with."""
    if deployment.is_split:
        return not policy
    return deployment.data_parallel_size > 1 or "prefill_fill_tokens" not in policy


def neighbours(deployment: Deployment, like: Deployment) -> list[Deployment]:
    """One step in each knob that is in use, and one knob more or fewer."""
    found: list[Deployment] = []
    found += _stepped(deployment, "chunked_prefill_size", chunk_sizes(like))
    if deployment.prefill_attempt_interval is not None:
        found += _gates(deployment)
    if deployment.decode_interleave_every is not None:
        found += _stepped(deployment, "decode_interleave_every", COUNTS)
    if deployment.prefill_decode_interval is not None:
        found += _stepped(deployment, "prefill_decode_interval", COUNTS)
        found += _stepped(deployment, "prefill_hold_budget", HOLD_BUDGETS)
    if deployment.is_split:
        found += _stepped(deployment, "remote_prefill_min_tokens", MIN_REMOTE)
    else:
        found.append(deployment.replace(enable_mixed_batch=not deployment.enable_mixed_batch))
    found.append(deployment.without_policies())
    return [one for one in _valid(found) if one != deployment]


def _gates(deployment: Deployment) -> Iterator[Deployment]:
    """The intervals apart and together, the limit of open rounds, the fill."""
    attempt, any_rank = deployment.prefill_attempt_interval, deployment.prefill_any_attempt_interval
    assert attempt is not None
    assert any_rank is not None
    yield from _stepped(deployment, "prefill_attempt_interval", COUNTS)
    yield from _stepped(deployment, "prefill_any_attempt_interval", COUNTS)
    for factor in (0.5, 2):
        both = {
            "prefill_attempt_interval": int(attempt * factor),
            "prefill_any_attempt_interval": int(any_rank * factor),
        }
        yield deployment.replace(**both)
    yield from _stepped(deployment, "prefill_max_open_rounds", MAX_OPEN)
    if deployment.data_parallel_size > 1:
        size = deployment.chunked_prefill_size
        fills = [None if share is None else int(size * share) for share in FILL_SHARES]
        yield from _stepped(deployment, "prefill_fill_tokens", fills)


def _stepped(deployment: Deployment, knob: str, steps: Iterable[Any]) -> Iterator[Deployment]:
    """One step up and one down from where the knob is; from between two steps, to both."""
    ordered = sorted(set(steps), key=_size)
    now = _size(getattr(deployment, knob))
    below = [step for step in ordered if _size(step) < now]
    above = [step for step in ordered if _size(step) > now]
    yield from (deployment.replace(**{knob: step}) for step in (*below[-1:], *above[:1]))


def _size(step: Any) -> float:
    """What is not set is before all others; `auto` is after them."""
    return -1.0 if step is None else float("inf") if isinstance(step, str) else float(step)


def chunk_sizes(deployment: Deployment) -> list[int]:
    """Whole blocks, a row for every slot at least."""
    block = deployment.costs.block_size
    least = max(block, deployment.max_num_seqs)
    sizes = {round(deployment.chunked_prefill_size * share / block) * block for share in CHUNK_SHARES}
    most = deployment.longest_request
    return sorted({deployment.chunked_prefill_size, *(size for size in sizes if least <= size <= most)})


def shapes(default: Deployment, num_ranks: int) -> list[Deployment]:
    """Ways to make nodes of that many ranks, each rank as it is in the default: fused nodes of each group size, and
    prefill beside decode nodes of one rank each, in a few ratios. Policies are left out."""
    slots = slots_of_rank(default)
    plain = default.without_policies().replace(enable_mixed_batch=False, **_NO_SHAPE)
    fused = [
        plain.replace(data_parallel_size=size, num_nodes=num_ranks // size, max_num_seqs=slots * size)
        for size in range(1, num_ranks + 1)
        if num_ranks % size == 0
    ]
    split = [
        plain.replace(num_prefill_nodes=number, num_decode_nodes=num_ranks - number, max_num_seqs=slots)
        for number in range(1, num_ranks, max(1, num_ranks // MAX_RATIOS))
    ]
    return _valid([*fused, *split])


def scaled(default: Deployment, num_ranks: int) -> list[Deployment]:
    """More or fewer of the same nodes: that many ranks exactly, or nothing."""
    plain = default.without_policies()
    if not default.is_split:
        nodes, rest = divmod(num_ranks, default.data_parallel_size)
        return [] if rest else _valid([plain.replace(num_nodes=nodes)])
    sides = (default.prefill_data_parallel_size, default.decode_data_parallel_size)
    return _valid(
        plain.replace(num_prefill_nodes=prefill, num_decode_nodes=rest // sides[1])
        for prefill in range(1, num_ranks)
        if (rest := num_ranks - prefill * sides[0]) > 0 and rest % sides[1] == 0
    )


def slots_of_rank(deployment: Deployment) -> int:
    ranks = deployment.decode_data_parallel_size if deployment.is_split else deployment.data_parallel_size
    return max(1, deployment.max_num_seqs // ranks)


_NO_SHAPE: Knobs = {
    "data_parallel_size": 1,
    "num_nodes": 1,
    "num_prefill_nodes": None,
    "num_decode_nodes": None,
    "prefill_data_parallel_size": 1,
    "decode_data_parallel_size": 1,
    "remote_prefill_min_tokens": 0,
    "max_outstanding_prefills": None,
}


def _valid(found: Iterable[Deployment]) -> list[Deployment]:
    """Each once, in order; those that a node would refuse are left out, whoever in it refuses them."""
    return [one for one in dict.fromkeys(found) if _can_start(one)]


def _can_start(deployment: Deployment) -> bool:
    try:
        deployment.topology()
    except StartupError:
        return False
    return True
