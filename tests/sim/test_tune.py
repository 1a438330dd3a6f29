"""The tuner finds what is better, the same each time, and doesn't claim what it can't tell from chance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.sim import candidates
from pdserve.sim.advice import Capacity, changes, figures, sentences
from pdserve.sim.deployment import Deployment
from pdserve.sim.economics import Users, grid, sweep
from pdserve.sim.goals import GoodputGoal, ItlGoal, Measures, RanksGoal
from pdserve.sim.presets import PRESETS
from pdserve.sim.report import Slo
from pdserve.sim.traffic import PresetTraffic
from pdserve.sim.tune import Entry, Question, Tuned, tune
from pdserve.sim.verdict import judge
from tests.sim.worlds import COSTS

SLO = Slo(ttft_s=20.0, itl_s=0.6)
DEFAULT = Deployment(COSTS, num_kv_blocks=256, max_num_seqs=8, chunked_prefill_size=256)
BAD = DEFAULT.replace(prefill_attempt_interval=256, prefill_any_attempt_interval=256)


def traffic(rate_per_s: float = 0.1, num_requests: int = 12) -> PresetTraffic:
    return PresetTraffic(PRESETS["chat"], 512, rate_per_s, num_requests)


def measures(**changes: float) -> Measures:
    return dataclasses.replace(Measures(1, 0.5, 1.0, 1.0, 2.0, 10.0, 1.0, 1.0, 1.0, 0.0), **changes)


def question(default: Deployment = BAD, goal=None, budget: int = 24, **changes) -> Question:
    return Question(default, goal or ItlGoal(10.0, SLO), traffic(), budget, **changes)


# ---------------------------------------------------------------- the search


def test_it_betters_a_bad_default_and_says_how_sure_it_is() -> None:
    tuned = tune(question())
    assert tuned.verdict is not None
    assert (tuned.verdict.num_wins, tuned.verdict.is_better) == (6, True)
    assert tuned.recommended is tuned.pick
    assert tuned.pick.deployment.prefill_attempt_interval != 256
    assert tuned.verdict.difference.mean < 0
    assert all(
        pick.ttft_p99_s < default.ttft_p99_s for pick, default in zip(tuned.pick.runs, tuned.default.runs, strict=True)
    )


def test_smaller_chunks_or_a_policy_save_streams_from_whole_chunks() -> None:
    """A chunk of 256 tokens takes 4 s, and a stream may pause for 2.2 s: only less at a time can keep that."""
    tuned = tune(question(DEFAULT, GoodputGoal(Slo(itl_s=2.2)), budget=30))
    assert tuned.recommended is tuned.pick
    assert tuned.pick.deployment.chunked_prefill_size < 256


def test_the_same_seed_gives_the_same_answer() -> None:
    one = tune(question(budget=6))
    assert tune(question(budget=6)) == one
    assert tune(question(budget=6, seed=1)) != one


def test_where_nothing_is_better_the_default_stays() -> None:
    """A single request meets no other: no policy can matter."""
    alone = Question(DEFAULT, ItlGoal(10.0, SLO), traffic(num_requests=1), 24)
    tuned = tune(alone)
    assert tuned.verdict is None
    assert tuned.recommended is tuned.default
    assert next(sentences(tuned, Capacity(1.0, 1.0))).startswith("Keep the flags")


def test_the_budget_bounds_the_search() -> None:
    num_checked = 5 * 6  # the default and four finalists on six samples each
    assert tune(question(budget=10)).num_run <= 10 + 4 * 4 + num_checked


def test_it_finds_the_fewest_ranks() -> None:
    """Four ranks where two are enough, and one isn't."""
    goal = RanksGoal(Slo(ttft_s=40.0), share=0.9)
    busy = traffic(rate_per_s=0.15)
    tuned = tune(Question(DEFAULT.replace(num_nodes=4), goal, busy, 20, most_ranks=4))
    assert tuned.recommended.deployment.num_ranks < 4
    assert all(map(goal.is_met, tuned.recommended.runs))


# ---------------------------------------------------------------- the candidates


@pytest.mark.parametrize(
    "default",
    [
        DEFAULT,
        DEFAULT.replace(chunked_prefill_size=64),  # an eighth of it, a block, leaves mixed rounds no room
        DEFAULT.replace(data_parallel_size=4),
        DEFAULT.replace(num_prefill_nodes=1, num_decode_nodes=2),
    ],
)
def test_every_candidate_is_one_that_a_node_would_take(default: Deployment) -> None:
    field = candidates.coarse(default)
    assert field[0] == default
    near = [one for start in field for one in candidates.neighbours(start, default)]
    assert len(set(field)) == len(field)
    assert all(one.topology() for one in (*field, *near))
    assert {one.num_ranks for one in (*field, *near)} == {default.num_ranks}


def test_a_neighbour_is_one_knob_away() -> None:
    gate = DEFAULT.replace(prefill_attempt_interval=4, prefill_any_attempt_interval=16)
    found = candidates.neighbours(gate, DEFAULT)
    assert gate.replace(prefill_attempt_interval=8) in found
    assert gate.replace(prefill_any_attempt_interval=8) in found
    assert gate.replace(prefill_attempt_interval=8, prefill_any_attempt_interval=32) in found
    assert DEFAULT in found
    assert gate not in found


def test_shapes_have_the_ranks_and_slots_that_were_paid_for() -> None:
    found = candidates.shapes(DEFAULT, 4)
    assert {one.num_ranks for one in found} == {4}
    assert {candidates.slots_of_rank(one) for one in found} == {8}
    assert {one.data_parallel_size for one in found} == {1, 2, 4}
    assert {one.num_prefill_nodes for one in found} == {None, 1, 2, 3}


# ---------------------------------------------------------------- goals and verdicts


def test_the_itl_goal_puts_the_limit_before_the_first_token() -> None:
    goal = ItlGoal(0.5, SLO)
    fast_but_over, slow_but_within = [measures(itl_p99_s=0.6, ttft_p99_s=1.0)], [measures(ttft_p99_s=9.0)]
    assert goal.loss(slow_but_within) < goal.loss(fast_but_over)
    assert goal.loss([measures(ttft_p99_s=1.0)]) < goal.loss(slow_but_within)
    assert goal.loss(fast_but_over) < goal.loss([measures(failed_share=0.1, itl_p99_s=0.1)])


def test_the_ranks_goal_puts_the_slo_before_the_ranks() -> None:
    goal = RanksGoal(SLO, 0.95)
    few, many = [measures(num_ranks=1, met_share=0.9)], [measures(num_ranks=4, met_share=0.96)]
    assert goal.loss(many) < goal.loss(few)
    assert goal.loss([measures(num_ranks=2, met_share=0.95)]) < goal.loss(many)


def tuned_of(pick: Sequence[Measures], default: Sequence[Measures], goal=None) -> Tuned:
    goal = goal or ItlGoal(0.5, SLO)
    entries = Entry(BAD, tuple(default)), Entry(DEFAULT, tuple(pick))
    return Tuned(goal, *entries, (), judge(goal, pick, default), 12)


def test_chance_is_called_chance_and_the_default_stays() -> None:
    tuned = tuned_of(
        [measures(ttft_p99_s=value) for value in (1, 3, 1, 3, 1, 3)],
        [measures(ttft_p99_s=value) for value in (2.1, 2, 2, 2, 2, 2)],
    )
    assert tuned.verdict is not None
    assert not tuned.verdict.difference.is_distinguishable
    assert tuned.recommended is tuned.default
    text = " ".join(sentences(tuned, Capacity(1.0, 1.0)))
    assert "Keep the flags as they are" in text
    assert "not distinguishable from chance" in text


def test_what_it_gives_up_is_said() -> None:
    tuned = tuned_of(
        [measures(ttft_p99_s=1, worst_gap_s=4 + n / 10, output_tokens_per_s=10) for n in range(6)],
        [measures(ttft_p99_s=2 + n / 10, worst_gap_s=2, output_tokens_per_s=10) for n in range(6)],
    )
    text = " ".join(sentences(tuned, Capacity(default_per_s=2.0, pick_per_s=1.5)))
    assert "Better than as given on 6 of 6 fresh samples" in text
    assert "It gives up: worst gap +2,250 ± " in text
    assert "finishes 1.5 requests a second, as given 2 (-25.0%)" in text


def test_a_goal_that_is_not_reached_is_said() -> None:
    tuned = tuned_of(
        [measures(itl_p99_s=0.6 + n / 100) for n in range(6)], [measures(itl_p99_s=0.9 + n / 50) for n in range(6)]
    )
    assert "Beware: on 6 of 6 fresh samples it does not reach the goal" in " ".join(sentences(tuned, Capacity(1, 1)))


def test_a_freeze_that_the_percentile_of_gaps_does_not_see_is_said() -> None:
    frozen = tuned_of([measures(itl_p99_s=0.1, worst_gap_s=70.0)] * 6, [measures(itl_p99_s=0.1, worst_gap_s=74.0)] * 6)
    assert "Mind its worst gap of 74.0 s" in " ".join(sentences(frozen, Capacity(1, 1)))
    smooth = tuned_of([measures(itl_p99_s=0.1, worst_gap_s=0.5)] * 6, [measures(itl_p99_s=0.1, worst_gap_s=0.9)] * 6)
    assert "Mind" not in " ".join(sentences(smooth, Capacity(1, 1)))


def test_changes_name_what_is_new_and_what_is_gone() -> None:
    assert changes(DEFAULT, BAD) == "(no --prefill-any-attempt-interval) (no --prefill-attempt-interval)"
    assert changes(DEFAULT.replace(decode_interleave_every=4), DEFAULT) == "--decode-interleave-every 4"
    assert changes(DEFAULT, DEFAULT) == "as given"


def test_the_figures_are_json_with_stable_names() -> None:
    found = json.loads(json.dumps(figures(tune(question(budget=10)), Capacity(1.0, 2.0))))
    assert set(found) == {
        *("goal", "num_simulations", "recommended", "default", "pick", "runners_up", "differences", "capacity"),
        *("verdict", "text"),
    }
    assert found["capacity"] == {"default_per_s": 1.0, "pick_per_s": 2.0}
    assert {"flags", "changes", "itl_p99_s", "ttft_p99_s", "goodput_per_s"} <= set(found["pick"])


# ---------------------------------------------------------------- the commands

TINY = ("--costs", "seed-context", "--requests", "6", "--budget", "4")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "--goal: is missing; give one of itl, goodput, gpus"),
        (("--goal", "speed"), "--goal speed: give one of itl, goodput, gpus"),
        (("--goal", "itl"), "--itl-p99-ms: is missing"),
        (("--goal", "itl", "--itl-p99-ms", "0"), "--itl-p99-ms 0: must be more than 0"),
        (("--goal", "goodput"), "--goal goodput: needs an SLO"),
        (("--goal", "goodput", "--slo-ttft-ms", "9", "--itl-p99-ms", "9"), "--itl-p99-ms 9: is of --goal itl"),
        (
            ("--goal", "gpus", "--slo-ttft-ms", "9", "--attainment", "2"),
            "--attainment 2: must be",
        ),
        (("--itl-p99-ms", "9", "--workload", "chats"), "--workload chats: give one of chat, coding, burst"),
        (("--itl-p99-ms", "9", "--load", "0"), "--load 0: must be more than 0"),
        (("--itl-p99-ms", "9", "--budget", "0"), "--budget 0: must be at least 1"),
        (("--itl-p99-ms", "9", "--max-ranks", "3"), "--max-ranks 3: is of --goal gpus"),
        (
            ("--itl-p99-ms", "9", "--workload", "chat", "--trace", "/dev/null"),
            "--workload chat: and --trace /dev/null are",
        ),
        (("--itl-p99-ms", "9", "--decode-interleave-every", "0"), "--decode-interleave-every 0"),
    ],
)
def test_nonsense_is_refused(words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "tune", "--costs", "seed-context", *words]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_tells_flags_and_draws_the_pick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, page = tmp_path / "answer.json", tmp_path / "rounds.html"
    words = (*TINY, "--itl-p99-ms", "400", "--json", str(answer), "--html", str(page))
    assert main(["simulate", "tune", *words]) == 0
    assert "samples that the search has not seen" in capsys.readouterr().out
    found = json.loads(answer.read_text())
    assert found["recommended"]["flags"] in (found["pick"]["flags"], found["default"]["flags"])
    assert "<canvas" in page.read_text()


def test_the_gate_s_economics_are_told_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, picture = tmp_path / "gate.json", tmp_path / "gate.png"
    words = ("--dp", "2", "--users-of-rank", "1", "--requests", "2", "--json", str(answer), "--png", str(picture))
    assert main(["simulate", "gate", *words]) == 0
    points = json.loads(answer.read_text())["points"]
    assert points[0]["prefill_attempt_interval"] is None
    assert {point["prefill_fill_tokens"] for point in points[1:]} == {None, "auto"}
    assert "p99 TTFT" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 300_000


def test_the_gate_s_economics_are_the_same_again() -> None:
    deployments = list(grid(DEFAULT.replace(data_parallel_size=2)))[:3]
    users = Users(of_rank=3, num_requests=8)
    points = sweep(deployments, users, 0, lambda done: None)
    assert points == sweep(deployments, users, 0, lambda done: None)
    assert len({point.measures for point in points}) > 1


def test_the_gate_s_economics_are_of_a_fused_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "gate", "--num-prefill-nodes", "1", "--num-decode-nodes", "1"]) == 2
    assert "a gate is of fused nodes" in capsys.readouterr().err
    assert main(["simulate", "gate", "--html", "x.html"]) == 2
    assert "give --png" in capsys.readouterr().err
