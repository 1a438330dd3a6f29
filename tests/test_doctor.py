import json
import socket
from pathlib import Path

import pytest

from pdserve import doctor
from pdserve.model.quantized_linear import Kernel


def test_doctor_says_that_a_port_is_taken() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        finding = doctor.check_port(port)
    assert (finding.state, finding.remedy) == (doctor.State.WARNS, "use another --port")
    assert doctor.check_port(port).state is doctor.State.WORKS


def test_doctor_counts_the_tokens_that_fit() -> None:
    block = doctor.EMBEDDED_LAYOUT.block_bytes
    assert "holds 64,000 tokens" in doctor.check_memory(2000 * block).found
    assert doctor.check_memory(10 * block).state is doctor.State.FAILS


def test_doctor_goes_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_compiler().state is doctor.State.WORKS
    monkeypatch.setenv("PATH", "")
    finding = doctor.check_compiler()
    assert (finding.state, finding.found) == (doctor.State.WARNS, "none found")


def test_doctor_says_what_threads_a_node_takes_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "num_cores", lambda: 4)
    assert doctor.check_threads().found.startswith("4 a node, one a core")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert doctor.check_threads().found == "3 a node, as OMP_NUM_THREADS says, on 4 cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert doctor.check_threads().state is doctor.State.WARNS


def test_doctor_says_what_weights_are_kept_as_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Kernel, "is_fast", True)
    assert doctor.check_weights().found.startswith("8 bits, or 4 where they were published so: the CPU has ")
    monkeypatch.setattr(Kernel, "is_fast", False)
    assert doctor.check_weights().found.startswith("float32: this CPU has no")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", "")
    finding = doctor.check_weights()
    assert finding.state is doctor.State.WARNS
    assert "no C compiler" in finding.found


def test_doctor_says_that_a_transport_cannot_cross_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cma,self")
    assert doctor.check_transport().state is doctor.State.WARNS
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert doctor.check_transport().state is doctor.State.WORKS


def test_doctor_names_a_missing_model_s_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor.check_model().remedy == "pdserve pull smollm2"


def test_doctor_shows_findings_as_table_and_json_and_fails_where_one_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = doctor.Finding("nixl", doctor.State.FAILS, "no agent", "reinstall it")
    monkeypatch.setattr(doctor, "examine", lambda port: [bad])
    assert doctor.main(["--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0] == {
        "check": "nixl",
        "state": "fails",
        "found": "no agent",
        "remedy": "reinstall it",
    }
    assert doctor.main([]) == 1
    assert "reinstall it" in capsys.readouterr().out
