import asyncio
import threading
from collections.abc import Iterator

import pytest

from pdserve.config.fields import FIELDS
from pdserve.rpc.fake import EchoGenerator, fake_node


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in FIELDS:
        monkeypatch.delenv(f"PDSERVE_{name.upper()}", raising=False)


@pytest.fixture
def generator() -> EchoGenerator:
    return EchoGenerator()


@pytest.fixture
def target(generator: EchoGenerator) -> Iterator[str]:
    """The address of a node that echoes prompts, served by a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    node = fake_node(generator)
    try:
        yield asyncio.run_coroutine_threadsafe(node.__aenter__(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(node.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
