"""Where the two describe the same thing, our plans are those of TokenSpeed's scheduler, but for DIFFERENCES.

That is packing, the order of chunks, head of line, the full batch, mixed rounds, requests that leave, a pool too small
for everybody. Not compared: prefixes that prompts share (the two publish and evict at different moments, and theirs
finds parts of blocks), retraction (an answer that was admitted has all its blocks here), and routes with a peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from pdserve.errors import InvalidRequest
from pdserve.scheduler import admission
from pdserve.scheduler.admission import Admission
from pdserve.scheduler.draft import Draft
from pdserve.scheduler.planner import Planner
from tests.scheduler.workloads import (
    Arrival,
    Chunk,
    Ours,
    Round,
    Theirs,
    Workload,
    at_once,
    config,
    prompt,
    random_workload,
    run,
)

add_decodes = Planner._add_decodes


@dataclass(frozen=True)
class Difference:
    """set_aside: has our scheduler decide as theirs does; nothing else about it changes."""

    reason: str
    set_aside: Callable[[pytest.MonkeyPatch], None]


def end_chunks_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_chunk_end", lambda self, start, end, budget: min(end, start + budget))


def leave_no_reserve(patch: pytest.MonkeyPatch) -> None:
    def with_all_tokens(self: Planner, draft: Draft, reserve: int) -> None:
        add_decodes(self, draft, 0)

    patch.setattr(Planner, "_add_decodes", with_all_tokens)


def overtake_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "MAX_PASSED_OVER", 10**9)


def look_at_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "MAX_MISSED", 10**9)


DIFFERENCES = {
    "chunk on a block boundary": Difference(
        "ours ends a chunk that leaves prompt over on a block boundary, theirs where the budget ends: what we announce "
        "to a peer and what we publish are whole blocks",
        end_chunks_anywhere,
    ),
    "reserve for prefill": Difference(
        "in a mixed round our decodes leave a block's worth of tokens to a prompt that waits; theirs leave none, and "
        "decodes that fill every round would hold it for ever",
        leave_no_reserve,
    ),
    "overtaken 64 times at most": Difference(
        "a prompt that lacks blocks is passed by others in 64 rounds, then nothing new overtakes it; theirs waits for "
        "as long as small ones keep coming",
        overtake_for_ever,
    ),
    "32 prompts looked at in vain": Difference(
        "a round of ours looks at so many prompts that cannot start, theirs at the whole queue: what a round costs "
        "must not grow with the queue",
        look_at_everybody,
    ),
}
# A fifth is at the door: see test_with_prefix_caching_theirs_keeps_a_block_spare. Random workloads keep clear of it.


def our_rounds(workload: Workload, set_aside: Collection[str] = ()) -> list[Round]:
    with pytest.MonkeyPatch.context() as patch:
        for name in set_aside:
            DIFFERENCES[name].set_aside(patch)
        return run(Ours(workload.config), workload)


def their_rounds(workload: Workload) -> list[Round]:
    return run(Theirs(workload.config), workload)


# ---------------------------------------------------------------- at random


def test_random_workloads_get_the_plans_that_theirs_would_make() -> None:
    num_same = 0
    for seed in range(48):
        workload = random_workload(seed)
        theirs = their_rounds(workload)
        assert our_rounds(workload, DIFFERENCES) == theirs, f"workload {seed} shows a difference that nobody intended"
        num_same += our_rounds(workload) == theirs
    assert num_same >= 10, "hardly a workload compares anything without a patch"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_random_workloads_get_the_plans_that_theirs_would_make() -> None:
    counts = Counter(name for seed in range(1000) for name in differences_in(random_workload(seed)) or ["the same"])
    print(counts)
    assert counts["the same"] >= 200, counts
    assert counts.keys() == {"the same", *DIFFERENCES}, counts


def differences_in(workload: Workload) -> set[str]:
    """Those without which our plans would not be theirs; none where they are anyway."""
    theirs = their_rounds(workload)
    if our_rounds(workload) == theirs:
        return set()
    assert our_rounds(workload, DIFFERENCES) == theirs, "a difference that nobody intended"
    found = {name for name in DIFFERENCES if our_rounds(workload, DIFFERENCES.keys() - {name}) != theirs}
    assert found, "two differences that hide each other"
    return found


# ---------------------------------------------------------------- the same, by name


@pytest.mark.parametrize("enable_mixed_batch", [False, True])
def test_a_round_completes_two_prompts_and_truncates_the_third(enable_mixed_batch: bool) -> None:
    numbers = config(num_blocks=20_000, max_scheduled_tokens=6000, enable_mixed_batch=enable_mixed_batch)
    rounds = same_rounds(Workload(numbers, at_once((2000, 1), (1000, 1), (10_000, 1))))
    assert rounds[0] == Round((Chunk("r0", 0, 2000), Chunk("r1", 0, 1000), Chunk("r2", 0, 3000)))


def test_an_incomplete_prefill_keeps_the_head_of_line() -> None:
    rounds = same_rounds(Workload(config(), at_once((100, 2), (4, 2))))
    assert [len(r.chunks) for r in rounds[:4]] == [1, 1, 1, 2]
    assert rounds[3] == Round((Chunk("r0", 96, 100), Chunk("r1", 0, 4)))


@pytest.mark.parametrize("enable_mixed_batch", [False, True])
def test_a_full_batch_defers_a_prompt_until_somebody_ends(enable_mixed_batch: bool) -> None:
    numbers = config(max_batch_size=2, enable_mixed_batch=enable_mixed_batch)
    rounds = same_rounds(Workload(numbers, at_once((4, 4), (4, 2), (4, 2))))
    assert rounds[1] == Round((), ("r0", "r1"))
    assert rounds[2].chunks == (Chunk("r2", 0, 4),)


def test_decodes_of_a_mixed_round_go_first_and_prefill_gets_the_rest() -> None:
    numbers = config(enable_mixed_batch=True, max_scheduled_tokens=8)
    rounds = same_rounds(Workload(numbers, at_once((4, 9), (20, 2))))
    assert rounds[1] == Round((Chunk("r1", 4, 11),), ("r0",))


def test_a_prompt_that_lacks_blocks_is_passed_by_one_that_does_not() -> None:
    rounds = same_rounds(Workload(config(num_blocks=32), at_once((16, 4), (20, 4), (4, 4))))
    assert rounds[0].chunks == (Chunk("r0", 0, 16), Chunk("r2", 0, 4))


def same_rounds(workload: Workload) -> list[Round]:
    """Of both; nothing is set aside."""
    rounds = our_rounds(workload)
    assert rounds == their_rounds(workload)
    return rounds


# ---------------------------------------------------------------- different, by name


def rounds_that_show(name: str, workload: Workload) -> tuple[list[Round], list[Round]]:
    """Of ours and of theirs, which differ by `name` and by nothing else."""
    ours, theirs = our_rounds(workload), their_rounds(workload)
    assert ours != theirs
    assert our_rounds(workload, [name]) == theirs
    return ours, theirs


def test_our_chunks_end_on_a_block_boundary() -> None:
    workload = Workload(config(block_size=8, max_scheduled_tokens=20), at_once((30, 1)))
    ours, theirs = rounds_that_show("chunk on a block boundary", workload)
    assert ours[0].chunks == (Chunk("r0", 0, 16),)
    assert theirs[0].chunks == (Chunk("r0", 0, 20),)


def test_our_decodes_leave_a_reserve() -> None:
    numbers = config(max_batch_size=4, max_scheduled_tokens=4, enable_mixed_batch=True, min_prefill_chunk_tokens=2)
    late = Arrival(1, "late", prompt("late", 8), 1)
    ours, theirs = rounds_that_show("reserve for prefill", Workload(numbers, (*at_once((1, 4), (1, 4), (1, 4)), late)))
    assert ours[1] == Round((Chunk("late", 0, 2),), ("r0", "r1"))
    assert theirs[1] == Round((Chunk("late", 0, 1),), ("r0", "r1", "r2"))


def test_our_large_prompt_is_overtaken_64_times_at_most() -> None:
    small = [Arrival(round, f"small{round}", prompt(round, 2), 2) for round in range(2, 160)]
    large = Arrival(1, "large", prompt("large", 28), 2)
    workload = Workload(config(num_blocks=32, enable_mixed_batch=True), (*at_once((2, 4)), large, *small))
    ours, theirs = rounds_that_show("overtaken 64 times at most", workload)
    assert first_chunk("large", ours) < 70
    assert first_chunk("large", theirs) > 158


def test_our_round_looks_at_32_prompts_in_vain() -> None:
    large = [Arrival(1, f"large{index}", prompt(index, 30), 1) for index in range(32)]
    small = Arrival(1, "small", prompt("small", 2), 1)
    workload = Workload(config(num_blocks=32, enable_mixed_batch=True), (*at_once((2, 4)), *large, small))
    ours, theirs = rounds_that_show("32 prompts looked at in vain", workload)
    assert first_chunk("small", ours) > first_chunk("small", theirs) == 1


def first_chunk(request_id: str, rounds: list[Round]) -> int:
    return next(n for n, r in enumerate(rounds) if any(chunk.request_id == request_id for chunk in r.chunks))


def test_with_prefix_caching_theirs_keeps_a_block_spare() -> None:
    """It needs one to take a part of a block from the cache; we take whole blocks, and so admit a block more."""
    arrival = Arrival(0, "r0", prompt("r0", 28), 4)
    for prefix_caching in (False, True):
        numbers = config(num_blocks=8, block_size=4, prefix_caching=prefix_caching)
        with pytest.raises(ValueError, match="exceeds cache capacity 28") if prefix_caching else nullcontext():
            Theirs(numbers).submit(arrival)
        Ours(numbers).submit(arrival)
        with pytest.raises(InvalidRequest):
            Ours(numbers).submit(Arrival(0, "r0", prompt("r0", 29), 4))
