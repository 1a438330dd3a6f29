"""What a long prompt does to a stream beside it: the victim's gaps, and what keeping them short costs the prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.errors import StartupError
from pdserve.sim.broadcast import Broadcast
from pdserve.sim.deployment import Deployment
from pdserve.sim.observer import Observer, SimRound, Transferred
from pdserve.sim.pair import ATTACKER, VICTIM, Pair
from pdserve.sim.simulation import Simulation
from pdserve.sim.workload import SimRequest

NAMES = {VICTIM: "victim", ATTACKER: "attacker"}


@dataclass(frozen=True, slots=True)
class Interference:
    """One run of the pair. Times in seconds, at the clients.

    victim_gaps_s: between its tokens. num_chunks: prefill rounds of the attacker; prefill_s: what they took.
    num_decode_rounds, decode_s: rounds of decode alone between the first and the last of these.
    """

    victim_ttft_s: float
    victim_gaps_s: tuple[float, ...]
    attacker_ttft_s: float | None
    num_chunks: int
    prefill_s: float
    num_decode_rounds: int
    decode_s: float

    @property
    def victim_stream_s(self) -> float:
        """From its first token to its last."""
        return sum(self.victim_gaps_s)

    @property
    def worst_gap_s(self) -> float:
        return max(self.victim_gaps_s)

    def gaps_over(self, threshold_s: float) -> int:
        return sum(gap_s > threshold_s for gap_s in self.victim_gaps_s)

    @property
    def prefill_added_share(self) -> float:
        """How much longer the decode rounds between its chunks made the attacker's prefill."""
        return self.decode_s / self.prefill_s if self.prefill_s else 0.0

    def figures(self) -> dict[str, float | int | None]:
        """Under stable names with their units."""
        return {
            "victim_ttft_s": self.victim_ttft_s,
            "victim_stream_s": self.victim_stream_s,
            "worst_gap_s": self.worst_gap_s,
            "gaps_over_5_s": self.gaps_over(5),
            "gaps_over_20_s": self.gaps_over(20),
            "attacker_ttft_s": self.attacker_ttft_s,
            "num_chunks": self.num_chunks,
            "prefill_s": self.prefill_s,
            "num_decode_rounds": self.num_decode_rounds,
            "decode_s": self.decode_s,
            "prefill_added_share": self.prefill_added_share,
        }


@dataclass(slots=True)
class _Witness:
    """An Observer of the pair. rounds: those that began after the attacker called, in order."""

    attack_s: float
    tokens_s: dict[int, list[float]] = field(default_factory=lambda: {VICTIM: [], ATTACKER: []})
    rounds: list[SimRound] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.tokens_s[number].append(time_s)

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        """Its last token was told already."""

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        self.failures[request.number] = reason

    def on_round(self, record: SimRound) -> None:
        if record.started_s >= self.attack_s:
            self.rounds.append(record)

    def on_transfer(self, record: Transferred) -> None:
        """Seen in the victim's gaps."""


def interfere(deployment: Deployment, pair: Pair, seed: int = 0, others: Sequence[Observer] = ()) -> Interference:
    """Run the pair. Raises StartupError where the deployment can't serve one of the two."""
    witness = _Witness(pair.attack_s)
    Simulation(deployment.topology(), deployment.costs, pair, Broadcast([witness, *others]), seed).run()
    for number, reason in witness.failures.items():
        raise StartupError(f"the {NAMES[number]} can't be served: {reason}")
    return _outcome(pair, witness)


def _outcome(pair: Pair, witness: _Witness) -> Interference:
    victim_s, attacker_s = witness.tokens_s[VICTIM], witness.tokens_s[ATTACKER]
    chunks = [record for record in witness.rounds if record.num_prefill_rows] if pair.has_attacker else []
    between = _decodes_between(chunks, witness.rounds)
    return Interference(
        victim_ttft_s=victim_s[0],
        victim_gaps_s=tuple(after_s - before_s for before_s, after_s in itertools.pairwise(victim_s)),
        attacker_ttft_s=attacker_s[0] - pair.attack_s if attacker_s else None,
        num_chunks=len(chunks),
        prefill_s=sum(record.ends_s - record.started_s for record in chunks),
        num_decode_rounds=len(between),
        decode_s=sum(record.ends_s - record.started_s for record in between),
    )


def _decodes_between(chunks: Sequence[SimRound], rounds: Sequence[SimRound]) -> list[SimRound]:
    """Rounds of decode alone on the rank that prefills, which is where a chunk has to wait for them."""
    if not chunks:
        return []
    first, last = chunks[0], chunks[-1]
    place = (first.kind, first.node, first.rank)
    return [
        record
        for record in rounds
        if (record.kind, record.node, record.rank) == place
        and first.started_s <= record.started_s < last.started_s
        and record.num_decode_rows
        and not record.num_prefill_rows
    ]
