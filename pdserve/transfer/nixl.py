"""KV by NIXL READs: the only module that imports nixl.

What it relies on was measured with NIXL 1.5.1 (spec: measured):
- Over tcp the *target's* process serves a READ whenever its serving agent makes progress, so `progress` must go on
  for as long as anybody may read from us.
- `check_xfer_state` says DONE, PROC, or raises; a dead peer raises nixlRemoteDisconnectError from every handle.
- Dropping the last reference to the native agent destroys it, and no byte lands after that. Handles and descriptor
  lists keep it alive, so they have to go first.
- Over tcp that end can take the other side with it: UCX aborts a process ("unexpected error: Endpoint timeout") that
  is just sending what a READ asked for. 5 of 20 cuts in the middle of READs did so to a source that polled each
  millisecond, and every cut to one that did not poll. So let reads go quiet before closing; a cut is a last resort.
- The Python agent locks nothing (sync mode "none"): one thread for all of it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
from nixl_cu12 import nixl_agent, nixl_agent_config, nixl_xfer_handle
from nixl_cu12._bindings import nixlRemoteDisconnectError

from pdserve.errors import PeerError
from pdserve.transfer.base import PeerId
from pdserve.transfer.link import HandleState, NotPosted, Sighting
from pdserve.transfer.linked import CONNECT_TIMEOUT_S, LinkedTransport
from pdserve.transfer.metadata import SlabMetadata
from pdserve.transfer.pieces import MAX_HANDLE_BYTES, Pieces

# It announces each agent on standard output, which belongs to the command that runs.
logging.getLogger("nixl").setLevel(logging.WARNING)

_Table = npt.NDArray[np.uint64]

HOST_MEMORY = "DRAM"
STATES = {"DONE": Sighting(HandleState.DONE), "PROC": Sighting(HandleState.POSTED)}


def _new_agent(name: str, regions: list[tuple[int, int]]) -> nixl_agent:
    """An agent of its own (about 15 ms) that may touch `regions`: (address, bytes)."""
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(address, num_bytes, 0, "") for address, num_bytes in regions], HOST_MEMORY)
    return agent


def _descriptors(blocks: npt.NDArray[np.uint64], spans: list[tuple[int, int]], device_id: int) -> _Table:
    """[num_blocks * per_block, 3] uint64: address, bytes, device of every piece of a slab.

    blocks: [num_blocks], the address of each. spans: (offset in a block, bytes) of a block's pieces.
    """
    table = np.empty((len(blocks), len(spans), 3), np.uint64)
    offsets, num_bytes = np.array(spans, np.uint64).T
    table[:, :, 0] = blocks[:, None] + offsets
    table[:, :, 1] = num_bytes
    table[:, :, 2] = device_id
    return table.reshape(-1, 3)


def _addresses(base: int, num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint64]:
    return np.uint64(base) + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)


@dataclass(slots=True, eq=False)
class NixlHandle:
    """A handle that its wire can empty, since whoever holds the native one keeps the agent alive."""

    native: nixl_xfer_handle | None


class NixlWire:
    """One peer: an agent of our own for it alone, and both slabs' descriptors, prepared once."""

    def __init__(self, agent: nixl_agent, remote: str, local: Any, peer_pieces: Any, warm_up: tuple[Any, Any]) -> None:
        self._agent: nixl_agent | None = agent
        self._remote = remote
        self._local = local
        self._peer_pieces = peer_pieces
        self._warm_up: tuple[Any, Any] | None = warm_up
        self._handles: set[NixlHandle] = set()

    def post(self, sources: list[int], destinations: list[int]) -> tuple[NixlHandle, Sighting]:
        assert self._agent is not None
        try:
            native = self._agent.make_prepped_xfer("READ", self._local, destinations, self._peer_pieces, sources)
        except Exception as error:
            raise NotPosted(f"no handle for {len(sources)} pieces: {_named(error)}") from None
        return self._start(native)

    def post_warm_up(self) -> tuple[NixlHandle, Sighting]:
        assert self._agent is not None
        assert self._warm_up is not None
        into, source = self._warm_up
        try:
            native = self._agent.initialize_xfer("READ", into, source, self._remote)
        except Exception as error:
            raise NotPosted(f"no handle for the first read: {_named(error)}") from None
        return self._start(native)

    def _start(self, native: nixl_xfer_handle) -> tuple[NixlHandle, Sighting]:
        assert self._agent is not None
        handle = NixlHandle(native)
        self._handles.add(handle)
        return handle, _sight(self._agent.transfer, native)

    def poll(self, handle: NixlHandle) -> Sighting:
        assert self._agent is not None
        return _sight(self._agent.check_xfer_state, handle.native)

    def release(self, handle: NixlHandle) -> None:
        assert self._agent is not None
        assert handle.native is not None
        self._agent.release_xfer_handle(handle.native)
        self._forget(handle)

    def _forget(self, handle: NixlHandle) -> None:
        self._handles.discard(handle)
        handle.native = None

    def destroy(self) -> None:
        """Drop the native agent and prove that it is gone (R5): its memory is quiet from then on, not before."""
        assert self._agent is not None
        agent = weakref.ref(self._agent.agent)
        for handle in list(self._handles):
            self._forget(handle)
        self._local = self._peer_pieces = self._warm_up = None
        self._agent = None
        assert agent() is None, "a NIXL agent outlived its peer: somebody still holds what it made"


def _sight(look: Callable[[Any], str], native: nixl_xfer_handle | None) -> Sighting:
    """What `look` says of a handle. Native exceptions have no base of their own, and only one of them is an end."""
    try:
        state = look(native)
    except nixlRemoteDisconnectError:
        return Sighting(HandleState.DISCONNECTED, "the peer's transport disconnected")
    except Exception as error:
        return Sighting(HandleState.DOUBTFUL, _named(error))  # R2
    return STATES.get(state, Sighting(HandleState.DOUBTFUL, f"transfer state {state}"))


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class NixlFabric:
    """Our slab, registered with one serving agent for peers and with one more agent a peer that we read from."""

    def __init__(self, name: str, slab_ptr: int, num_blocks: int, block_bytes: int) -> None:
        self._name = name
        self._slab = (slab_ptr, num_blocks * block_bytes)
        self._blocks = _addresses(slab_ptr, num_blocks, block_bytes)
        # Warm-up reads of all peers land here.
        self._scratch = np.empty(min(block_bytes, MAX_HANDLE_BYTES), np.uint8)
        self._numbers = count()
        self._serving: nixl_agent | None = _new_agent(name, [self._slab])
        self._metadata = SlabMetadata(self._serving.get_agent_metadata(), slab_ptr, num_blocks, block_bytes)

    def metadata(self) -> SlabMetadata:
        return self._metadata

    def connect(self, peer: PeerId, metadata: SlabMetadata, pieces: Pieces) -> NixlWire:
        regions = [self._slab, (self._address, len(self._scratch))]
        agent = _new_agent(f"{self._name}-{next(self._numbers)}-{peer}", regions)
        try:
            return self._prepare(agent, metadata, pieces)
        except Exception as error:  # the peer's bytes were handed to native code, whose exceptions have no base
            raise PeerError(f"{peer}'s transfer metadata was refused: {_named(error)}") from None

    def _prepare(self, agent: nixl_agent, metadata: SlabMetadata, pieces: Pieces) -> NixlWire:
        remote = agent.add_remote_agent(metadata.agent)
        remote = remote.decode() if isinstance(remote, bytes) else remote
        ours = _descriptors(self._blocks, [(run.destination_offset, run.num_bytes) for run in pieces.runs], 0)
        their_blocks = _addresses(metadata.base, metadata.num_blocks, metadata.block_bytes)
        spans = [(run.source_offset, run.num_bytes) for run in pieces.runs]
        theirs = _descriptors(their_blocks, spans, metadata.device_id)
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, HOST_MEMORY)
        peer_pieces = agent.prep_xfer_dlist(remote, theirs, HOST_MEMORY)
        num_bytes = min(pieces.runs[0].num_bytes, len(self._scratch))
        warm_up = (
            agent.get_xfer_descs([(self._address, num_bytes, 0)], HOST_MEMORY),
            agent.get_xfer_descs([(metadata.base, num_bytes, metadata.device_id)], HOST_MEMORY),
        )
        return NixlWire(agent, remote, local, peer_pieces, warm_up)

    @property
    def _address(self) -> int:
        return self._scratch.ctypes.data

    def progress(self) -> None:
        assert self._serving is not None
        self._serving.get_new_notifs()

    def close(self) -> None:
        self._serving = None


class NixlTransport(LinkedTransport[NixlHandle]):
    """KVTransport over NIXL. slab_ptr: the address of [num_blocks, block_bytes] bytes that outlive the transport.

    name: unique among all agents that ever meet, e.g. `role-host-incarnation-rank`.
    """

    def __init__(
        self,
        name: str,
        slab_ptr: int,
        num_blocks: int,
        block_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        fabric = NixlFabric(name, slab_ptr, num_blocks, block_bytes)
        super().__init__(fabric, num_blocks, block_bytes, clock=clock, connect_timeout_s=connect_timeout_s)
