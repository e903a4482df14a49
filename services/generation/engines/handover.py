"""Both ends of handing over KV, as the torch engine uses them. Everything here runs on the engine's thread,
but
for what serves KV and what hears that some has arrived.

A prefill engine leases the blocks of a prompt and serves them; a decode engine fetches them while it goes on
with others, and writes them into blocks of its own when the sequence is admitted.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import structlog
import torch

from services.generation.engines.kv_cache import BLOCK_TOKENS, BlockPool, KvStore
from services.generation.engines.sequence import Arrival, Sequence
from services.generation.kv.client import Fetched, KvClient, TransferParams, parse_params
from services.generation.kv.leases import Lease, LeaseTable
from services.generation.kv.server import KvServer
from services.generation.kv.wire import KvLayout
from shared.settings import GenerationSettings

log = structlog.get_logger()

_GRACE_S = 1.0
"""By which a fetch that has timed out may still be about to say so."""


class KvHandover:
    """KV that leaves an engine, and KV that comes to it."""

    def __init__(
        self, pool: BlockPool, store: KvStore, *, dtype: torch.dtype, settings: GenerationSettings
    ) -> None:
        self._pool = pool
        self._store = store
        self._dtype = dtype
        self._settings = settings
        self._server: KvServer | None = None
        self._client: KvClient | None = None
        self._arrived: queue.SimpleQueue[tuple[Sequence, Fetched]] = queue.SimpleQueue()
        self._arriving: dict[str, Sequence] = {}
        self.leases = LeaseTable()
        self.wake: Callable[[], None] = lambda: None

    @property
    def arriving(self) -> int:
        """Requests whose KV is on its way."""
        return len(self._arriving)

    @property
    def has_arrived(self) -> bool:
        """Whether `collect` would give a sequence."""
        return not self._arrived.empty()

    def serve(self) -> None:
        """Listen for decode workers. Raises Invalid where GENERATION__KV_HOST or KV_PORT cannot be had."""
        self._server = KvServer(
            self.leases,
            layout=self._layout(),
            read=self._read,
            host=self._settings.kv_host,
            port=self._settings.kv_port,
            ports=self._settings.max_policies,
        )

    def lease(self, sequence: Sequence, *, version: int) -> TransferParams:
        """Keep the KV of a sequence's prompt for whoever knows what is returned."""
        if self._server is None:
            self.serve()
        assert self._server is not None
        request = sequence.request
        lease = Lease(
            request_id=request.request_id,
            session=request.session,
            tokens=list(request.prompt_ids),
            blocks=sequence.blocks,
            version=version,
            expires_at=time.monotonic() + self._settings.kv_lease_s,
        )
        self.leases.add(lease)
        return TransferParams(
            remote_host=self._server.host,
            remote_port=self._server.port,
            remote_engine_id=f"{self._server.host}:{self._server.port}",
            remote_request_id=request.request_id,
            remote_num_tokens=len(lease.tokens),
            lease=lease.token,
        )

    def reclaim(self, *, version: int) -> None:
        """Take back the blocks of leases that have ended. What was fetched stays for the session's next
        turn."""
        for lease in self.leases.take_ended():
            # A newer turn of the session may have left its own meanwhile, which is longer.
            stale = lease.version != version or self._pool.common(lease.session, lease.tokens) > 0
            if lease.outcome == "fetched" and not stale:
                self._pool.keep(lease.session, lease.tokens, lease.blocks)
            else:
                self._pool.release(lease.blocks)

    def fetch(self, sequence: Sequence) -> None:
        """Begin to get the KV of a prefilled request; `wake` is called when it is here."""
        prefilled = sequence.request.prefilled
        assert prefilled is not None
        timeout_s = self._settings.kv_fetch_timeout_s
        start = min(
            self._pool.common(sequence.request.session, sequence.tokens), len(sequence.request.prompt_ids)
        )
        sequence.arrival = Arrival(start=start, limit=time.monotonic() + timeout_s + _GRACE_S)
        self._arriving[sequence.request.request_id] = sequence
        params = parse_params(prefilled.kv_transfer_params)
        if params is None or params.remote_num_tokens != len(sequence.request.prompt_ids):
            self._arrived.put((sequence, Fetched("incompatible")))
            return
        if self._client is None:
            self._client = KvClient(layout=self._layout(), timeout_s=timeout_s)

        def done(fetched: Fetched) -> None:
            self._arrived.put((sequence, fetched))
            self.wake()

        self._client.fetch(params, start=start, done=done)

    def collect(self) -> Iterator[Sequence]:
        """Sequences whose KV is here, or will not come any more."""
        while not self._arrived.empty():
            sequence, fetched = self._arrived.get()
            if self._arriving.get(sequence.request.request_id) is sequence:
                yield self._settle(sequence, fetched)
        now = time.monotonic()
        overdue = [s for s in self._arriving.values() if s.arrival is not None and s.arrival.limit <= now]
        for sequence in overdue:
            yield self._settle(sequence, Fetched("late"))

    def forget(self, sequence: Sequence) -> None:
        """An aborted request: its KV is of no use."""
        self._arriving.pop(sequence.request.request_id, None)
        prefilled = sequence.request.prefilled
        params = parse_params(prefilled.kv_transfer_params) if prefilled is not None else None
        arrival = sequence.arrival
        if self._client is not None and params is not None and arrival is not None and not arrival.used:
            self._client.release(params)

    def adopt(self, sequence: Sequence, *, reused: int, version: int) -> int:
        """Write what was fetched into the blocks of a sequence, of which `reused` tokens are computed
        already.

        Returns the tokens computed now; where the KV cannot be used, `arrival.recomputed` says why.
        """
        arrival = sequence.arrival
        if arrival is None or arrival.fetched is None or arrival.recomputed or arrival.used:
            return reused
        fetched, prompt = arrival.fetched, len(sequence.request.prompt_ids)
        if fetched.reason or fetched.version != version:
            arrival.recomputed = fetched.reason or "version"
        elif reused < arrival.start:
            # The prefix that was here when the rest was asked for has been evicted since.
            arrival.recomputed = "evicted"
        elif reused < prompt:
            self._store.adopt(sequence.blocks, self._rows(fetched, prompt), start=arrival.start)
            arrival.used = prompt - arrival.start
            reused = prompt
        if arrival.recomputed:
            log.warning("kv_recomputed", request_id=sequence.request.request_id, reason=arrival.recomputed)
            arrival.fetched = Fetched(arrival.recomputed, seconds=fetched.seconds)
        return reused

    def close(self) -> None:
        """End all threads."""
        if self._server is not None:
            self._server.close()
        if self._client is not None:
            self._client.close()

    def _settle(self, sequence: Sequence, fetched: Fetched) -> Sequence:
        del self._arriving[sequence.request.request_id]
        assert sequence.arrival is not None
        sequence.arrival.fetched = fetched
        return sequence

    def _layout(self) -> KvLayout:
        layers = (self._store.layers[layer] for layer in sorted(self._store.layers))
        return KvLayout(
            dtype=str(self._dtype).removeprefix("torch."),
            itemsize=self._dtype.itemsize,
            widths=[
                (keys.shape[1] // BLOCK_TOKENS, values.shape[1] // BLOCK_TOKENS) for keys, values in layers
            ],
        )

    def _read(self, lease: Lease, start: int) -> Iterator[memoryview]:
        for rows in self._store.export(lease.blocks, start=start, stop=len(lease.tokens)):
            yield memoryview(rows.view(torch.uint8).numpy().data)

    def _rows(self, fetched: Fetched, stop: int) -> Iterator[torch.Tensor]:
        """The fetched bytes as rows, in the order in which `_read` gave them."""
        at, count = 0, stop - fetched.start
        for widths in self._layout().widths:
            for width in widths:
                size = count * width * self._dtype.itemsize
                piece = torch.frombuffer(fetched.data[at : at + size], dtype=self._dtype)
                yield piece.view(count, width)
                at += size
