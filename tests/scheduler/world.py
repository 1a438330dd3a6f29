"""A whole world around a Scheduler: its tiers (see `tier_world.py`), a runner, peers that write and read its blocks.

A token of an answer is a function of what the runner reads through its block table, so that a wrong table, a block
given out too early, a copy out of order or a hit on another's prefix draws a wrong token; `answer_of` computes the
right ones from the request alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.errors import NotReady
from pdserve.request import BlockHash, BlockId, FinishReason, RequestId, Side, TransferId
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.plan import (
    AnswerEnded,
    ChunkComputed,
    Event,
    KvAccepted,
    KvQuiet,
    KvReceived,
    LeaseReleased,
    LeaseRevoked,
    Outcome,
    PlanOptions,
    RequestAborted,
    RequestFailed,
    Reservation,
    RoundPlan,
    Row,
    SlotStart,
    StepDone,
    Submission,
    TokenDrawn,
    TransferFailed,
    TransferUnwanted,
)
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.state import State
from tests.scheduler.tier_world import GARBAGE, TierWorld

VOCAB = 11


def build(**numbers: Any) -> Scheduler:
    """A small scheduler: 16 blocks of 4 tokens, 4 slots, 16 tokens a round, unless told otherwise."""
    small = {
        "num_blocks": 16,
        "block_size": 4,
        "max_batch_size": 4,
        "max_scheduled_tokens": 16,
        "max_model_len": 64,
        "answer_headroom": 4,
    }
    return Scheduler(SchedulerConfig(**{**small, **numbers}))


def next_token(context: Iterable[int]) -> int:
    return zlib.crc32(repr(tuple(context)).encode()) % VOCAB


def answer_of(submission: Submission) -> list[int]:
    """The whole answer, as far as it is drawn or streamed here."""
    output: list[int] = []
    while len(output) < submission.route.limit_tokens(submission.max_new_tokens):
        output.append(next_token([*submission.prompt, *output]))
        if output[-1] in submission.stop_token_ids and len(output) > submission.min_new_tokens:
            break
    return output


@dataclass
class Slot:
    """What the runner keeps of the request in a slot."""

    request_id: RequestId
    tokens: list[int]
    num_computed: int
    table: list[BlockId] = field(default_factory=list)


@dataclass
class Lease:
    """What the peer was told of a request's blocks."""

    prompt: Sequence[int]
    first_token: int
    end_token: int
    blocks: list[BlockId] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


@dataclass
class Pull:
    """A transfer, until its destination is quiet."""

    reservation: Reservation
    is_wanted: bool = True
    is_accepted: bool = False


class World(TierWorld):
    """Drives one scheduler and checks every promise on the way. `ended` says how each request ended."""

    def __init__(self, scheduler: Scheduler, storage: dict[BlockHash, list[int]] | None = None) -> None:
        super().__init__(scheduler, {} if storage is None else storage)
        self.computed: dict[RequestId, int] = {}
        self.slots: dict[int, Slot] = {}
        self.submissions: dict[RequestId, Submission] = {}
        self.right: dict[RequestId, list[int]] = {}
        self.answers: dict[RequestId, list[int]] = {}
        self.rerouted: set[RequestId] = set()
        self.ended: dict[RequestId, str] = {}
        self.leases: dict[RequestId, Lease] = {}
        self.pulls: dict[TransferId, Pull] = {}
        self.outstanding: RoundPlan | None = None

    @property
    def live(self) -> list[RequestId]:
        """Requests without an end, oldest first."""
        return [request_id for request_id in self.submissions if request_id not in self.ended]

    # ------------------------------------------------------------ callers

    def submit(self, request_id: str, prompt: Sequence[int], max_new_tokens: int = 4, **rest: Any) -> RequestId:
        submission = Submission(RequestId(request_id), tuple(prompt), max_new_tokens, **rest)
        self.scheduler.submit(submission)
        self.submissions[submission.request_id] = submission
        self.right[submission.request_id] = answer_of(submission)
        self.answers[submission.request_id] = list(submission.forced_output)
        return submission.request_id

    def abort(self, request_id: str) -> tuple[Outcome, ...]:
        return self._take_in(self.scheduler.abort(RequestId(request_id)))

    # ------------------------------------------------------------ rounds

    def round(self, allow_prefill: bool = True) -> RoundPlan:
        """Plan, and run if there is something to run."""
        plan = self.plan(allow_prefill)
        if plan.batch_size:
            self.run()
        return plan

    def rounds(self, count: int) -> list[RoundPlan]:
        return [self.round() for _ in range(count)]

    def plan(self, allow_prefill: bool = True) -> RoundPlan:
        self._forget_what_nobody_holds()
        plan = self.scheduler.plan(PlanOptions(allow_prefill))
        self._check_shape(plan)
        for copy in plan.copies:
            self._copy(copy)
        self._begin_jobs(plan)
        self._forget_what_nobody_holds()
        for start in plan.starts:
            self._start(start)
        for reservation in plan.reservations:
            self._reserve(reservation)
        for taken in plan.taken_back:
            pull = self.pulls[taken.transfer_id]
            assert pull.is_wanted, "a reservation is taken back twice"
            assert not pull.is_accepted, "a reservation is taken back from a peer that accepted it"
            pull.is_wanted = False
        self._take_in(plan.failed)
        for row in plan.rows:
            self.slots[row.slot].table.extend(row.new_blocks)
            self._check_given(row.new_blocks, row.request_id)
        self.outstanding = plan if plan.batch_size else None
        self.copied += [copy.copy_id for copy in plan.copies]
        while self.is_prompt and self.copied:
            self.tell_copied()
        return plan

    def _check_shape(self, plan: RoundPlan) -> None:
        assert plan.num_tokens <= self.config.max_scheduled_tokens
        assert plan.num_extends <= plan.batch_size <= self.config.max_batch_size
        assert self.config.enable_mixed_batch or not (plan.prefill and plan.decode)
        assert len({row.request_id for row in plan.rows}) == len({row.slot for row in plan.rows}) == plan.batch_size
        truncated = [row for row in plan.prefill if not row.samples]
        assert truncated in ([], list(plan.prefill[-1:])), "a truncated prefill isn't the last"
        assert all(row.end % self.config.block_size == 0 for row in truncated), "a chunk ends inside a block"
        assert all(row.num_tokens == 1 and row.samples for row in plan.decode)

    def _start(self, start: SlotStart) -> None:
        submission = self.submissions[start.request_id]
        prompt = submission.prompt
        assert list(start.forced_output) == self.answers[start.request_id], "the runner starts from another answer"
        is_received = submission.route.prefill is Side.REMOTE and start.request_id not in self.rerouted
        assert start.num_cached_tokens < len(prompt) + len(start.forced_output), "a hit covers the last known token"
        first_computed = len(prompt) if is_received else start.num_cached_tokens
        num_computed = self.computed.setdefault(start.request_id, first_computed)
        self.slots[start.slot] = Slot(start.request_id, [*prompt, *start.forced_output], num_computed)
        if submission.route.decode is Side.REMOTE:
            first = submission.peer_cached_tokens
            self.leases[start.request_id] = Lease(prompt, first, first)

    def run(self) -> tuple[Outcome, ...]:
        """The forward of the outstanding round, and its StepDone."""
        plan, self.outstanding = self.outstanding, None
        assert plan is not None
        tokens = [token for row in plan.rows for token in self._compute(row)]
        assert len(tokens) == len(plan.sampled_rows)
        return self.advance(StepDone(plan.round_id, tokens))

    def _compute(self, row: Row) -> list[int]:
        slot = self.slots[row.slot]
        assert slot.request_id == row.request_id, "the slot holds somebody else"
        assert (row.start, row.samples) == (slot.num_computed, row.end == len(slot.tokens))
        for position in range(row.start, row.end):
            self._write(slot.table, position, slot.tokens[position])
        slot.num_computed = self.computed[row.request_id] = row.end
        if not row.samples:
            return []
        slot.tokens.append(next_token(self._read(slot.table, 0, row.end)))
        return slot.tokens[-1:]

    def _write(self, table: Sequence[BlockId], position: int, token: int) -> None:
        block = table[position // self.config.block_size]
        assert self.scheduler._pool._references[block] == 1, f"block {block} is written while others hold it"
        assert block not in self.on_wire, f"block {block} is written while a peer may write it"
        self.slab[block][position % self.config.block_size] = token

    def _read(self, table: Sequence[BlockId], start: int, end: int) -> list[int]:
        size = self.config.block_size
        return [self.slab[table[position // size]][position % size] for position in range(start, end)]

    # ------------------------------------------------------------ peers that compute for us

    @property
    def on_wire(self) -> set[BlockId]:
        return {block for pull in self.pulls.values() for block in pull.reservation.blocks}

    def _reserve(self, reservation: Reservation) -> None:
        num_left = reservation.num_prompt_tokens - reservation.num_cached_tokens
        assert len(reservation.blocks) == -(-num_left // self.config.block_size) > 0
        self._check_given(reservation.blocks, reservation.request_id)
        self.pulls[reservation.transfer_id] = Pull(reservation)

    def transfer_of(self, request_id: str) -> TransferId:
        return next(i for i, pull in self.pulls.items() if pull.reservation.request_id == request_id)

    def accept(self, transfer_id: TransferId) -> None:
        """The peer has reserved what it needs."""
        self.pulls[transfer_id].is_accepted = True
        assert self.advance(KvAccepted(transfer_id)) == ()

    def write_late(self, transfer_id: TransferId) -> None:
        """The peer scribbles over a destination that isn't quiet."""
        for block in self.pulls[transfer_id].reservation.blocks:
            self.slab[block] = [GARBAGE] * self.config.block_size

    def receive(self, transfer_id: TransferId) -> tuple[Outcome, ...]:
        """The right KV has come, the peer has confirmed it and drawn the first token."""
        pull = self.pulls.pop(transfer_id)
        reservation, size = pull.reservation, self.config.block_size
        prompt = self.submissions[reservation.request_id].prompt
        for position, token in enumerate(prompt[reservation.num_cached_tokens :]):
            self.slab[reservation.blocks[position // size]][position % size] = token
        token = next_token(prompt)
        if not pull.is_wanted:
            return self.advance(KvReceived(transfer_id, token))
        self._take_token(reservation.request_id, token)
        outcomes = self.advance(KvReceived(transfer_id, token))
        self._check_ended(reservation.request_id)
        return outcomes

    def try_again(self, transfer_id: TransferId) -> tuple[Outcome, ...]:
        """The KV will not come, and another peer is to try before the client has seen anything."""
        return self.advance(TransferFailed(transfer_id, stays_remote=True))

    def fail(self, transfer_id: TransferId, *, after_first_token: bool = False) -> tuple[Outcome, ...]:
        """The KV will not come. after_first_token: the client has seen the peer's first token already."""
        pull = self.pulls[transfer_id]
        if not pull.is_wanted:
            return self.advance(TransferFailed(transfer_id))
        request_id = pull.reservation.request_id
        self.rerouted.add(request_id)
        self.computed.pop(request_id, None)
        forced = (next_token(self.submissions[request_id].prompt),) if after_first_token else ()
        for token in forced:
            self._take_token(request_id, token)
        outcomes = self.advance(TransferFailed(transfer_id, forced))
        self._check_ended(request_id)
        return outcomes

    def quiet(self, transfer_id: TransferId) -> tuple[Outcome, ...]:
        """Nothing writes the destination of this unwanted transfer any more."""
        assert not self.pulls.pop(transfer_id).is_wanted
        return self.advance(KvQuiet(transfer_id))

    # ------------------------------------------------------------ peers that read from us

    def release(self, request_id: RequestId) -> tuple[Outcome, ...]:
        """The peer has read all it was told of; that has to be the prompt, in blocks nobody replaced."""
        lease = self.leases.pop(request_id)
        assert lease.end_token == len(lease.prompt), "released before the prompt was told of"
        read = self._read(lease.blocks, 0, lease.end_token - lease.first_token)
        assert read == list(lease.prompt[lease.first_token :]), "the peer read somebody else's KV"
        assert [self.scheduler.generation(block) for block in lease.blocks] == lease.generations
        return self.advance(LeaseReleased(request_id))

    def revoke(self, request_id: RequestId) -> tuple[Outcome, ...]:
        del self.leases[request_id]
        return self.advance(LeaseRevoked(request_id))

    # ------------------------------------------------------------ what came of it

    def advance(self, *events: Event) -> tuple[Outcome, ...]:
        return self._take_in(self.scheduler.advance(events))

    def _take_in(self, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
        for outcome in outcomes:
            match outcome:
                case TokenDrawn():
                    self._on_token(outcome)
                case AnswerEnded():
                    self._on_answer_ended(outcome)
                case ChunkComputed():
                    self._on_chunk(outcome)
                case RequestAborted():
                    self._end(outcome.request_id, "aborted")
                case RequestFailed():
                    assert isinstance(outcome.error, NotReady)
                    self._end(outcome.request_id, "failed")
                case TransferUnwanted():
                    self.pulls[outcome.transfer_id].is_wanted = False
        return tuple(outcomes)

    def _on_token(self, drawn: TokenDrawn) -> None:
        submission = self.submissions[drawn.request_id]
        if drawn.finish is FinishReason.STOP:
            assert drawn.matched_stop_token == drawn.token
        self._take_token(drawn.request_id, drawn.token)
        if submission.route.decode is Side.REMOTE:
            self._end(drawn.request_id, "sent off")
        elif drawn.finish is not None:
            self._end(drawn.request_id, "finished")
        self._check_ended(drawn.request_id)

    def _on_answer_ended(self, ended: AnswerEnded) -> None:
        assert (ended.finish is FinishReason.STOP) == (ended.matched_stop_token is not None)
        assert ended.matched_stop_token in (None, self.answers[ended.request_id][-1])
        self._end(ended.request_id, "finished")

    def _take_token(self, request_id: RequestId, token: int) -> None:
        assert request_id not in self.ended, f"{request_id} has {self.ended.get(request_id)} and draws on"
        answer, right = self.answers[request_id], self.right[request_id]
        answer.append(token)
        assert answer == right[: len(answer)], f"{request_id} has {answer}, right is {right}"

    def _check_ended(self, request_id: RequestId) -> None:
        """A request ends with the last token of its answer and not before."""
        is_complete = self.answers[request_id] == self.right[request_id]
        assert (request_id in self.ended) == is_complete, f"{request_id} has {self.answers[request_id]}"

    def _on_chunk(self, chunk: ChunkComputed) -> None:
        lease = self.leases[chunk.request_id]
        assert chunk.first_token == lease.end_token < chunk.end_token, "announced ranges leave a gap or overlap"
        assert chunk.end_token % self.config.block_size == 0 or chunk.end_token == len(lease.prompt)
        lease.end_token = chunk.end_token
        lease.blocks += chunk.blocks
        lease.generations += chunk.generations

    def _end(self, request_id: RequestId, how: str) -> None:
        before = self.ended.get(request_id)
        assert before is None or (before, how) == ("sent off", "aborted"), f"{request_id} has {before}, then {how}"
        self.ended[request_id] = how

    # ------------------------------------------------------------ promises

    def _check_given(self, blocks: Iterable[BlockId], request_id: RequestId) -> None:
        """Blocks given out are on no wire, and if a peer reads them they are a shared prefix."""
        given = set(blocks)
        assert not given & self.on_wire, f"{request_id} was given a destination that isn't quiet"
        leased = {block for i, lease in self.leases.items() if i != request_id for block in lease.blocks}
        assert all(block in self.scheduler._pool._prefixes for block in given & leased), "a leased block is given out"

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.num_transfers == len(self.pulls)

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Peers and tiers do all they still have to do."""
        self.settle_tiers()
        for transfer_id in list(self.pulls):
            if self.pulls[transfer_id].is_wanted:
                self.receive(transfer_id)
            else:
                self.quiet(transfer_id)
        for request_id in list(self.leases):
            if self.ended.get(request_id) == "aborted":
                self.revoke(request_id)
            elif self.ended.get(request_id) == "sent off":
                self.release(request_id)

    def most_rounds(self) -> int:
        """Rounds in which everything live is over: each computes a block of a prompt, a token, reserves, or fetches.

        A round that restores a retracted request may do nothing else; it is not counted.
        """
        submissions = [self.submissions[request_id] for request_id in self.live]
        return sum(len(s.prompt) // self.config.block_size + s.max_new_tokens + 4 for s in submissions) + 2

    def drain(self, allowed: Iterator[bool] | None = None) -> None:
        """Rounds until nothing lives. No more than `most_rounds` of those whose prefill is allowed are needed."""
        rounds_left = self.most_rounds()
        while not self.scheduler.is_idle:
            allow_prefill = allowed is None or next(allowed)
            assert rounds_left > 0, f"{self.live} wait forever"
            num_restores = self.scheduler.counters.restores
            if self.outstanding is None:
                self.plan(allow_prefill)
            rounds_left -= allow_prefill and self.scheduler.counters.restores == num_restores
            if self.outstanding is not None:
                self.run()
            self.settle()
            self.check()
        assert not self.live
        assert self.scheduler.num_held_blocks == 0
        assert self.scheduler._host.pool.num_held == 0


def world_of(**numbers: Any) -> World:
    return World(build(**numbers))


def state_of(world: World, request_id: str = "a") -> State | None:
    """None: the scheduler knows no such request."""
    request = world.scheduler._residents.by_id.get(RequestId(request_id))
    return request.state if request else None


def kinds(outcomes: Iterable[Outcome]) -> list[type]:
    return [type(outcome) for outcome in outcomes]
