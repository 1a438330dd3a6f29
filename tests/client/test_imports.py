import subprocess
import sys

HEAVY = ("torch", "numpy", "msgspec", "pydantic", "zmq", "grpc_status", "google.rpc", "tokenizers")


def test_the_sdk_needs_grpc_and_protobuf_only() -> None:
    program = f"import pdserve.client, sys; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"
