"""What the settings make of the policies, and the line that tells a person."""

from collections.abc import Callable

import pytest

from pdserve.config import CadenceSettings, FillSettings, PrefillDelay, Role, ServerArgs, policy_line


def test_no_policy_is_the_default_of_a_fused_and_of_a_prefill_node() -> None:
    for role in (Role.FUSED, Role.PREFILL):
        args = ServerArgs(model="m", role=role)
        assert (args.prefill_delay, args.prefill_gate, args.fill, args.cadence) == (None, None, None, None)


def test_the_gate_is_read_from_the_fields_each_time() -> None:
    args = ServerArgs(model="m", prefill_attempt_interval=4, prefill_any_attempt_interval=16)
    assert args.prefill_delay == args.prefill_gate == PrefillDelay(4, 16)
    args.prefill_any_attempt_interval = 8
    assert args.prefill_delay == args.prefill_gate == PrefillDelay(4, 8)
    args.prefill_attempt_interval = None
    for name in ("prefill_delay", "prefill_gate"):
        with pytest.raises(ValueError, match="--prefill-any-attempt-interval 8: needs --prefill-attempt-interval"):
            getattr(args, name)
    args.prefill_any_attempt_interval = None
    assert args.prefill_delay is None
    args.validate()


def test_a_fill_condition_alone_makes_a_gate_that_opens_for_one_rank_after_the_longest_hold(
    two_ranks: Callable[..., ServerArgs],
) -> None:
    args = two_ranks(model="m", prefill_fill_tokens=256)
    assert (args.fill, args.prefill_delay, args.prefill_gate) == (FillSettings(256, 30), None, PrefillDelay(1, 30))
    args.prefill_fill_max_holds = 5
    assert (args.fill, args.prefill_gate) == (FillSettings(256, 5), PrefillDelay(1, 5))
    args.prefill_attempt_interval, args.prefill_any_attempt_interval = 4, 16
    assert (args.fill, args.prefill_gate) == (FillSettings(256, 5), PrefillDelay(4, 16))


def test_auto_is_a_full_round_of_several_ranks_and_nothing_on_one(two_ranks: Callable[..., ServerArgs]) -> None:
    args = two_ranks(model="m", prefill_fill_tokens="auto", chunked_prefill_size=1024)
    assert (args.fill, args.prefill_gate) == (FillSettings(1024, 30), PrefillDelay(1, 30))
    args.chunked_prefill_size = 2048
    assert args.fill == FillSettings(2048, 30)
    alone = ServerArgs(model="m", prefill_fill_tokens="auto", prefill_fill_max_holds=5)
    assert (alone.fill, alone.prefill_gate, alone.prefill_delay) == (None, None, None)


def test_a_cadence_is_one_round_of_one_kind_to_some_of_the_other() -> None:
    args = ServerArgs(model="m", decode_interleave_every=8)
    assert args.cadence == CadenceSettings(8, 1, None)
    args.decode_interleave_every, args.prefill_decode_interval = None, 3
    assert args.cadence == CadenceSettings(1, 3, 30)
    args.prefill_hold_budget = 7
    assert args.cadence == CadenceSettings(1, 3, 7)


def test_a_decode_node_that_falls_back_has_a_cadence_unless_given_another() -> None:
    args = ServerArgs(model="m", role=Role.DECODE, prefill_peers=("a:1",))
    assert args.cadence == CadenceSettings(1, 4, None)
    args.decode_interleave_every = 8
    assert args.cadence == CadenceSettings(8, 1, None)
    args.decode_interleave_every, args.decode_fallback = None, "fail"  # type: ignore[assignment]
    assert args.cadence is None


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({}, ["no prefill policy", "--decode-interleave-every 8"]),
        ({"enable_mixed_batch": True}, ["no prefill policy", "every round decodes", "--prefill-decode-interval"]),
        ({"prefill_fill_tokens": "auto"}, ["--prefill-fill-tokens auto is off", "one rank", "no prefill policy"]),
        (
            {"prefill_attempt_interval": 4, "prefill_any_attempt_interval": 16, "prefill_max_open_rounds": 2},
            ["prefill gate", "multiples of 4 rounds", "of 16", "after 2 prefill rounds in a row"],
        ),
        (
            {"prefill_attempt_interval": 4, "prefill_any_attempt_interval": 16, "prefill_fill_tokens": "auto"},
            ["--prefill-fill-tokens auto is off", "prefill gate"],
        ),
        ({"decode_interleave_every": 8}, ["prefill cadence: at most 8 prefill rounds, then at least 1 of decode"]),
        ({"prefill_decode_interval": 4}, ["at most 1 prefill round, then at least 4 of decode", "30 rounds in all"]),
        ({"role": Role.DECODE}, ["at most 1 prefill round, then at least 4 of decode"]),
    ],
)
def test_one_line_tells_the_policy_or_the_flag_that_protects_streams(
    values: dict[str, object], parts: list[str]
) -> None:
    line = policy_line(ServerArgs(model="m", **values))
    assert "\n" not in line
    assert all(part in line for part in parts), line


def test_the_line_of_a_group_tells_the_fill_condition(two_ranks: Callable[..., ServerArgs]) -> None:
    line = policy_line(two_ranks(model="m", prefill_fill_tokens="auto"))
    assert "multiples of 1 round" in line
    assert "512 waiting tokens or 30 rounds held" in line


# ---------------------------------------------------------------- tiers


def test_the_tiers_are_off_unless_given_a_size() -> None:
    args = ServerArgs(model="m")
    assert (args.host_kv_bytes, args.kv_dir) == (0, None)
    args.host_kv_gb, args.kv_dir = 2, "/var/kv"
    args.validate()
    assert (args.host_kv_bytes, args.kv_dir_bytes) == (2_000_000_000, 10_000_000_000)
    args.kv_dir_gb = 0.5
    assert args.kv_dir_bytes == 500_000_000


@pytest.mark.parametrize(
    ("values", "faults"),
    [
        (
            {"kv_dir": "/kv"},
            ["--kv-dir /kv: blocks go to files and come back through host memory; give some with --host-kv-gb"],
        ),
        ({"kv_dir_gb": 3.0}, ["--kv-dir-gb 3.0: bounds --kv-dir; give that too"]),
        ({"kv_dir_gb": 3.0, "host_kv_gb": 1.0}, ["--kv-dir-gb 3.0: bounds --kv-dir; give that too"]),
        (
            {"kv_dir": "/kv", "host_kv_gb": 1.0, "prefix_caching": False},
            ["--kv-dir /kv: the files hold prefix blocks, and --no-prefix-caching leaves none; give one of them"],
        ),
    ],
)
@pytest.mark.parametrize("role", list(Role))
def test_a_tier_without_the_one_above_it_is_refused(role: Role, values: dict[str, object], faults: list[str]) -> None:
    args = ServerArgs(model="m", role=role)
    for name, value in values.items():
        setattr(args, name, value)
    assert [str(fault) for fault in args.faults()] == faults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("host_kv_gb", value) for value in (-1.0, True, "3", float("inf"), float("nan"))],
        *[("kv_dir_gb", value) for value in (0.0, -1.0, True, "3")],
        *[("kv_dir", value) for value in ("", 3)],
    ],
)
def test_sizes_and_directories_are_taken_strictly(name: str, value: object) -> None:
    args = ServerArgs(model="m", host_kv_gb=1.0, kv_dir="/kv")
    setattr(args, name, value)
    assert [fault.subject for fault in args.faults()] == ["--" + name.replace("_", "-")]
