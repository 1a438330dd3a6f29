"""`pdserve simulate interference`: a stream beside a long prompt. Without --costs, published figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.commands.arguments import real, whole
from pdserve.commands.simulate.flags import Asked, read_flags, simulate_parser
from pdserve.commands.simulate.output import console_of, describe, timeline_of, write_pictures
from pdserve.commands.tables import write_json
from pdserve.faults import Fault
from pdserve.sim import cost_files, published
from pdserve.sim.deployment import Deployment
from pdserve.sim.interference import Interference, interfere
from pdserve.sim.pair import Pair
from pdserve.sim.published import Check

PAIR_FLAGS = {
    "victim_output_tokens": "tokens that the victim streams",
    "attacker_prompt_tokens": "tokens of the attacker's prompt, at most what the deployment holds",
    "attack_s": "seconds from the victim's call to the attacker's",
}
AS_GIVEN = "as given"
NOTES = (
    "stream: from first to last token, as a chunk of seed-flat costs 1.35 s however short the prompt is",
    "added: as simulated; estimated: as the source reckons it, 58 / n decode steps of 0.17 s, which at its own",
    "59.4 tokens/s take 0.017 s",
)


def interference(argv: list[str]) -> int:
    """1 where a published figure isn't met."""
    parser = simulate_parser(
        "pdserve simulate interference",
        "A victim streams while an attacker's long prompt is prefilled. Without --costs and knobs: published figures\n"
        "of decode interleaving beside simulated ones. With them: the same experiment on that deployment.",
        "pdserve simulate interference\n"
        "  pdserve simulate interference --costs smollm2-cpu --prefill-decode-interval 4",
    )
    group = parser.add_argument_group("The pair")
    defaults = Pair()
    for name, text in PAIR_FLAGS.items():
        default = getattr(defaults, name)
        flag = "--" + name.replace("_", "-")
        kind = real(flag, least=0) if name == "attack_s" else whole(flag, 2 if name == "victim_output_tokens" else 1)
        group.add_argument(flag, type=kind, metavar="N", help=f"{text} (default: {default:g})")
    # Knobs alone are tried on the deployment that the experiment is of.
    asked = read_flags(argv, parser, published.FLAT, _misplaced)
    if asked.has_costs or asked.has_knobs:
        return _experiment(asked)
    return _beside_published(asked)


def _misplaced(asked: Asked) -> Iterable[Fault]:
    """Flags of a pair, or pictures of one, where the published experiment is run as it was."""
    if asked.has_costs or asked.has_knobs:
        return
    for name in (*vars(asked.own), *_pictures(asked)):
        reason = "the published figures are of one pair; give --costs to run another, or to draw it"
        yield Fault("--" + name.replace("_", "-"), None, reason)


def _beside_published(asked: Asked) -> int:
    console = console_of(asked)
    tables: dict[str, dict[str, Any]] = {}
    are_met = True
    for name in (published.FLAT, published.CONTEXT):
        cases = published.run_cases(cost_files.load(name).deployment, Pair(), asked.seed)
        checks = published.checks(name, cases)
        console.print(f"[bold]{name}[/bold]: a victim of 699 tokens, an attacker of 200,019 6 s later")
        print_cases(cases, console)
        print_checks(checks, console)
        are_met &= all(check.is_met for check in checks)
        tables[name] = {
            "checks": [check.figures() for check in checks],
            "cases": {case: run.figures() for case, run in cases.items()},
        }
    for note in NOTES:
        console.print(note, style="dim")
    if asked.json:
        write_json(asked.json, tables)
    return int(not are_met)


def _experiment(asked: Asked) -> int:
    console, deployment = console_of(asked), asked.deployment
    pair = _pair(asked, deployment)
    timeline = timeline_of(asked, f"a stream beside a prompt of {pair.attacker_prompt_tokens:,} tokens")
    cases = {} if deployment.is_split else published.run_cases(deployment, pair, asked.seed)
    if deployment.is_split:
        cases[published.ALONE] = interfere(deployment, _alone(pair), asked.seed)
    is_bare = not deployment.is_split and deployment == deployment.without_policies()
    cases[published.UNSET if is_bare else AS_GIVEN] = interfere(
        deployment, pair, asked.seed, [timeline] if timeline else []
    )
    console.print(
        f"[bold]{deployment.costs.name}[/bold]: a victim of {pair.victim_output_tokens:,} tokens, "
        f"an attacker of {pair.attacker_prompt_tokens:,}, {pair.attack_s:g} s later"
    )
    console.print(deployment.describe(), style="dim")
    print_cases(cases, console)
    write_pictures(asked, timeline)
    if asked.json:
        found: dict[str, Any] = describe(asked)
        write_json(asked.json, {**found, "cases": {case: run.figures() for case, run in cases.items()}})
    return 0


def _pictures(asked: Asked) -> list[str]:
    return [name for name, file in (("png", asked.png), ("html", asked.html)) if file]


def _alone(pair: Pair) -> Pair:
    return Pair(pair.victim_prompt_tokens, pair.victim_output_tokens, has_attacker=False)


def _pair(asked: Asked, deployment: Deployment) -> Pair:
    """The pair that was asked for, or the published one with an attacker that this deployment can hold."""
    given = vars(asked.own)
    longest = deployment.longest_request - Pair().attacker_output_tokens
    victim = min(Pair().victim_output_tokens, deployment.longest_request - Pair().victim_prompt_tokens)
    values = {
        "attacker_prompt_tokens": min(Pair().attacker_prompt_tokens, longest),
        "victim_output_tokens": victim,
        **given,
    }
    return Pair(**values)


def print_cases(cases: dict[str, Interference], console: Console) -> None:
    """What happened in each: the victim's stream and gaps, the attacker's TTFT, its chunks, the decode rounds between
    them, and the share of time that these added.
    """
    table = Table(
        "seconds", "stream", "gap", "> 5", "> 20", "attacker", "chunks", "decodes", "added", box=SIMPLE,
        pad_edge=False,
    )  # fmt: skip
    for case, run in cases.items():
        table.add_row(
            case,
            f"{run.victim_stream_s:.2f}",
            f"{run.worst_gap_s:.3f}",
            f"{run.gaps_over(5)}",
            f"{run.gaps_over(20)}",
            "–" if run.attacker_ttft_s is None else f"{run.attacker_ttft_s:.2f}",
            f"{run.num_chunks}",
            f"{run.num_decode_rounds}",
            "–" if run.attacker_ttft_s is None else f"{run.prefill_added_share:.2%}",
        )
    console.print(table)


def print_checks(checks: list[Check], console: Console) -> None:
    """Published beside simulated."""
    table = Table("", "", "published", "simulated", "deviation", "", box=SIMPLE, pad_edge=False)
    for check in checks:
        wanted = check.published
        ends = dict.fromkeys([wanted.low, wanted.high])
        table.add_row(
            wanted.case,
            wanted.figure,
            f"{'–'.join(f'{end:g}' for end in ends)} {wanted.unit}",
            f"{check.simulated:.4g} {wanted.unit}",
            "exact" if wanted.tolerance == 0 else f"{check.deviation:+.1%}, ± {wanted.tolerance:.0%}",
            "ok" if check.is_met else "[red]OUT[/red]",
        )
    console.print(table)
