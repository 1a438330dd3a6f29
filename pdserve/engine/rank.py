"""The loop of one rank: receive, plan, execute, advance, send. One thread owns the scheduler and the runner.

receive ─▶ plan ─▶ agree with the group ─▶ execute (one forward, sample) ─▶ advance(StepDone)
─▶ advance(transport events) ─▶ send
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import zmq

from pdserve.engine.channel import Pollable, RankChannel
from pdserve.engine.gating import Gating
from pdserve.engine.group import Group, Lone
from pdserve.engine.messages import (
    AbandonPull,
    Abort,
    AnnounceChunk,
    AskLoad,
    AskRounds,
    DropLease,
    FromRank,
    GiveUpTransfer,
    LoadReport,
    LoopCommand,
    OpenLease,
    OpenPull,
    Output,
    Outputs,
    Ping,
    Pong,
    ReservationTakenBack,
    Reserved,
    RoundsReport,
    Stop,
    Submit,
    ToRank,
    TransferAccepted,
    Wake,
)
from pdserve.engine.pace import Pace
from pdserve.engine.round_log import RoundLog
from pdserve.engine.tiers import HostTierLink
from pdserve.errors import PdserveError
from pdserve.model.runner import ModelRunner, RoundResult
from pdserve.request import FinishReason, LeaseId, RankLoad, RequestId, Side, TokenLogprobs
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import (
    AnswerEnded,
    ChunkComputed,
    Event,
    KvAccepted,
    LeaseUnwanted,
    Outcome,
    RequestAborted,
    RequestFailed,
    RoundPlan,
    StepDone,
    Submission,
    TokenDrawn,
    TransferFailed,
    TransferUnwanted,
)
from pdserve.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

# What the scheduler has to look at in a round.
WORK = (Submit, Abort, GiveUpTransfer, TransferAccepted)


class TransportLink(Protocol):
    """The loop's side of the transport thread: two queues, and what wakes the loop."""

    def submit(self, command: LoopCommand) -> None:
        """Hand a command to the thread; never blocks."""

    def events(self) -> list[Event]:
        """What the thread has for the scheduler since the last call."""

    @property
    def pollables(self) -> Sequence[Pollable]:
        """What becomes readable while events wait."""

    def counters(self) -> dict[str, int]:
        """What the thread counts: bytes, transfers, leases, by name."""


@dataclass(slots=True)
class Live:
    """What the loop remembers of a request beside the scheduler.

    submitted_in: the last round it was not there for. prompt_logprobs: collected until the first token goes out with
    them; None where nobody waits for any.
    """

    submit: Submit
    submitted_in: int
    prompt_logprobs: list[TokenLogprobs] | None
    is_started: bool = False
    num_cached_tokens: int = 0
    num_chunks: int = 0


class RankLoop:
    """`run` returns after Stop. Built and run in one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        front: RankChannel[ToRank, FromRank],
        eos_token_ids: Iterable[int],
        transport: TransportLink | None = None,
        tiers: HostTierLink | None = None,
        gate: PrefillGate | None = None,
        group: Group | None = None,
        rank: int = 0,
        warm_up_s: float = 0.0,
    ) -> None:
        """warm_up_s: the longest round of the warm-up."""
        self._rank = rank
        self.pace = Pace(warm_up_s, scheduler.config.max_scheduled_tokens)
        self._rounds = RoundLog()
        self._scheduler = scheduler
        self._group: Group = group or Lone()
        self._gating = Gating(scheduler, gate)
        self._tiers = tiers
        self._runner = runner
        self._front = front
        self._eos_token_ids = frozenset(eos_token_ids)
        self._transport = transport
        self._live: dict[RequestId, Live] = {}
        self._outputs: list[Output] = []
        self._is_stopping = False
        self._poller = zmq.Poller()
        self._poller.register(front.socket, zmq.POLLIN)
        for pollable in transport.pollables if transport is not None else ():
            self._poller.register(pollable, zmq.POLLIN)
        for fileno in tiers.filenos() if tiers is not None else ():
            self._poller.register(fileno, zmq.POLLIN)

    def run(self) -> None:
        """Rounds until Stop. Where the group has nothing to run, this waits for a message or an event."""
        while not self._is_stopping:
            self._receive(wait=self._group.is_asleep)
            if not self._group.is_asleep:
                self.run_round()

    def run_round(self) -> None:
        """One round, the same one in every rank of the group."""
        self._rounds.begin()
        plan = self._scheduler.plan(self._gating.options())
        self._rounds.on_planned()
        wants_round = plan.has_moves or self._gating.holds_prefill
        rows = self._group.agree(self._gating.row(plan), wants_round=wants_round)
        self._rounds.on_gathered()
        self._gating.observe(rows)
        self._announce_plan(plan)
        copied = self._move_between_tiers(plan)
        if plan.batch_size or self._group.others_compute:
            self._compute(plan)
        self._advance_links(copied)
        self._flush()
        self._rounds.note(plan, self._gating, rows, self._group.round_number, self._num_transfers)

    def _compute(self, plan: RoundPlan) -> None:
        """One forward and what came of it; where only others have rows, this rank's part in theirs."""
        self._rounds.begin_forward()
        if not plan.batch_size:
            self._runner.idle()
            self._rounds.end_forward()
            return
        result = self._timed(plan)
        self._rounds.end_forward()
        self._collect_prompt_logprobs(result)
        self._carry_out(self._scheduler.advance([StepDone(plan.round_id, result.tokens)]), result)

    def _timed(self, plan: RoundPlan) -> RoundResult:
        start_s = time.monotonic()
        result = self._runner.execute(plan)
        self.pace.observe(sum(row.end - row.start for row in plan.prefill), time.monotonic() - start_s)
        return result

    @property
    def _num_transfers(self) -> int | None:
        """KV that is pulled into this rank or leased from it."""
        return self._scheduler.num_transfers + self._scheduler.num_leases if self._transport is not None else None

    def _move_between_tiers(self, plan: RoundPlan) -> list[Event]:
        """Make the copies that the forward relies on, start what may run beside it."""
        if self._tiers is None:
            return []
        self._tiers.begin(plan.write_backs, plan.fetches, plan.stores)
        return self._tiers.copy(plan.copies)

    def _advance_links(self, copied: Iterable[Event] = ()) -> None:
        """Tell the scheduler what its copies, the tiers and the transport thread did."""
        events = list(copied)
        events += self._tiers.events() if self._tiers is not None else []
        events += self._transport.events() if self._transport is not None else []
        self._carry_out(self._scheduler.advance(events))
        if events:
            self._group.on_news()

    # ------------------------------------------------------------ in

    def _receive(self, *, wait: bool) -> None:
        if wait:
            self._poller.poll()
        messages = self._front.receive_all()
        for message in messages:
            self._on_message(message)
        self._advance_links()
        if any(isinstance(message, WORK) for message in messages):
            self._group.on_news()
        self._flush()

    def _on_message(self, message: ToRank) -> None:
        match message:
            case Submit():
                self._on_submit(message)
            case Abort():
                self._carry_out(self._scheduler.abort(message.request_id))
            case GiveUpTransfer():
                failed = TransferFailed(message.transfer_id, message.forced_output, message.stays_remote)
                self._carry_out(self._scheduler.advance([failed]))
            case TransferAccepted():
                self._carry_out(self._scheduler.advance([KvAccepted(message.transfer_id)]))
            case AskLoad():
                self._on_ask_load(message)
            case AskRounds():
                rounds, num_lost = self._rounds.since(message.after, message.most)
                newest, offset_us = self._rounds.newest, self._rounds.unix_offset_us
                self._front.send(RoundsReport(message.number, newest, rounds, num_lost, offset_us))
            case Ping():
                self._front.send(Pong(self._scheduler.counters.prompt_tokens_computed, self.pace.longest_s))
            case Wake():
                self._group.on_wake(message.number)
            case Stop():
                self._is_stopping = True

    def _on_submit(self, message: Submit) -> None:
        sampling = message.request.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        submission = Submission(
            request_id=message.request.request_id,
            prompt=message.request.prompt,
            max_new_tokens=sampling.max_new_tokens,
            route=message.route,
            min_new_tokens=sampling.min_new_tokens,
            stop_token_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_token_ids,
            peer_cached_tokens=message.peer_cached_tokens,
            reads_prefix_cache=sampling.prompt_logprobs is None,
            priority=message.request.priority,
        )
        try:
            self._scheduler.submit(submission)
        except PdserveError as error:
            self._outputs.append(_failure(submission.request_id, error))
        else:
            wants_prompt = sampling.prompt_logprobs is not None
            self._live[submission.request_id] = Live(
                message, self._scheduler.counters.rounds, [] if wants_prompt else None
            )

    def _on_ask_load(self, message: AskLoad) -> None:
        integrity = ""
        if message.check_integrity:
            try:
                self._scheduler.check_integrity()
            except AssertionError as error:
                integrity = str(error) or "integrity check failed"
        self._front.send(LoadReport(message.number, self.load(), integrity))

    def load(self) -> RankLoad:
        scheduler = self._scheduler
        transport = self._transport.counters() if self._transport else {}
        tiers = self._tiers.counters() if self._tiers else {}
        return RankLoad(
            rank=self._rank,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_uncached_tokens=scheduler.num_waiting_tokens,
            num_blocks=scheduler.config.num_blocks,
            num_held_blocks=scheduler.num_held_blocks,
            num_cached_blocks=scheduler.num_cached_blocks,
            num_quarantined_blocks=scheduler.num_draining_blocks,
            num_live_leases=transport.pop("live_leases", 0),
            num_open_transfers=scheduler.num_transfers,
            counters={
                **asdict(scheduler.counters),
                **transport,
                **tiers,
                **self._gating.counters,
                **self._group.counters(),
                **self._rounds.counters(),
            },
        )

    # ------------------------------------------------------------ a plan goes out

    def _announce_plan(self, plan: RoundPlan) -> None:
        for start in plan.starts:
            live = self._live[start.request_id]
            live.num_cached_tokens = start.num_cached_tokens
            if not live.is_started:
                live.is_started = True
                self._gating.on_first_chunk(plan.round_id - live.submitted_in)
            self._runner.start(start, live.submit.request)
            if live.submit.route.decode is Side.REMOTE:
                self._link.submit(OpenLease(LeaseId(start.request_id)))
        for reserved in plan.reservations:
            self._link.submit(
                OpenPull(reserved.transfer_id, reserved.num_cached_tokens, reserved.num_prompt_tokens, reserved.blocks)
            )
            self._front.send(Reserved(reserved.request_id, reserved.transfer_id, reserved.num_cached_tokens))
        for taken in plan.taken_back:
            self._link.submit(AbandonPull(taken.transfer_id))
            self._front.send(ReservationTakenBack(taken.request_id, taken.transfer_id))
        self._carry_out(plan.failed)

    @property
    def _link(self) -> TransportLink:
        assert self._transport is not None, "a request with a remote side on a rank without a transport"
        return self._transport

    # ------------------------------------------------------------ what came of it

    def _collect_prompt_logprobs(self, result: RoundResult) -> None:
        for request_id, entries in result.prompt_logprobs.items():
            collected = self._live[request_id].prompt_logprobs
            assert collected is not None, f"{request_id} did not ask for the prompt's log probabilities, or had them"
            collected += entries

    def _carry_out(self, outcomes: Iterable[Outcome | RequestFailed], result: RoundResult | None = None) -> None:
        for outcome in outcomes:
            match outcome:
                case TokenDrawn():
                    self._on_token(outcome, result)
                case AnswerEnded(request_id, finish, matched):
                    self._outputs.append(Output(request_id, finish=finish, matched_stop_token=matched))
                    del self._live[request_id]
                case ChunkComputed():
                    self._on_chunk(outcome)
                case RequestAborted():
                    self._outputs.append(Output(outcome.request_id, finish=FinishReason.ABORT))
                    self._live.pop(outcome.request_id, None)
                case RequestFailed():
                    self._outputs.append(_failure(outcome.request_id, outcome.error))
                    self._live.pop(outcome.request_id, None)
                case LeaseUnwanted():
                    self._link.submit(DropLease(LeaseId(outcome.request_id)))
                case TransferUnwanted():
                    self._link.submit(AbandonPull(outcome.transfer_id))

    def _on_token(self, drawn: TokenDrawn, result: RoundResult | None) -> None:
        assert result is not None, "a token without a round"
        live = self._live[drawn.request_id]
        logprobs = result.logprobs.get(drawn.sample)
        self._outputs.append(
            Output(
                drawn.request_id,
                (drawn.token,),
                (logprobs,) if logprobs is not None else (),
                drawn.finish,
                drawn.matched_stop_token,
                live.num_cached_tokens,
                None if live.prompt_logprobs is None else tuple(live.prompt_logprobs),
                live.num_chunks,
            )
        )
        live.prompt_logprobs = None
        if drawn.finish is not None or live.submit.route.decode is Side.REMOTE:
            del self._live[drawn.request_id]

    def _on_chunk(self, chunk: ChunkComputed) -> None:
        self._live[chunk.request_id].num_chunks += 1
        self._link.submit(
            AnnounceChunk(
                LeaseId(chunk.request_id), chunk.first_token, chunk.end_token, chunk.blocks, chunk.generations
            )
        )

    def _flush(self) -> None:
        if self._outputs:
            self._front.send(Outputs(self._outputs))
            self._outputs = []


def _failure(request_id: RequestId, error: PdserveError) -> Output:
    return Output(request_id, error_name=type(error).__name__, error_message=error.message)
