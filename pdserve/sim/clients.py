"""The clients: they call when their time has come, and are told tokens, ends and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pdserve.errors import InvalidRequest
from pdserve.sim.clock import Clock
from pdserve.sim.observer import Observer
from pdserve.sim.workload import SimRequest, Workload


class Clients:
    """delivery_s: until what is told here reaches a client. call: where its requests go."""

    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        observer: Observer,
        delivery_s: float,
        call: Callable[[SimRequest], None],
    ) -> None:
        self._clock = clock
        self._workload = workload
        self._observer = observer
        self._delivery_s = delivery_s
        self._call = call
        self._arrivals: Iterator[SimRequest] = iter(())
        self.num_called = 0
        self.num_ended = 0
        self.num_failed = 0
        self.peak_live = 0

    @property
    def num_live(self) -> int:
        return self.num_called - self.num_ended - self.num_failed

    # ------------------------------------------------------------ calls

    def start(self) -> None:
        """The first of the workload calls at its time, and then one after the other."""
        self._arrivals = self._workload.arrivals()
        self._await_next()

    def _await_next(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._await(request, lambda: self._on_arrival(request))

    def _on_arrival(self, request: SimRequest) -> None:
        self._on_call(request)
        self._await_next()

    def _await(self, request: SimRequest, action: Callable[[], None]) -> None:
        if request.arrival_s < self._clock.now_s:
            raise InvalidRequest(
                f"request {request.number} arrives at {request.arrival_s} s, the clock is at {self._clock.now_s} s "
                "already: sort requests by arrival_s",
                field="arrival_s",
            )
        self._clock.at(request.arrival_s, action)

    def _on_call(self, request: SimRequest) -> None:
        self.num_called += 1
        self.peak_live = max(self.peak_live, self.num_live)
        self._call(request)

    # ------------------------------------------------------------ what they are told

    def on_tokens(self, numbers: Sequence[int]) -> None:
        """Each of these requests has one more token."""
        self._observer.on_tokens(self._clock.now_s + self._delivery_s, numbers)

    def on_end(self, request: SimRequest, num_cached_tokens: int) -> None:
        """All its tokens are told."""
        self.num_ended += 1
        self._observer.on_end(request, self._clock.now_s + self._delivery_s, num_cached_tokens)
        self._ask_next(request)

    def on_failed(self, request: SimRequest, reason: str) -> None:
        self.num_failed += 1
        self._observer.on_failed(request, self._clock.now_s + self._delivery_s, reason)
        self._ask_next(request)

    def _ask_next(self, request: SimRequest) -> None:
        """However it ended, its client may ask something else."""
        following = self._workload.after(request, self._clock.now_s + self._delivery_s)
        if following is not None:
            self._await(following, lambda: self._on_call(following))
