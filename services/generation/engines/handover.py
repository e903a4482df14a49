"""Both ends of handing over KV, as the torch engine uses them.

A prefill engine leases the blocks of a prompt and serves them; a decode engine fetches them while it goes on
with others, and writes them into blocks of its own when the sequence is admitted. All methods are called by
the engine's thread, but for `_read`, by which the threads of the KV server read blocks that nobody writes.
"""

from __future__ import annotations

import queue
import time
from collections import deque
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
_BUFFER_BYTES = 4 << 30
"""KV that has come, or is coming, and waits for blocks: at most this, or that of a single prompt."""


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
        self._known_layout: KvLayout | None = None
        self._arrived: queue.SimpleQueue[tuple[Sequence, Fetched]] = queue.SimpleQueue()
        self._arriving: dict[str, Sequence] = {}
        self._unbegun: deque[Sequence] = deque()
        """Arriving ones for which there is no room in the buffer yet."""
        self._buffered = 0
        self.wake: Callable[[], None] = lambda: None
        self.leases = LeaseTable(lambda: self.wake())

    @property
    def arriving(self) -> int:
        """Requests whose KV is on its way."""
        return len(self._arriving)

    @property
    def has_news(self) -> bool:
        """Whether `reclaim` or `collect` would do anything."""
        return self.leases.has_ended or not self._arrived.empty()

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

    def reclaim(self, *, version: int) -> bool:
        """Take back the blocks of leases that have ended; whether there were any. What was fetched stays for
        the session's next turn."""
        self.leases.expire()
        ended = self.leases.take_ended()
        for lease in ended:
            # A newer turn of the session may have left its own meanwhile, which is longer.
            kept = self._pool.common(lease.session, lease.tokens) == len(lease.tokens)
            if lease.outcome == "fetched" and lease.keep and lease.version == version and not kept:
                self._pool.keep(lease.session, lease.tokens, lease.blocks)
            else:
                self._pool.release(lease.blocks)
        return bool(ended)

    def fetch(self, sequence: Sequence, *, version: int) -> None:
        """Get the KV of a prefilled request; `wake` is called when it is here.

        KV of weights older than the live `version` is not even asked for. Newer weights may be live by the
        time it is used.
        """
        prefilled = sequence.request.prefilled
        assert prefilled is not None
        prompt = sequence.request.prompt_ids
        start = self._pool.common(sequence.request.session, prompt)
        size = self._layout().token_bytes * (len(prompt) - start)
        sequence.arrival = Arrival(start=start, size=size)
        self._arriving[sequence.request.request_id] = sequence
        if prefilled.version < version:
            params = parse_params(prefilled.kv_transfer_params)
            if params is not None:
                self._connect().release(params)
            self._arrived.put((sequence, Fetched("version")))
            return
        self._unbegun.append(sequence)
        self._begin()

    def collect(self) -> Iterator[Sequence]:
        """Sequences whose KV is here, or will not come any more."""
        while not self._arrived.empty():
            sequence, fetched = self._arrived.get()
            assert sequence.arrival is not None
            wanted = self._arriving.get(sequence.request.request_id) is sequence
            if fetched.reason or not wanted:
                self._free(sequence.arrival)
            if wanted:
                yield self._settle(sequence, fetched)
        now = time.monotonic()
        overdue = [s for s in self._arriving.values() if s.arrival is not None and s.arrival.limit <= now]
        for sequence in overdue:
            yield self._settle(sequence, Fetched("late"))

    def forget(self, sequence: Sequence) -> None:
        """An aborted request: its KV is of no use."""
        arrival, prefilled = sequence.arrival, sequence.request.prefilled
        if arrival is None or prefilled is None:
            return
        on_its_way = self._arriving.pop(sequence.request.request_id, None) is sequence
        if arrival.fetch is not None:
            arrival.fetch.cancelled = True
        params = parse_params(prefilled.kv_transfer_params)
        if on_its_way and params is not None:
            self._connect().release(params)
        if arrival.fetched is not None and not arrival.fetched.reason:
            self._free(arrival)

    def adopt(self, sequence: Sequence, *, reused: int, version: int) -> int:
        """Write what was fetched into the blocks of a sequence, of which `reused` tokens are computed
        already.

        Returns the tokens computed now; where the KV cannot be used, `arrival.recomputed` says why.
        """
        arrival = sequence.arrival
        if arrival is None or arrival.fetched is None:
            return reused
        fetched, prompt = arrival.fetched, len(sequence.request.prompt_ids)
        if fetched.reason or fetched.version != version:
            arrival.recomputed = fetched.reason or "version"
            log.warning("kv_recomputed", request_id=sequence.request.request_id, reason=arrival.recomputed)
        elif reused < arrival.start:
            # The prefix that was here when the rest was asked for has been evicted since.
            arrival.recomputed = "evicted"
            log.warning("kv_recomputed", request_id=sequence.request.request_id, reason="evicted")
        elif reused < prompt and reused < len(sequence.tokens) - 1:
            self._store.adopt(sequence.blocks, self._rows(fetched, prompt), start=arrival.start)
            arrival.used, arrival.nbytes = prompt - arrival.start, len(fetched.data)
            # One token is left to compute, for its logits.
            reused = min(prompt, len(sequence.tokens) - 1)
        if not fetched.reason:
            self._free(arrival)
        arrival.fetched = None
        return reused

    def close(self) -> None:
        """End all threads."""
        if self._server is not None:
            self._server.close()
        if self._client is not None:
            self._client.close()

    def _begin(self) -> None:
        """Begin what the buffer has room for, in the order in which it was asked for."""
        while self._unbegun:
            sequence = self._unbegun[0]
            arrival, prefilled = sequence.arrival, sequence.request.prefilled
            assert arrival is not None
            assert prefilled is not None
            wanted = self._arriving.get(sequence.request.request_id) is sequence
            if wanted and self._buffered and self._buffered + arrival.size > _BUFFER_BYTES:
                return
            self._unbegun.popleft()
            params = parse_params(prefilled.kv_transfer_params)
            if not wanted:
                continue
            if params is None or params.remote_num_tokens != len(sequence.request.prompt_ids):
                self._arrived.put((sequence, Fetched("incompatible")))
                continue
            timeout_s = self._settings.kv_fetch_timeout_s
            arrival.buffered = arrival.size
            self._buffered += arrival.size
            arrival.limit = time.monotonic() + timeout_s + _GRACE_S
            arrival.fetch = self._connect().fetch(params, start=arrival.start, done=self._done(sequence))

    def _done(self, sequence: Sequence) -> Callable[[Fetched], None]:
        def done(fetched: Fetched) -> None:
            self._arrived.put((sequence, fetched))
            self.wake()

        return done

    def _settle(self, sequence: Sequence, fetched: Fetched) -> Sequence:
        del self._arriving[sequence.request.request_id]
        assert sequence.arrival is not None
        sequence.arrival.fetched = fetched
        sequence.arrival.seconds = fetched.seconds
        return sequence

    def _free(self, arrival: Arrival) -> None:
        """The memory of what came is given back: others may come."""
        self._buffered -= arrival.buffered
        arrival.buffered = 0
        self._begin()

    def _connect(self) -> KvClient:
        if self._client is None:
            self._client = KvClient(layout=self._layout(), timeout_s=self._settings.kv_fetch_timeout_s)
        return self._client

    def _layout(self) -> KvLayout:
        if self._known_layout is None:
            layers = (self._store.layers[layer] for layer in sorted(self._store.layers))
            self._known_layout = KvLayout(
                dtype=str(self._dtype).removeprefix("torch."),
                itemsize=self._dtype.itemsize,
                widths=[
                    (keys.shape[1] // BLOCK_TOKENS, values.shape[1] // BLOCK_TOKENS)
                    for keys, values in layers
                ],
            )
        return self._known_layout

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
