"""The handoff is tied to the ranks' life: who stands still is found out by silence, who is only busy is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from decode_node import handoff
from pdserve.engine.messages import LeaseGone
from pdserve.rpc.handoff import Computing, Queued, Renew
from pdserve.scheduler.plan import RoundPlan
from prefill_node import handoff as prefill_handoff
from tests.roles.cluster import Cluster, Told, answer_to, ask, prompt_of, settle
from tests.roles.inside import CHUNK, Held, Size
from tests.roles.relay import Asked, Passed, relay_to

PROMPT = prompt_of(3 * CHUNK + 10)
LOCAL = prompt_of(20, seed=1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life are given far more often, and waited for far less, than between machines."""
    monkeypatch.setattr(prefill_handoff, "PROGRESS_S", 0.05)
    monkeypatch.setattr(handoff, "SILENCE_S", 1.0)


@pytest.mark.usefixtures("quick")
async def test_a_prefill_node_whose_loop_stands_still_is_given_up_long_before_the_deadline(nodes: Cluster) -> None:
    """Its front lives and its transport thread too."""
    prefill = await nodes.start_prefill(Size(lease_s=0.6))
    decode = await nodes.decode_of(prefill.address, transfer_timeout_s=3600.0)
    prefill.runner.hold(from_token(CHUNK))
    answer = await ask(decode, PROMPT, 8)
    assert answer.placement == "local;reason=transfer_failed"
    prefill.runner.release()
    await settle(prefill, decode)


@pytest.mark.usefixtures("quick")
async def test_a_loop_in_a_forward_no_longer_than_its_longest_is_waited_for(nodes: Cluster) -> None:
    """The same, but for what its warm-up said of how long a chunk may take; it has seen no real one yet."""
    prefill = await nodes.start_prefill(Size(lease_s=0.6, longest_chunk_s=10.0))
    async with relay_to(prefill, nodes.journal) as relay:
        num_told = 0

        def count(said: object) -> list[Passed]:
            nonlocal num_told
            num_told += isinstance(said, Queued | Computing)
            if num_told == 40:  # for twice as long as silence is borne
                prefill.runner.release()
            return [said]  # type: ignore[list-item]

        relay.change = count
        decode = await nodes.decode_of(relay.address)
        prefill.runner.hold()
        answer = await ask(decode, PROMPT, 8)
        assert answer.placement == f"remote;peer={relay.address}"
        assert num_told >= 40
        await settle(prefill, decode)
        await decode.stop()


@pytest.mark.usefixtures("quick")
async def test_a_chunk_that_takes_longer_than_the_deadline_is_waited_for_where_it_is_known_to(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(Size(longest_chunk_s=10.0))
    async with relay_to(prefill, nodes.journal) as relay:
        num_told = 0

        def count(said: object) -> list[Passed]:
            nonlocal num_told
            num_told += isinstance(said, Queued | Computing)
            if num_told == 30:  # for three times as long as the deadline that was set
                prefill.runner.release()
            return [said]  # type: ignore[list-item]

        relay.change = count
        decode = await nodes.decode_of(relay.address, transfer_timeout_s=0.5)
        prefill.runner.hold()
        assert (await ask(decode, PROMPT, 8)).placement == f"remote;peer={relay.address}"
        assert num_told >= 30
        await settle(prefill, decode)
        await decode.stop()


@pytest.mark.usefixtures("quick")
async def test_a_front_that_did_not_run_for_a_while_listens_before_it_gives_a_peer_up(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    decode = await nodes.decode_of(prefill.address)
    prefill.runner.hold()
    asking = asyncio.create_task(ask(decode, PROMPT, 8))
    await nodes.journal.first(Held, node=prefill.name)
    time.sleep(3 * handoff.SILENCE_S)  # noqa: ASYNC251 - as a machine that has no core for it
    prefill.runner.release()
    assert (await asking).placement == f"remote;peer={prefill.address}"
    await settle(prefill, decode)


async def test_a_decode_node_whose_loop_stands_still_renews_nothing(nodes: Cluster) -> None:
    """Its front lives; a lease that nobody can use any more ends in its own time."""
    prefill = await nodes.start_prefill(Size(lease_s=0.9))
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address, remote_prefill_min_tokens=len(LOCAL) + 1)
        nodes.network.hang(prefill.name)
        asking = asyncio.create_task(ask(decode, PROMPT, 8))
        await nodes.journal.count(Asked, 3, kind=Renew)
        assert not nodes.journal.of(Told, kind=LeaseGone)
        decode.runner.hold()
        other = asyncio.create_task(ask(decode, LOCAL, 8))
        await nodes.journal.first(Held, node=decode.name)
        await nodes.journal.first(Told, node=prefill.name, kind=LeaseGone)
        assert (await prefill.counters())["lease:revoked:expired"] == 1
        decode.runner.release()
        nodes.network.heal(prefill.name)
        answers = [await asking, await other]
        assert [answer.token_ids for answer in answers] == [answer_to(PROMPT, 8), answer_to(LOCAL, 8)]
        assert answers[0].placement == "local;reason=transfer_failed"
        await settle(prefill, decode)
        await decode.stop()


async def test_a_decode_node_in_a_forward_no_longer_than_its_longest_renews_its_leases(nodes: Cluster) -> None:
    """The same, but for what its warm-up said of how long a forward may take."""
    prefill = await nodes.start_prefill(Size(lease_s=0.9))
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(
            relay.address, size=Size(longest_chunk_s=10.0), remote_prefill_min_tokens=len(LOCAL) + 1
        )
        nodes.network.hang(prefill.name)
        asking = asyncio.create_task(ask(decode, PROMPT, 8))
        await nodes.journal.count(Asked, 1, kind=Renew)
        decode.runner.hold()
        other = asyncio.create_task(ask(decode, LOCAL, 8))
        await nodes.journal.first(Held, node=decode.name)
        num_renewed = len(nodes.journal.of(Asked, kind=Renew))
        await nodes.journal.count(Asked, num_renewed + 10, kind=Renew)  # for longer than the lease
        assert not nodes.journal.of(Told, kind=LeaseGone)
        decode.runner.release()
        nodes.network.heal(prefill.name)
        assert (await asking).placement == f"remote;peer={relay.address}"
        await other
        await settle(prefill, decode)
        await decode.stop()


@pytest.mark.usefixtures("quick")
async def test_a_queued_prompt_hears_of_the_work_on_the_one_before_it(nodes: Cluster) -> None:
    """Its place stays the same for as long as that one has chunks left; what the rank has computed does not."""
    prefill = await nodes.start_prefill(Size(num_slots=1))
    async with relay_to(prefill, nodes.journal) as relay:
        told: list[Queued] = []

        def on_queued(said: object) -> list[Passed]:
            if isinstance(said, Queued):
                told.append(said)
                if len(told) == 1:
                    prefill.runner.release()
                    prefill.runner.hold(from_token(2 * CHUNK))
                elif said.rank_tokens_computed > told[0].rank_tokens_computed:
                    prefill.runner.release()
            return [said]  # type: ignore[list-item]

        relay.change = on_queued
        decode = await nodes.decode_of(relay.address)
        prefill.runner.hold(from_token(CHUNK))
        first = asyncio.create_task(ask(decode, PROMPT, 2))
        await nodes.journal.first(Held, node=prefill.name)
        second = asyncio.create_task(ask(decode, prompt_of(70), 2))
        assert {answer.placement for answer in (await first, await second)} == {f"remote;peer={relay.address}"}
        assert {queued.num_ahead for queued in told} == {0}
        assert told[-1].rank_tokens_computed == 2 * CHUNK > told[0].rank_tokens_computed
        await settle(prefill, decode)
        await decode.stop()


def from_token(first: int) -> Callable[[RoundPlan], bool]:
    """Forwards over prompt tokens from `first` on."""
    return lambda plan: any(row.start >= first for row in plan.prefill)
