import pytest

from pdserve.commands import up
from pdserve.config import CadenceSettings, ConfigError, Role, ServerArgs


def test_up_splits_the_flags_the_threads_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "num_cores", lambda: 6)
    words = ["m", "--port", "7", "--prefill-port", "8", "--kv-lease-s", "9", "--quarantine-s", "10", "--no-reflection"]
    pair = up.read_pair(words)
    assert (pair.prefill.role, pair.prefill.port, pair.prefill.kv_lease_s) == (Role.PREFILL, 8, 9.0)
    assert (pair.decode.role, pair.decode.port, pair.decode.quarantine_s) == (Role.DECODE, 7, 10.0)
    assert pair.decode.prefill_peers == ("127.0.0.1:8",)
    for args in (pair.prefill, pair.decode):
        assert (args.num_threads, args.kv_memory_fraction, args.reflection) == (3, 0.25, False)
        # The words a child gets say all of it.
        assert ServerArgs.from_command_line(args.command_line()) == args


def test_up_on_one_core_gives_each_node_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "num_cores", lambda: 1)
    assert up.read_pair(["m"]).prefill.num_threads == 1


def test_up_takes_a_person_s_own_split() -> None:
    pair = up.read_pair(["m", "--num-threads", "5", "--num-kv-blocks", "6"])
    assert (pair.prefill.num_threads, pair.decode.num_kv_blocks) == (5, 6)


@pytest.mark.parametrize(
    ("variable", "fault"),
    [
        ("PDSERVE_PREFILL_ATTEMPT_INTERVAL", "--prefill-attempt-interval 4: pdserve up starts no fused node"),
        ("PDSERVE_PREFILL_ANY_ATTEMPT_INTERVAL", "--prefill-any-attempt-interval 4: pdserve up starts no fused node"),
        ("PDSERVE_PREFILL_FILL_TOKENS", "--prefill-fill-tokens 4: pdserve up starts no fused node"),
        ("PDSERVE_PREFILL_PEERS", "--prefill-peers 4: pdserve up starts the peer itself"),
    ],
)
def test_up_refuses_what_it_would_not_forward(variable: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ConfigError) as raised:
        up.read_pair(["m"])
    assert str(raised.value).startswith(fault)


@pytest.mark.parametrize("word", ["4", "auto", "0", "x"])
@pytest.mark.parametrize(
    "flag",
    [
        *["--prefill-attempt-interval", "--prefill-any-attempt-interval", "--prefill-max-open-rounds"],
        *["--prefill-fill-tokens", "--prefill-fill-max-holds"],
    ],
)
def test_up_refuses_the_gate_s_flags_with_the_reason_whatever_their_value(flag: str, word: str) -> None:
    with pytest.raises(ConfigError) as raised:
        up.read_pair(["m", flag, word])
    (fault,) = raised.value.faults
    assert str(fault).startswith(f"{flag} {word}: pdserve up starts no fused node, and only a fused node has")


def test_up_refuses_a_role_and_a_peer_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="--role both: pdserve up starts one node of each"):
        up.read_pair(["m", "--role", "both"])
    with pytest.raises(ConfigError, match="--prefill-peers a:1: pdserve up starts the peer itself"):
        up.read_pair(["m", "--prefill-peers", "a:1"])


def test_up_does_not_offer_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        up.read_pair(["--help"])
    text = capsys.readouterr().out
    assert all(flag not in text for flag in ("--role ", "--prefill-peers", "--prefill-attempt", "--prefill-fill"))
    assert "--decode-interleave-every" in text


def test_up_gives_both_nodes_the_tiers_and_the_cadence_to_the_decode_node() -> None:
    words = [
        "m",
        "--host-kv-gb",
        "2",
        "--kv-dir",
        "/kv",
        "--prefill-decode-interval",
        "3",
        "--prefill-hold-budget",
        "9",
    ]
    pair = up.read_pair(words)
    for args in (pair.prefill, pair.decode):
        assert (args.host_kv_gb, args.kv_dir) == (2.0, "/kv")
        assert ServerArgs.from_command_line(args.command_line()) == args
    assert pair.decode.cadence == CadenceSettings(1, 3, 9)
    assert (pair.prefill.prefill_decode_interval, pair.prefill.cadence) == (None, None)
    assert up.read_pair(["m"]).decode.cadence == CadenceSettings(1, 4, None)


@pytest.mark.parametrize("word", ["0", "x"])
def test_up_tells_a_wrong_cadence_once(word: str) -> None:
    with pytest.raises(ConfigError) as raised:
        up.read_pair(["m", "--decode-interleave-every", word])
    assert [fault.subject for fault in raised.value.faults] == ["--decode-interleave-every"]


def test_up_tells_the_faults_of_both_nodes_once() -> None:
    with pytest.raises(ConfigError) as raised:
        up.read_pair(["m", "--port", "x", "--prefill-port", "0", "--host", "0.0.0.0", "--quarantine-s", "-1"])
    told = [fault.subject for fault in raised.value.faults]
    assert sorted(told) == ["--host", "--port", "--prefill-port", "--quarantine-s"]
