"""The life of a node: one rank after another behind one gRPC server.

port free? ─▶ model ─▶ rank ready ─▶ services ─▶ SERVING ─▶ signal ─▶ drain ─▶ rank ended
                           ▲                        │ rank died
                           └───── NOT_SERVING ◀─────┘
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from pdserve.assembly.assembly import Assembly
from pdserve.assembly.headless import Headless
from pdserve.config import OnRankDeath, ServerArgs, cache_dir
from pdserve.engine.messages import Loading
from pdserve.engine.tokenizer import HfTokenizer
from pdserve.errors import StartupError
from pdserve.model.digests import DigestCache
from pdserve.model.hub import resolve
from pdserve.model.model_config import read_config
from pdserve.model.progress import show_progress
from pdserve.model.revision import Revision, read_revision
from pdserve.node.grid import check_grid, goes_in_step
from pdserve.node.restarts import MAX_DEATHS, WINDOW_S, Restarts
from pdserve.node.site import Build, Parts, Site, Sites
from pdserve.node.statistics import log_start, log_stats
from pdserve.node.waiting import Signals, background, first_of, unless
from pdserve.rpc.server import RpcServer

log = logging.getLogger(__name__)

FAILED = 1

Progress = Callable[[str, int, int], None]


def run(args: ServerArgs, build: Build, *, has_transport: bool) -> None:
    """Serve until stopped. Raises StartupError; SystemExit when the rank was lost for good."""
    args.validate()
    asyncio.run(_serve(args, build, has_transport))


async def _serve(args: ServerArgs, build: Build, has_transport: bool) -> None:
    stop = Signals()
    with ExitStack() as stack:
        if not args.node_rank:
            stack.enter_context(_held_port(args))
        progress = stack.enter_context(show_progress())
        directory = await asyncio.to_thread(resolve, args.model, progress=progress)
        # The ranks read it too; what is wrong with a model is told before its weights are read.
        config = read_config(directory)
        check_grid(config, args)
        tokenizer = HfTokenizer(directory)
        digests = DigestCache(cache_dir() / "digests")
        if (model := await _revision(directory, digests, stop, progress)) is None:
            return
        if args.node_rank:
            await unless(stop.first, Headless(args, model, digests).run())
            return
        async with _assembly(args, model) as assembly:
            sites = Sites(args, model, digests, tokenizer, has_transport, goes_in_step(config, args), assembly)
            await Life(args, sites, build, stop, progress).run()


@asynccontextmanager
async def _assembly(args: ServerArgs, model: Revision) -> AsyncIterator[Assembly | None]:
    """None where all ranks are on this machine."""
    if args.nnodes == 1:
        yield None
        return
    assembly = Assembly(args.nnodes, model.text)
    async with assembly.listening(*args.meeting_point):
        yield assembly


class _Stopped(Exception):
    """Ends what runs in another thread."""


async def _revision(directory: Path, digests: DigestCache, stop: Signals, progress: Progress) -> Revision | None:
    """Of the model there; None when the node was told to stop before all was read, which can take minutes."""

    def tell(step: str, done: int, total: int) -> None:
        if stop.first.is_set():
            raise _Stopped
        progress(step, done, total)

    try:
        return await asyncio.to_thread(read_revision, directory, digests, tell)
    except _Stopped:
        return None


class Life:
    """`run` returns when the node was told to stop."""

    def __init__(self, args: ServerArgs, sites: Sites, build: Build, stop: Signals, progress: Progress) -> None:
        self._args = args
        self._sites = sites
        self._build = build
        self._stop = stop
        self._progress = progress
        self._restarts = Restarts()
        self._server: RpcServer | None = None

    async def run(self) -> None:
        """Raises StartupError where the first rank cannot start; SystemExit where the node cannot go on."""
        try:
            while not self._stop.first.is_set():
                born_s = time.monotonic()
                if (reason := await self._live()) is not None:
                    await self._pause(reason, born_s)
        finally:
            if self._server is not None:
                await self._server.stop(0)

    async def _live(self) -> str | None:
        """One rank from its start to its end: what killed it, None for an end that was asked for."""
        opening = self._sites.open(lambda loading: _show(self._progress, loading))
        try:
            site = await unless(self._stop.first, opening.__aenter__())
        except StartupError as error:
            if self._server is None:
                raise
            return error.message
        if site is None:
            return None
        try:
            await self._serve_site(site)
            return site.ranks.lost_reason if site.ranks.lost.is_set() else None
        finally:
            await opening.__aexit__(None, None, None)

    async def _serve_site(self, site: Site) -> None:
        """Until the rank is lost or the node was drained. Raises SystemExit when work beside the services failed."""
        parts = self._build(site)
        server = await self._server_of(parts, site)
        async with background(*parts.background, log_stats(parts, self._args.stats_interval_s)) as failed:
            ends = (self._stop.first.wait, site.ranks.lost.wait)
            await first_of(parts.before_serving(), *(end() for end in ends), failed)
            await server.set_serving(not site.ranks.lost.is_set())
            await first_of(*(end() for end in ends), failed)
            if site.ranks.lost.is_set():
                await server.set_serving(False)
            elif self._stop.first.is_set():
                log.info("draining, requests left: %d; a second signal ends them", site.ranks.num_live)
                await first_of(
                    server.stop(self._args.drain_timeout_s), self._stop.second.wait(), site.ranks.lost.wait()
                )
                await server.stop(0)
            else:
                raise SystemExit(FAILED)

    async def _server_of(self, parts: Parts, site: Site) -> RpcServer:
        """The node's one server, which takes these services from now on."""
        if self._server is None:
            args = self._args
            self._server = RpcServer(
                parts.services,
                host=args.host,
                port=args.port,
                max_message_bytes=args.max_message_mib * 2**20,
                has_reflection=args.reflection,
            )
            log_start(site, await self._server.start())
        else:
            self._server.use(parts.services)
            log.info("serving again with a new rank (incarnation %s)", site.incarnation)
        return self._server

    async def _pause(self, reason: str, born_s: float) -> None:
        """Until the next rank may start. Raises SystemExit where none may."""
        if self._stop.first.is_set():
            return
        if self._args.on_rank_death == OnRankDeath.EXIT:
            log.error("%s: every live request has failed, the node ends", reason)
            raise SystemExit(FAILED)
        delay_s = self._restarts.delay_s(born_s, time.monotonic())
        if delay_s is None:
            log.error("%s: the node ends, as more than %d ranks died within %g s", reason, MAX_DEATHS, WINDOW_S)
            raise SystemExit(FAILED)
        log.error("%s: every live request has failed, a new rank starts in %g s", reason, delay_s)
        await unless(self._stop.first, asyncio.sleep(delay_s))


@contextmanager
def _held_port(args: ServerArgs) -> Iterator[None]:
    """That it is taken is told before minutes go into loading a model. Until the server listens there, the kernel gives
    it to nobody who asks for any port, such as the group's own sockets."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((args.host, args.port))
        except OSError as error:
            raise StartupError(
                f"cannot listen on {args.address}: {error.strerror}; choose others with --host and --port"
            ) from None
        yield


def _show(progress: Progress, loading: Loading) -> None:
    progress(loading.stage, loading.done, loading.total)
