"""`pdserve simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve import cli
from pdserve.commands.simulate import WHAT
from pdserve.sim import cost_files

EXCERPT = Path(__file__).parents[1] / "sim" / "mooncake_excerpt.jsonl"
SMALL = ("--costs", "seed-context", "--requests", "20", "--prompt-tokens", "uniform:100:4000", "--output-tokens", "20")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The figures of a run that does well."""
    assert cli.main(["simulate", *words, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["simulate", *words]) == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------- the published figures


def test_interference_shows_published_figures_beside_simulated_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "interference"]) == 0
    shown = capsys.readouterr().out
    assert "seed-flat" in shown
    assert "seed-context" in shown
    assert "OUT" not in shown
    for published in ("11.7–11.8 s", "77 s", "90.4 s", "90.6 s", "21.6 s", "10.8 s", "13.03 s", "5.4 s", "0.8 %"):
        assert published in shown


def test_a_published_figure_that_is_missed_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.sim.published.TOLERANCE", 0.001)
    assert cli.main(["simulate", "interference"]) == 1
    assert "OUT" in capsys.readouterr().out


def test_interference_as_json_has_every_check_and_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "interference")
    assert list(found) == ["seed-flat", "seed-context"]
    for table in found.values():
        assert list(table["cases"]) == ["victim alone", "unset", "n = 16", "n = 8", "n = 4"]
        assert all(check["is_met"] for check in table["checks"])
    check = found["seed-flat"]["checks"][0]
    assert list(check) == [
        *("case", "figure", "unit", "published", "simulated", "deviation", "tolerance", "is_met"),
    ]
    case = found["seed-flat"]["cases"]["n = 8"]
    assert (case["gaps_over_5_s"], case["num_chunks"], case["num_decode_rounds"]) == (7, 58, 7)


def test_interference_on_a_deployment_of_one_s_own_runs_its_policy_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", "seed-context", "--attacker-prompt-tokens", "20000", "--attack-s", "2")
    found = run(capsys, "interference", *words, "--decode-interleave-every", "2")
    given = found["cases"]["as given"]
    assert (given["num_chunks"], given["num_decode_rounds"]) == (6, 2)
    assert found["cases"]["n = 4"]["num_decode_rounds"] == 1
    assert "--decode-interleave-every 2" in found["deployment"]


def test_an_attacker_is_no_longer_than_what_the_deployment_holds(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "interference", "--costs", "seed-flat", "--max-model-len", "10000")
    assert found["cases"]["unset"]["num_chunks"] == 3


def test_interference_between_two_nodes_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "interference", "--num-prefill-nodes", "1", "--num-decode-nodes", "1")
    assert found["cases"]["as given"]["worst_gap_s"] < 0.1


# ---------------------------------------------------------------- loads


def test_a_run_has_stable_names_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("poisson", "--rate", "0.5", *SMALL, "--slo-ttft-ms", "5000", "--slo-itl-ms", "2000")
    found = run(capsys, *words, "--num-prefill-nodes", "1", "--num-decode-nodes", "1")
    spreads = [
        f"{name}_{measure}_s"
        for name in ("ttft", "itl", "tpot", "handoff_exposed")
        for measure in ("mean", "p50", "p95", "p99", "max")
    ]
    names = [
        *("workload", "costs", "deployment", "num_ranks", "seed"),
        *("num_requests", "num_finished", "num_failed", "failures", "elapsed_s"),
        *("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "cached_share", "handoff_bytes", "totals"),
        *("gaps_over_1_s", "gaps_over_5_s", "gaps_over_20_s"),
        *("slo_ttft_s", "slo_itl_s", "goodput_per_s", "met_share"),
        *spreads,
    ]
    assert [name for name in names if name not in found] == []
    assert (found["num_finished"], found["num_ranks"], found["slo_ttft_s"]) == (20, 2, 5.0)
    assert found["handoff_bytes"] == found["totals"]["num_handoff_bytes"] > 0
    assert found["totals"]["counters"]["output_tokens"] >= 20 * 20


def test_the_same_seed_gives_the_same_figures_and_another_others(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (run(capsys, "poisson", "--rate", "0.5", *SMALL, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first["ttft_mean_s"] != other["ttft_mean_s"]


def test_a_closed_loop_never_has_more_requests_than_users(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "closed", "--users", "3", "--think-s", "1", *SMALL)
    assert found["totals"]["peak_live"] == 3
    assert found["num_finished"] == 20


def test_a_trace_is_replayed_with_its_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("trace", "--file", str(EXCERPT), "--costs", "seed-context", "--limit", "6")
    found = run(capsys, *words)
    assert (found["num_finished"], found["workload"]) == (6, f"the first 6 requests of {EXCERPT.name} at 1 × its rate")
    assert found["cached_share"] > 0
    assert run(capsys, *words, "--no-prefix-caching")["cached_share"] == 0


def test_requests_that_do_not_fit_are_told_and_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["poisson", "--costs", "seed-flat", "--max-model-len", "64", "--requests", "3", "--prompt-tokens", "100"]
    assert cli.main(["simulate", *words]) == 1
    assert "failed 3: " in " ".join(capsys.readouterr().out.split())


def test_tables_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "poisson", "--rate", "0.5", *SMALL, "--slo-ttft-ms", "9000"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("TTFT", "ITL", "TPOT", "p95", "SLO met by", "20 of 20 requests"))


# ---------------------------------------------------------------- pictures, files


def test_the_rounds_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "rounds.html", tmp_path / "rounds.png"
    run(capsys, "poisson", "--rate", "0.5", *SMALL, "--html", str(page), "--png", str(picture))
    assert "<html" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "there is no directory" in refused(
        capsys, "poisson", "--rate", "0.5", *SMALL, "--html", str(tmp_path / "no" / "folder.html")
    )


def test_without_matplotlib_a_picture_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert 'pip install "pdserve[bench]"' in refused(capsys, "poisson", *SMALL, "--png", "x.png")


def test_a_node_s_config_file_is_a_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is: what says nothing to a simulation is left aside, and flags win."""
    config = tmp_path / "node.yaml"
    config.write_text("port: 50099\nhost: 127.0.0.1\ndecode-interleave-every: 8\nmax-num-seqs: 20\n")
    found = run(capsys, "poisson", "--rate", "0.5", *SMALL, "--config", str(config), "--max-num-seqs", "10")
    assert "--max-num-seqs 10" in found["deployment"]
    assert "--decode-interleave-every 8" in found["deployment"]
    config.write_text("block-size: 32\n")
    assert "--block-size 32: the costs are of blocks of 64 tokens" in refused(
        capsys, "poisson", *SMALL, "--config", str(config)
    )


def test_costs_may_be_a_file_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    cost_files.save(cost_files.load("seed-flat"), path)
    assert run(capsys, "poisson", "--rate", "0.5", *SMALL, "--costs", str(path))["costs"] == "seed-flat"


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("nothing",), "there is nothing called nothing to simulate; known are interference"),
        (("poisson", "--rate", "fast"), "--rate fast: must be a number"),
        (("poisson", "--rate", "0", "--costs", "seed-flat"), "--rate 0: must be more than 0"),
        (("poisson", "--costs", "nope"), "--costs nope: can't be read"),
        (("poisson", "--costs", "seed-flat", "--prompt-tokens", "x"), "--prompt-tokens x: is no distribution"),
        (("poisson", "--costs", "seed-flat", "--slo-ttft-ms", "0"), "--slo-ttft-ms 0: must be more than 0"),
        (("poisson", "--costs", "seed-flat", "--chunked-prefil-size", "1"), "did you mean --chunked-prefill-size?"),
        (("poisson", "--costs", "seed-flat", "--prefill-fill-tokens", "64"), "on one rank this only delays"),
        (
            ("poisson", "--costs", "seed-flat", "--port", "5"),
            "--port: is a flag of `pdserve serve` and says nothing to",
        ),
        (("poisson", "--costs", "seed-flat", "--html", "-"), "--html -: is no file; give a path"),
        (("closed", "--costs", "seed-flat", "--users", "0"), "--users 0: must be at least 1"),
        (("trace", "--costs", "seed-flat"), "--file: is missing"),
        (("interference", "--attack-s", "3"), "the published figures are of one pair; give --costs"),
        (("interference", "--costs", "seed-flat", "--attack-s", "-1"), "--attack-s -1: must be at least 0"),
        (("interference", "--num-prefill-nodes", "1"), "--num-decode-nodes: is missing"),
    ],
)
def test_a_wrong_call_is_told_in_a_line(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(capsys, *words)
    assert shown.startswith("pdserve simulate: ")
    assert reason in shown


def test_all_wrong_flags_of_the_deployment_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = refused(
        capsys,
        *("poisson", "--costs", "seed-flat", "--dp", "0", "--max-num-seqs", "x"),
        *("--decode-interleave-every", "8", "--prefill-attempt-interval", "4", "--prefill-any-attempt-interval", "2"),
    )
    assert "4 settings are wrong" in shown
    for flag in (
        "--data-parallel-size 0",
        "--max-num-seqs x",
        "--prefill-any-attempt-interval 2",
        "--decode-interleave-every 8",
    ):
        assert f"\n  {flag}: " in shown


@pytest.mark.parametrize("what", WHAT)
def test_everything_to_simulate_has_help_with_an_example(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["simulate", what, "--help"])
    assert left.value.code == 0
    assert f"example:\n  pdserve simulate {what}" in capsys.readouterr().out


def test_a_deployment_without_a_policy_is_not_shown_twice(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "interference", "--costs", "seed-flat", "--attacker-prompt-tokens", "20000")
    assert list(found["cases"]) == ["victim alone", "unset", "n = 16", "n = 8", "n = 4"]
