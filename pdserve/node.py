"""The life of a node, whatever it serves: its rank, its gRPC server, its signals.

port free? ─▶ model ─▶ rank ready ─▶ services ─▶ SERVING ─▶ signal ─▶ drain ─▶ rank ended
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.config import ServerArgs, cache_dir
from pdserve.engine.channel import FrontChannel, private_directory
from pdserve.engine.front import Rank
from pdserve.engine.launch import PolicySpec, RankSpec, TierSpec, TransportSpec
from pdserve.engine.messages import FromRank, FromTransport, Loading, Ready, ToRank, ToTransport
from pdserve.engine.text_generator import TextGenerator, TokenSource
from pdserve.engine.tokenizer import HfTokenizer
from pdserve.errors import NotReady, StartupError
from pdserve.model.hub import resolve
from pdserve.model.model_config import read_config
from pdserve.model.progress import show_progress
from pdserve.request import RankLoad
from pdserve.rpc.generator import Generator, Tokenizer
from pdserve.rpc.inference import InferenceServicer, inference_service
from pdserve.rpc.limits import ModelCard
from pdserve.rpc.server import RpcServer, Service

log = logging.getLogger(__name__)

FAILED = 1


@dataclass(frozen=True, slots=True)
class Site:
    """What a node's services are built on. incarnation: of this life of the node."""

    args: ServerArgs
    rank: Rank
    ready: Ready
    tokenizer: Tokenizer
    incarnation: str

    def text(self, source: TokenSource) -> TextGenerator:
        """Text answers over a source of tokens."""
        return TextGenerator(source, self.tokenizer)

    def inference(self, generator: Generator) -> Service:
        """pdserve.v1.Inference over `generator`."""
        card = ModelCard(
            served_name=self.args.public_name,
            architecture=self.ready.fingerprint.architecture,
            max_model_len=self.ready.max_model_len,
            vocab_size=self.ready.vocab_size,
            eos_token_ids=self.ready.eos_token_ids,
            revision=self.ready.fingerprint.model_revision,
        )
        settings = {"role": str(self.args.role), "incarnation": self.incarnation}
        return inference_service(InferenceServicer(generator, self.tokenizer, card, settings=settings))


@dataclass(frozen=True, slots=True)
class Parts:
    """What one kind of node is made of. background: runs for as long as the node serves."""

    services: list[Service]
    loads: Callable[[], Awaitable[list[RankLoad]]]
    background: list[Coroutine[Any, Any, None]] = field(default_factory=list)


Build = Callable[[Site], Parts]


def run(args: ServerArgs, build: Build, *, has_transport: bool) -> None:
    """Serve until stopped. Raises StartupError; SystemExit when the rank was lost."""
    args.validate()
    asyncio.run(_serve(args, build, has_transport))


async def _serve(args: ServerArgs, build: Build, has_transport: bool) -> None:
    stop = _Signals()
    _check_port(args)
    with ExitStack() as stack:
        progress = stack.enter_context(show_progress())
        directory = await asyncio.to_thread(resolve, args.model, progress=progress)
        read_config(directory)  # the rank reads it too; what is wrong with a model is told before its weights are read
        tokenizer = HfTokenizer(directory)
        sockets = stack.enter_context(private_directory())
        incarnation = uuid.uuid4().hex
        spec = _rank_spec(args, directory, sockets, incarnation, has_transport)
        rank = _rank(args, spec)
        try:
            ready = await _or_stopped(
                stop,
                rank.start(
                    spec,
                    timeout_s=args.startup_timeout_s,
                    on_loading=lambda loading: _show(progress, loading),
                ),
            )
            if ready is not None:
                await _serve_rank(Site(args, rank, ready, tokenizer, incarnation), build, stop)
        finally:
            await rank.stop()


async def _serve_rank(site: Site, build: Build, stop: _Signals) -> None:
    args = site.args
    parts = build(site)
    server = RpcServer(
        parts.services,
        host=args.host,
        port=args.port,
        max_message_bytes=args.max_message_mib * 2**20,
        has_reflection=args.reflection,
    )
    port = await server.start()
    async with _background(*parts.background, _log_stats(parts, args.stats_interval_s)) as background:
        await server.set_serving(True)
        _log_start(site, port)
        await _first_of(stop.first.wait(), site.rank.lost.wait(), background)
        if site.rank.lost.is_set():
            log.error("%s: every live request has failed, the node ends", site.rank.lost_reason)
        elif stop.first.is_set():
            log.info("draining, requests left: %d; a second signal ends them", site.rank.num_live)
            await _first_of(server.stop(args.drain_timeout_s), stop.second.wait(), site.rank.lost.wait())
        await server.stop(0)
    if not stop.first.is_set():
        raise SystemExit(FAILED)


@asynccontextmanager
async def _background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Future[Any]]:
    """Runs for as long as the block; the future is done when any of it ended, which none of it should."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    any_ended = asyncio.create_task(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
    try:
        yield any_ended
    finally:
        for task in (*tasks, any_ended):
            task.cancel()
        for result in await asyncio.gather(*tasks, any_ended, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("background work failed: the node ends", exc_info=result)


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    """Returns when one of them is done; those made here are cancelled then."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future, awaitable in zip(futures, awaitables, strict=True):
        if future is not awaitable:
            future.cancel()


class _Signals:
    """SIGTERM and SIGINT, counted: the first drains, the second ends."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _or_stopped(stop: _Signals, start: Coroutine[Any, Any, Ready]) -> Ready | None:
    """What `start` returns; None when a signal came first."""
    starting = asyncio.create_task(start)
    await _first_of(starting, stop.first.wait())
    if starting.done():
        return starting.result()
    starting.cancel()
    return None


def _check_port(args: ServerArgs) -> None:
    """Told before minutes go into loading a model; the server finds out for good later."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((args.host, args.port))
        except OSError as error:
            raise StartupError(
                f"cannot listen on {args.address}: {error.strerror}; choose others with --host and --port"
            ) from None


def _rank(args: ServerArgs, spec: RankSpec) -> Rank:
    channel: FrontChannel[FromRank, ToRank] = FrontChannel(spec.endpoint, FromRank)
    transport: FrontChannel[FromTransport, ToTransport] | None = None
    if spec.transport is not None:
        transport = FrontChannel(spec.transport.endpoint, FromTransport)
    return Rank(channel, max_live=args.max_num_seqs + args.max_queued_requests, transport=transport)


def _rank_spec(args: ServerArgs, directory: Path, sockets: Path, incarnation: str, has_transport: bool) -> RankSpec:
    transport = TransportSpec(
        name=f"{args.role}-{socket.gethostname()}-{incarnation}-0",
        endpoint=f"ipc://{sockets}/transport",
        lease_s=args.kv_lease_s,
        quarantine_s=args.quarantine_s,
    )
    return RankSpec(
        model_directory=str(directory),
        cache_directory=str(cache_dir()),
        endpoint=f"ipc://{sockets}/loop",
        source=f"{args.role}:{args.port}/rank0",
        num_threads=args.compute_threads,
        block_size=args.block_size,
        num_kv_blocks=args.num_kv_blocks,
        kv_memory_fraction=args.kv_memory_fraction,
        max_num_seqs=args.max_num_seqs,
        chunked_prefill_size=args.chunked_prefill_size,
        max_model_len=args.max_model_len,
        enable_mixed_batch=args.enable_mixed_batch,
        prefix_caching=args.prefix_caching,
        max_outstanding_transfers=args.max_outstanding_prefills,
        log_level=args.log_level,
        log_format=args.log_format,
        transport=transport if has_transport else None,
        policy=_policy_spec(args),
        tiers=TierSpec(args.host_kv_bytes, args.kv_dir, args.kv_dir_bytes),
    )


def _policy_spec(args: ServerArgs) -> PolicySpec:
    gate, fill, cadence = args.prefill_gate, args.fill, args.cadence
    return PolicySpec(
        attempt_interval=gate.attempt_interval if gate else None,
        any_interval=gate.any_interval if gate else None,
        max_open_rounds=args.prefill_max_open_rounds,
        prefill_rounds=cadence.prefill_rounds if cadence else None,
        decode_rounds=cadence.decode_rounds if cadence else 1,
        hold_budget=cadence.hold_budget if cadence else None,
        fill_tokens=fill.tokens if fill else None,
        fill_max_holds=fill.max_holds if fill else 1,
    )


def _show(progress: Callable[[str, int, int], None], loading: Loading) -> None:
    progress(loading.stage, loading.done, loading.total)


def _log_start(site: Site, port: int) -> None:
    ready, block_size = site.ready, site.ready.fingerprint.block_size
    log.info(
        "serving %s as %s on %s:%d: KV blocks of %d tokens: %d, for %d tokens in all (%.1f GiB) and %d a request; "
        "compute threads: %d",
        site.args.public_name,
        site.args.role,
        site.args.host,
        port,
        block_size,
        ready.num_blocks,
        ready.num_blocks * block_size,
        ready.num_blocks * ready.block_bytes / 2**30,
        ready.max_model_len,
        site.args.compute_threads,
    )


async def _log_stats(parts: Parts, interval_s: float) -> None:
    """One line an interval while something happens."""
    before = {"output_tokens": 0, "prompt_tokens_computed": 0}
    while True:
        await asyncio.sleep(interval_s)
        try:
            loads = await parts.loads()
        except NotReady as error:
            log.warning("no statistics: %s", error.message)
            continue
        now = {name: sum(load.counters.get(name, 0) for load in loads) for name in before}
        if now != before:
            log.info(
                "%d running, %d waiting, %.1f prompt and %.1f output tokens/s, %d of %d KV blocks held",
                sum(load.num_running for load in loads),
                sum(load.num_waiting for load in loads),
                (now["prompt_tokens_computed"] - before["prompt_tokens_computed"]) / interval_s,
                (now["output_tokens"] - before["output_tokens"]) / interval_s,
                sum(load.num_held_blocks for load in loads),
                sum(load.num_blocks for load in loads),
            )
        before = now
