"""A run of `pdserve bench serve`: the servers in turns under every load, and what is shown of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
from collections.abc import Sequence

from rich.console import Console

from pdserve.bench.policy_runs import Model
from pdserve.bench.serve.chosen import chosen_kinds, chosen_loads
from pdserve.bench.serve.command import MODEL
from pdserve.bench.serve.figures import Slo, figures
from pdserve.bench.serve.loads import Load
from pdserve.bench.serve.picture import write_png
from pdserve.bench.serve.report import as_json, as_markdown, print_results, write_markdown
from pdserve.bench.serve.results import Results, Run
from pdserve.bench.serve.servers import Connect, Kind, at_addresses
from pdserve.bench.serve.usage import Usage
from pdserve.client import Client
from pdserve.commands.tables import write_json
from pdserve.demo_prompts import diary
from pdserve.errors import PdserveError
from pdserve.model import hub
from pdserve.model.progress import Progress, show_progress
from pdserve.node_process import interrupted_by_sigterm

MIB = 2**20
TOKENIZE_S = 30.0


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """0; 1 where a server did not serve to the end, or answered nothing under some load."""
    slo = Slo(arguments.slo_ttft_ms / 1e3, arguments.slo_itl_ms / 1e3)
    with interrupted_by_sigterm(), show_progress() as progress:
        kinds, text = _servers(arguments, progress)
        loads = chosen_loads(arguments, text)
        results = measure(kinds, loads, slo, arguments.repeats, progress)
    print_results(results, slo, Console(highlight=False, stderr=arguments.json == "-"))
    if arguments.json:
        write_json(arguments.json, as_json(results, slo))
    if arguments.markdown:
        write_markdown(arguments.markdown, as_markdown(results, slo, shlex.join(["pdserve", "bench", "serve", *argv])))
    if arguments.png:
        write_png(arguments.png, results, slo)
    return int(not results.is_whole)


def _servers(arguments: argparse.Namespace, progress: Progress) -> tuple[list[Kind], Sequence[int]]:
    """With the tokens that prompts are drawn from."""
    if arguments.address is None:
        model = Model.of(hub.resolve(arguments.model or MODEL, progress=progress))
        return chosen_kinds(arguments, model), model.text
    with Client(arguments.address, timeout_s=TOKENIZE_S) as client:
        return [at_addresses(arguments.address)], client.tokenize(diary())


def measure(kinds: Sequence[Kind], loads: Sequence[Load], slo: Slo, repeats: int, progress: Progress) -> Results:
    """Each repetition starts every server once, puts all loads to it and ends it; one that breaks is told as such."""
    results = Results.empty([load.name for load in loads], [kind.name for kind in kinds])
    for repeat in range(repeats):
        for kind in kinds:
            step = f"{kind.name}, turn {repeat + 1}"
            progress(step, 0, len(loads))
            try:
                with kind.start() as connect:
                    for number, load in enumerate(loads, 1):
                        run = asyncio.run(_put(load, connect, repeat, slo, kind.is_started))
                        results.measured[load.name][kind.name].runs.append(run)
                        progress(step, number, len(loads))
            except PdserveError as error:
                results.broken[kind.name] = error.message
    return results


async def _put(load: Load, connect: Connect, repeat: int, slo: Slo, has_usage: bool) -> Run:
    """has_usage: the server's processes are ours to look at."""
    usage = Usage() if has_usage else None
    async with connect() as server:
        with usage or contextlib.nullcontext():
            driven = await load.put_to(server, repeat)
    found = figures(driven, slo)
    if usage is not None:
        found |= {"cpu_s": usage.cpu_s, "peak_mib": usage.peak_bytes / MIB}
    return Run(driven, found)
