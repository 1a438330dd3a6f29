"""A rank process: `python -m pdserve.engine.rank_process`, told what to be on standard input."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

from pdserve.engine.building import build
from pdserve.engine.channel import RankChannel
from pdserve.engine.launch import RankSpec, read_spec
from pdserve.engine.messages import FromRank, StartFailed, ToRank
from pdserve.engine.rank import RankLoop
from pdserve.errors import StartupError
from pdserve.telemetry import configure_logging

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Exit status 0 after Stop, 2 when it could not start, 3 when another process of its group is gone."""
    _end_with_parent()
    spec = read_spec(sys.stdin.buffer.read())
    configure_logging(spec.log_level, spec.log_format, spec.source)
    front: RankChannel[ToRank, FromRank] = RankChannel(spec.endpoint, ToRank)
    try:
        return _run(spec, front)
    finally:
        front.close()


def _run(spec: RankSpec, front: RankChannel[ToRank, FromRank]) -> int:
    try:
        rank = build(spec, front)
    except StartupError as error:
        front.send(StartFailed(error.message))
        return 2
    except MemoryError:
        front.send(StartFailed("out of memory while loading: lower --num-kv-blocks or --kv-memory-fraction"))
        return 2
    if isinstance(loop := rank.loop, RankLoop):
        signal.signal(signal.SIGCONT, lambda *_: loop.pace.excuse())
    front.send(rank.ready)
    try:
        rank.loop.run()
    except (ConnectionError, TimeoutError) as error:
        log.warning("in the middle of a round: %s; this process ends too", error)
        return 3
    rank.close()
    return 0


def _end_with_parent() -> None:
    """A node that was killed leaves no rank behind. Signals meant for the node reach us too and are its to handle."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
