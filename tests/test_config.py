import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import ConfigError, DecodeFallback, Role, ServerArgs, cache_dir
from pdserve.config.fields import FIELDS
from pdserve.errors import StartupError
from pdserve.telemetry import JsonFormatter, TextFormatter


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in FIELDS:
        monkeypatch.delenv(f"PDSERVE_{name.upper()}", raising=False)


def parse(*words: str, role: Role | None = None) -> ServerArgs:
    return ServerArgs.from_command_line(words, role)


def faults(*words: str, role: Role | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(*words, role=role)
    return [str(fault) for fault in raised.value.faults]


# ---------------------------------------------------------------- where values come from


def test_defaults_are_the_documented_ones() -> None:
    args = parse("smollm2")
    assert (args.role, args.host, args.port) == (Role.FUSED, "127.0.0.1", 50051)
    assert (args.max_num_seqs, args.chunked_prefill_size, args.block_size) == (32, 512, 64)
    assert (args.max_queued_requests, args.kv_memory_fraction, args.prefix_caching) == (1024, 0.5, True)
    assert (args.kv_lease_s, args.quarantine_s, args.transfer_timeout_s) == (30.0, 120.0, 60.0)
    assert (args.max_message_mib, args.reflection, args.decode_fallback) == (16, True, DecodeFallback.FUSED)


@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_command_line_beats_environment_beats_file_beats_default(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = ":" if suffix == "yaml" else "="
    file = tmp_path / f"node.{suffix}"
    file.write_text("".join(f"{key}{mark} {n}\n" for key, n in (("max-num-seqs", 1), ("block_size", 1), ("port", 1))))
    monkeypatch.setenv("PDSERVE_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("PDSERVE_BLOCK_SIZE", "2")
    args = parse("smollm2", "--config", str(file), "--max-num-seqs", "3")
    assert (args.max_num_seqs, args.block_size, args.port, args.chunked_prefill_size) == (3, 2, 1, 512)


def test_the_model_and_the_file_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("prefill_peers: [one:1, 'two:2']\nrole: decode\nmax_model_len: null\n")
    monkeypatch.setenv("PDSERVE_MODEL", "smollm2")
    monkeypatch.setenv("PDSERVE_CONFIG", str(file))
    args = parse()
    assert (args.model, args.role, args.prefill_peers) == ("smollm2", Role.DECODE, ("one:1", "two:2"))


def test_peers_may_be_repeated_or_comma_separated() -> None:
    args = parse("m", "--role", "decode", "--prefill-peers", "a:1, b:2", "--prefill-peers", "c:3")
    assert args.prefill_peers == ("a:1", "b:2", "c:3")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("No", False), ("on", True)])
def test_truth_values_in_the_environment(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_REFLECTION", text)
    assert parse("m").reflection is value


def test_truth_values_on_the_command_line() -> None:
    args = parse("m", "--no-prefix-caching", "--enable-mixed-batch")
    assert (args.prefix_caching, args.enable_mixed_batch) == (False, True)


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_PORT", "")
    assert parse("m").port == 50051


def test_made_in_code_it_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_PORT", "1")
    assert ServerArgs(model="m").port == 50051


def test_its_words_give_the_same_settings_again() -> None:
    words = ["m", "--role", "decode", "--prefill-peers", "a:1,b:2", "--no-reflection", "--quarantine-s", "1.5"]
    words += ["--max-model-len", "77", "--decode-fallback", "fail", "--kv-memory-fraction", "0.25"]
    args = parse(*words)
    assert parse(*args.command_line()) == args
    assert args.model_fields_set == parse(*args.command_line()).model_fields_set


def test_the_prefill_flags_are_listed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert all(f"--{name.replace('_', '-')}" in text for name in FIELDS)
    assert "(prefill only; default: 30)" in text
    assert "example:" in text


# ---------------------------------------------------------------- what is refused


def test_all_faults_are_reported_at_once_with_flag_value_and_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("max_model_len: many\nmax_num_seq: 3\n")
    monkeypatch.setenv("PDSERVE_BLOCK_SIZE", "sixty")
    monkeypatch.setenv("PDSERVE_PROT", "1")
    found = faults(
        "m", "--port", "70000", "--hots", "a", "--kv-lease-s", "3", "--config", str(file), "--host", "0.0.0.0"
    )
    expected = [
        "--port 70000: must be less than or equal to 65535",
        "--hots: there is no such flag; did you mean --host?",
        "PDSERVE_PROT 1 (from the environment): there is no such setting; did you mean PDSERVE_PORT?",
        "max_num_seq 3 (from the --config file): there is no such setting; did you mean max_num_seqs?",
        "--max-model-len many (from the --config file): must be a valid integer",
        "--block-size sixty (from PDSERVE_BLOCK_SIZE): must be a valid integer",
        "--kv-lease-s 3.0: a fused node doesn't use it, only prefill nodes do; leave it out",
        "--host 0.0.0.0: other machines could reach this node, and there is no TLS yet; add --insecure to allow that",
    ]
    assert set(expected) <= set(found)


def test_one_fault_is_one_line_and_several_are_counted() -> None:
    with pytest.raises(StartupError) as one:
        parse("m", "--port", "x")
    assert one.value.message == "--port x: must be a valid integer"
    with pytest.raises(StartupError) as two:
        parse("m", "--port", "x", "--block-size", "0")
    assert two.value.message.splitlines()[0] == "2 settings are wrong:"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "MODEL: say what to serve, such as smollm2"),
        (["m", "--model", "n"], "--model n: MODEL is given as m too; give one of them"),
        (["m", "extra"], "extra: is one word too many; see pdserve serve --help"),
        (["m", "--speed", "9"], "--speed: there is no such flag"),
        (["m", "--port"], "the command line: argument --port: expected one argument; see pdserve serve --help"),
        (["m", "--max-num-seqs", "2.0"], "--max-num-seqs 2.0: must be a valid integer"),
        (["m", "--max-num-seqs", "0"], "--max-num-seqs 0: must be greater than or equal to 1"),
        (["m", "--kv-memory-fraction", "nan"], "--kv-memory-fraction nan: must be a finite number"),
        (["m", "--drain-timeout-s", "inf"], "--drain-timeout-s inf: must be a finite number"),
        (["m", "--dtype", "float16"], "--dtype float16: must be 'float32'"),
        (["m", "--role", "both"], "--role both: must be 'fused', 'prefill' or 'decode'"),
        (
            ["m", "--chunked-prefill-size", "32"],
            "--chunked-prefill-size 32: must be at least --block-size (64), as chunks end on block boundaries",
        ),
        (
            ["m", "--num-kv-blocks", "9", "--kv-memory-fraction", "0.5"],
            "--kv-memory-fraction 0.5: --num-kv-blocks (9) sets the same size; give one of them",
        ),
        (
            ["m", "--role", "decode", "--prefill-peers", "host"],
            "--prefill-peers host: must be HOST:PORT with a port of 1 to 65535",
        ),
        (
            ["m", "--role", "decode", "--prefill-peers", ""],
            "--prefill-peers '': an empty word names no node; give HOST:PORT, or leave the flag out",
        ),
        (
            ["m", "--role", "decode", "--prefill-peers", "a:1,,b:2"],
            "--prefill-peers '': an empty word names no node; give HOST:PORT, or leave the flag out",
        ),
        (
            ["m", "--role", "decode", "--prefill-peers", "dns:///p"],
            "--prefill-peers dns:///p: must be dns:///NAME:PORT with a port of 1 to 65535",
        ),
        (
            ["m", "--role", "decode", "--prefill-peers", "file:peers.yaml"],
            "--prefill-peers file:peers.yaml: must be file:///PATH, with three slashes",
        ),
        (
            ["m", "--role", "decode", "--decode-fallback", "fail"],
            "--decode-fallback fail: every request would fail without a prefill node; name one with --prefill-peers",
        ),
        (
            ["m", "--role", "prefill", "--enable-mixed-batch"],
            "--enable-mixed-batch True: a prefill node doesn't use it, only fused and decode nodes do; leave it out",
        ),
        (
            ["m", "--config", "/nowhere/x.yaml"],
            "--config /nowhere/x.yaml: can't be read (No such file or directory); check the path",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_its_reason(words: list[str], fault: str) -> None:
    assert faults(*words) == [fault]


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "- 1\n"), ("a.yaml", "a: [\n"), ("a.toml", "a = \n"), ("a.yaml", b"\xff\xfe\xff")]
)
def test_a_file_that_is_no_table_of_settings_is_refused(name: str, text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert faults("m", "--config", str(tmp_path / name))[0].startswith(f"--config {tmp_path / name}: ")


@pytest.mark.parametrize("text", ["port: 1.0", "max_num_seqs: true", "reflection: 1", "reflection: maybe"])
def test_a_file_s_values_are_taken_strictly(text: str, tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(text)
    assert len(faults("m", "--config", str(tmp_path / "node.yaml"))) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_loopback_bind_needs_no_permission(host: str) -> None:
    assert parse("m", "--host", host).host == host


def test_an_open_bind_needs_insecure() -> None:
    assert "no TLS yet" in faults("m", "--host", "10.0.0.1")[0]
    assert parse("m", "--host", "10.0.0.1", "--insecure").insecure


@pytest.mark.parametrize("role", list(Role))
def test_a_role_s_own_program_needs_no_role_flag_and_takes_no_other(role: Role) -> None:
    assert parse("m", role=role).role is role
    assert parse("m", "--role", role, role=role).role is role
    other = Role.DECODE if role is Role.FUSED else Role.FUSED
    assert "leave the flag out" in faults("m", "--role", other, role=role)[0]


def test_the_thread_count_is_omp_s_then_the_flag_s_then_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("m").compute_threads >= 1
    assert parse("m", "--num-threads", "3").compute_threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert parse("m", "--num-threads", "3").compute_threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert faults("m") == ["OMP_NUM_THREADS many (from the environment): must be a whole number of at least 1"]


def test_the_cache_follows_the_desktop_s_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/pdserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "pdserve"


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7")])
def test_the_address_is_written_as_grpc_does(host: str, address: str) -> None:
    assert ServerArgs(model="m", host=host, port=7).address == address


def test_clients_see_no_path_of_a_model_directory() -> None:
    assert ServerArgs(model="/srv/models/tiny").public_name == "tiny"
    assert ServerArgs(model="org/tiny").public_name == "org/tiny"
    assert ServerArgs(model="/srv/models/tiny", served_model_name="big").public_name == "big"


# ---------------------------------------------------------------- assigned in code


def test_fields_stay_assignable_and_validate_may_be_called_again() -> None:
    args = ServerArgs(model="m")
    args.validate()
    args.port = 99999
    args.block_size = 1024
    with pytest.raises(ConfigError, match="2 settings are wrong"):
        args.validate()
    args.port, args.block_size = 1, 64
    args.validate()


@pytest.mark.parametrize("value", [True, 2.0, "3"])
def test_numbers_assigned_in_code_are_strict(value: object) -> None:
    args = ServerArgs(model="m")
    args.max_num_seqs = value  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        args.validate()


def test_a_role_assigned_in_code_brings_its_refusals() -> None:
    args = ServerArgs(model="m", kv_lease_s=3.0, role=Role.PREFILL)
    args.validate()
    args.role = Role.DECODE
    with pytest.raises(ConfigError, match=r"--kv-lease-s 3\.0: a decode node doesn't use it"):
        args.validate()


# ---------------------------------------------------------------- the programs


@pytest.mark.parametrize("module", ["fused", "prefill_node", "decode_node"])
def test_a_node_s_program_tells_faults_on_one_line_and_exits_with_2(module: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", module, "m", "--port", "x"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"{module.removesuffix('_node')} node: --port x: must be a valid integer\n"


def test_a_log_line_is_one_json_object() -> None:
    record = logging.LogRecord("pdserve.engine", logging.WARNING, "x.py", 1, "%d blocks\nleft", (3,), None)
    line = JsonFormatter("decode:1").format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["source"], told["message"]) == ("warning", "decode:1", "3 blocks\nleft")
    assert "WARNING decode:1 pdserve.engine: 3 blocks" in TextFormatter("decode:1").format(record)
