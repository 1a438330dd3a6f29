"""What must hold after a chaos run: every request's fate against the rules, and what the nodes have kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.chaos.answers import Answered
from pdserve.bench.chaos.faults import Fault
from pdserve.bench.chaos.fleet import Fleet, Growth
from pdserve.bench.chaos.requests import Attempted
from pdserve.bench.handoff_witness import Phase
from pdserve.bench.stream_checks import Check, exactly

MIN_TOUCHED_SHARE = 0.95
# A few are drawn from a long row of tokens, some of which are always as likely as their neighbours.
MAX_TIED_SHARE = 0.02
MIN_HITS = 10
# Than a node of the same model and settings which nothing disturbed.
MAX_MORE_MIB, MAX_MORE_FILES = 64.0, 24


@dataclass(frozen=True, slots=True)
class Fate:
    """One request: what came of it, and what had been done to those who worked on it meanwhile."""

    attempted: Attempted
    answered: Answered
    faults: tuple[Fault, ...]

    @property
    def is_touched(self) -> bool:
        return bool(self.faults)

    @property
    def may_fail(self) -> bool:
        """Its decode node died, or its client left."""
        died = any(fault.ends_requests_of == self.attempted.target for fault in self.faults)
        return died or self.attempted.has_left

    @property
    def is_failed(self) -> bool:
        return not self.attempted.is_complete and not self.attempted.has_left

    def figures(self) -> dict[str, object]:
        attempted = self.attempted
        return {
            "number": attempted.ask.number,
            "kind": attempted.ask.kind.value,
            "target": attempted.target,
            "answered": self.answered.value,
            "error": repr(attempted.error) if attempted.error else None,
            "has_left": attempted.has_left,
            "placements": list(attempted.placements),
            "faults": [fault.number for fault in self.faults],
            "tokens": [sample.token_ids for sample in attempted.samples] if self.answered is Answered.WRONG else None,
        }


def fates_of(
    done: Sequence[Attempted],
    verdicts: Mapping[int, Answered],
    faults: Sequence[Fault],
    routes: Mapping[str, set[str]],
) -> list[Fate]:
    """routes: by a request's name, the prefill nodes that its prompt was seen on the way to."""
    return [
        Fate(
            attempted,
            verdicts[attempted.ask.number],
            tuple(fault for fault in faults if _touches(fault, attempted, routes.get(attempted.ask.name, set()))),
        )
        for attempted in done
    ]


def _touches(fault: Fault, attempted: Attempted, route: set[str]) -> bool:
    if fault.request is not None:
        return fault.request == attempted.ask.name
    assert attempted.ended_s is not None
    ends_s = fault.until_s if fault.until_s is not None else float("inf")
    is_during = attempted.started_s <= ends_s and fault.at_s <= attempted.ended_s
    return is_during and {attempted.target, *route}.issuperset(fault.where)


def routes_of(fleet: Fleet) -> dict[str, set[str]]:
    routes: dict[str, set[str]] = {}
    for prefill, witness in fleet.witnesses.items():
        for passed in witness.log:
            routes.setdefault(passed.request_id.partition("~")[0].partition("#")[0], set()).add(prefill)
    return routes


def fate_checks(fates: Sequence[Fate]) -> list[Check]:
    answered = Counter(fate.answered for fate in fates)
    untouched = [fate for fate in fates if not fate.is_touched]
    stayed = [fate for fate in fates if fate.is_touched and not fate.attempted.has_left]
    num_answered = sum(not fate.is_failed for fate in stayed)
    lost = sum(fate.is_failed and not fate.may_fail for fate in fates)
    return [
        exactly("answers that are wrong", answered[Answered.WRONG], 0),
        Check("answers tied with the reference's", answered[Answered.TIED], 0, int(MAX_TIED_SHARE * len(fates))),
        exactly("untouched requests that failed", sum(fate.is_failed for fate in untouched), 0),
        Check("touched requests answered", num_answered, int(MIN_TOUCHED_SHARE * len(stayed)), len(stayed)),
        exactly("failures though the decode node lived and the client stayed", lost, 0),
        exactly("requests that hung", sum(fate.attempted.is_hung for fate in fates), 0),
    ]


def hit_checks(faults: Sequence[Fault], num_wanted: int) -> list[Check]:
    """Each phase is hit often enough, where there are faults enough for it."""
    hits = Counter(phase for fault in faults for phase in fault.hit)
    wanted = min(MIN_HITS, num_wanted // 10)
    checks = [exactly("faults", len(faults), num_wanted), exactly("faults not over", _num_open(faults), 0)]
    return checks + [Check(f"faults that hit: {phase.value}", hits[phase.value], wanted, num_wanted) for phase in Phase]


def _num_open(faults: Sequence[Fault]) -> int:
    return sum(fault.until_s is None for fault in faults)


def growth_checks(member: str, growth: Growth, undisturbed: Growth) -> list[Check]:
    """Of each process since it began, beside what that of a node grows under the same requests when nothing fails."""
    checks = []
    for kind, own in growth.items():
        usual = undisturbed[kind]
        mib, files = max(0.0, usual.resident_mib) + MAX_MORE_MIB, max(0, usual.num_files) + MAX_MORE_FILES
        checks.append(Check(f"{member} {kind}: MiB grown", own.resident_mib, None, round(mib, 1)))
        checks.append(Check(f"{member} {kind}: files more", own.num_files, None, files))
    return checks
