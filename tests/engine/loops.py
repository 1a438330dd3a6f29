"""A round loop in its thread, with the front played by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.engine.messages import Abort, AskLoad, FromRank, LoadReport, Output, Outputs, Ready, Stop, Submit
from pdserve.model.fake import expected_tokens
from pdserve.request import FUSED, RankLoad, RequestId, SamplingParams, TokenRequest
from pdserve.scheduler.plan import RoundPlan
from pdserve.transfer.loopback import LoopbackNetwork
from tests.engine.other_end import LIMIT_S, OtherEnd, other_end, wait_for
from tests.roles.inside import BANNED, VOCAB_SIZE, Computed, Held, OpenStorage, Size
from tests.roles.journal import Journal
from tests.roles.threads import RankThread


@dataclass
class Loop:
    """A loop in its thread, and the front by hand."""

    front: OtherEnd
    inside: RankThread
    journal: Journal

    def submit(self, name: str, prompt: Sequence[int], max_new_tokens: int, **sampling: object) -> RequestId:
        request_id = RequestId(name)
        params = SamplingParams(max_new_tokens, **sampling)  # type: ignore[arg-type]
        self.front.send(Submit(TokenRequest(request_id, tuple(prompt), params), FUSED))
        return request_id

    def until_over(self, *names: str) -> dict[str, list[Output]]:
        """The outputs of these requests, up to the end of each."""
        outputs: dict[str, list[Output]] = {name: [] for name in names}
        waiting = set(names)
        while waiting:
            for output in self.front.hear(Outputs).outputs:
                outputs[output.request_id].append(output)
                if output.finish is not None or output.error_name:
                    waiting.remove(output.request_id)
        return outputs

    def abort(self, *names: str) -> None:
        self.front.send(*(Abort(RequestId(name)) for name in names))

    def load(self, *, check_integrity: bool = True) -> tuple[RankLoad, str]:
        self.front.send(AskLoad(1, check_integrity))
        report = self.front.hear(LoadReport)
        return report.load, report.integrity

    def counters(self) -> dict[str, int]:
        return dict(self.load()[0].counters)

    def until_idle(self) -> dict[str, int]:
        """The counters once nothing lives, in any tier, and nothing is on its way down; the tables are sound."""
        deadline_s = time.monotonic() + LIMIT_S
        num_quiet = 0
        while num_quiet < 2:  # what the first look missed, between one stage and the next, shows in the second
            assert time.monotonic() < deadline_s, "it never came to rest"
            load, integrity = self.load()
            assert integrity == ""
            num_quiet = num_quiet + 1 if self._is_quiet() else 0
        assert (load.num_held_blocks, self.num_held_host_blocks, self.inside.loop._live) == (0, 0, {})
        return dict(load.counters)

    def _is_quiet(self) -> bool:
        """No request, and nothing in the stages from the device to storage, looked at in that order."""
        scheduler, host = self.inside.scheduler, self.inside.scheduler._host
        if scheduler._residents.by_id or (host.pool.num_blocks and scheduler._pool.coldest_unsaved()):
            return False
        return scheduler.is_idle and not (host.has_storage and host.pool.coldest_unsaved()) and scheduler.is_idle

    @property
    def num_held_host_blocks(self) -> int:
        return self.inside.scheduler._host.pool.num_held

    def plans(self) -> list[RoundPlan]:
        """Of every forward so far."""
        return [computed.plan for computed in self.journal.of(Computed)]

    def until_held(self, number: int = 1) -> RoundPlan:
        """The plan of the number-th forward that waits."""
        return wait_for(lambda: self.journal.of(Held)[number - 1 : number] or None)[0].plan


@contextmanager
def running(sockets: Path, size: Size, open_storage: OpenStorage | None = None) -> Iterator[Loop]:
    endpoint = f"ipc://{sockets}/loop"
    with other_end(endpoint, FromRank) as front, closing(asyncio.new_event_loop()) as events:
        journal = Journal(events)
        inside = RankThread("rank", size, LoopbackNetwork(), journal, endpoint, "", False, open_storage=open_storage)
        inside.start()
        front.hear(Ready)
        try:
            yield Loop(front, inside, journal)
        finally:
            inside.runner.release()
            front.send(Stop())
            inside.join()


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, BANNED)
