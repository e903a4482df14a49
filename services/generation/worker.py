"""The engine loop: between two engine steps handle commands; otherwise advance the batch by one step;
publish a finished request at once. An add or an abort never stalls others.

One thread owns every engine of the process. The event loop only posts commands to it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from services.generation import replies
from services.generation.hosted import Assigned, Hosted, InHand, fault_of
from services.generation.profiles import Profiles
from services.generation.protocol import Engine, EngineRequest, EngineResult, WeightLoad
from shared import metrics
from shared.bus import Delivery, Publisher
from shared.errors import Conflict, RollArtError, WeightsInvalid
from shared.events import (
    Event,
    PrefillRequested,
    Role,
    TurnFailed,
    TurnRequested,
)
from shared.topics import REPLIES, worker_topic

_LOG = structlog.get_logger()
_IDLE_S = 0.5
_SWEEP_S = 0.5
_SAMPLED = metrics.TOKENS.labels("sampled")
_CACHED = metrics.TOKENS.labels("cached")
_TRANSFERRED = metrics.TOKENS.labels("transferred")


class Worker:
    """Owns the engines. `run` is the engine thread; every other method may be called from the event loop."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        worker_id: str,
        role: Role = "both",
        device_class: str,
        max_policies: int,
        want: Callable[[str], None],
    ) -> None:
        """`want` is called, from the engine thread, with a policy reference that is missing or too old."""
        self._publisher = publisher
        self._worker_id = worker_id
        self._role = role
        self._device_class = device_class
        self._max_policies = max_policies
        self._want = want
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._hosted: dict[str, Hosted] = {}
        self._homeless: dict[str, list[InHand]] = {}
        self._sweep_at = 0.0
        self._accepted = 0
        self._admitted = 0
        self._streaming = False
        """Whether an asker may want tokens as they are sampled."""
        self.profiles = Profiles(role)
        self.failures: dict[str, int] = {}
        """Turns answered with an error, by its code."""
        self.recomputed: dict[str, int] = {}
        """Prompts of split turns that were computed here after all, by reason."""
        self.busy_s = 0.0
        self.exposed_s = 0.0
        self.loads = 0
        self.load_failures = 0
        self.tokens_sampled = 0

    # Any thread

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """A batch of assigned turns."""
        self._accepted += len(deliveries)
        self._commands.put(lambda: self._admit(deliveries))

    def host(self, reference: str, engine: Engine) -> None:
        """Take in an engine that is loaded and ready."""
        self._commands.put(lambda: self._move_in(Hosted(reference, engine)))

    def begin_load(self, reference: str, version: int) -> WeightLoad | None:
        """An update of a hosted policy; None where it is not hosted (any more)."""
        hosted = self._hosted.get(reference)
        return hosted.engine.begin_load(version) if hosted is not None else None

    def swap(
        self,
        reference: str,
        update: WeightLoad,
        *,
        version: int,
        done: Callable[[WeightsInvalid | None], None],
    ) -> None:
        """Put an update in, between two steps; `done` hears the outcome, on the engine thread."""
        self._commands.put(lambda: done(self._swap(reference, update, version)))

    def after_commands(self, done: Callable[[], None]) -> None:
        """Call `done`, on the engine thread, when what was posted before is handled."""
        self._commands.put(done)

    def refuse(self, reference: str, error: RollArtError) -> None:
        """A wanted policy cannot be had: fail the turns that wait for it."""
        self._commands.put(lambda: self._refuse(reference, error))

    def abort_runs(self, run_ids: frozenset[str]) -> None:
        """Drop every turn of these runs."""
        self._commands.put(lambda: self._abort(lambda held: held.turn.run_id in run_ids, "run"))

    def abort_attempts(self, aborted: Mapping[str, float]) -> None:
        """Drop the turns of single trajectories that were assigned before their abort: `trajectory/attempt` →
        when. The same turn asked again later is another matter."""

        def gone(held: InHand) -> bool:
            at = aborted.get(held.attempt_key)
            return at is not None and held.request.assigned_at <= at

        self._commands.put(lambda: self._abort(gone, "trajectory"))

    def stop(self) -> None:
        """End the engine thread; what is in hand stays unacknowledged."""
        self._stopping.set()
        self._commands.put(lambda: None)

    def versions(self) -> dict[str, int]:
        """Policy reference → version live."""
        return {reference: hosted.engine.version for reference, hosted in list(self._hosted.items())}

    def run_ids(self) -> set[str]:
        """Runs that have turns in hand."""
        return {held.turn.run_id for held in self._in_hand()}

    def load_numbers(self) -> tuple[int, int, float]:
        """Running sequences, waiting requests, KV usage."""
        hosted = list(self._hosted.values())
        running = sum(h.engine.running for h in hosted)
        waiting = sum(h.engine.waiting + len(h.held) for h in hosted)
        waiting += sum(len(turns) for turns in list(self._homeless.values()))
        # An engine that hangs takes no commands: what was accepted since counts all the same.
        waiting += self._accepted - self._admitted
        return running, waiting, max((h.engine.kv_usage for h in hosted), default=0.0)

    @property
    def kv_leases(self) -> int:
        """Prefilled prompts whose KV waits to be fetched."""
        return sum(hosted.engine.kv_leases for hosted in list(self._hosted.values()))

    def _in_hand(self) -> list[InHand]:
        found = [turn for turns in list(self._homeless.values()) for turn in list(turns)]
        for hosted in list(self._hosted.values()):
            found += [*hosted.live.values(), *hosted.held, *hosted.handed_over.values()]
        return found

    # The engine thread

    def run(self) -> None:
        """Thread. Consumes commands and produces replies; waits for a command when no engine has work, and is
        woken by an engine to which KV or a result has come."""
        try:
            while not self._stopping.is_set():
                busy = [hosted for hosted in self._hosted.values() if hosted.engine.has_work]
                self._handle_commands(block=not busy)
                self._sweep()
                for hosted in list(self._hosted.values()):
                    if hosted.engine.has_work:
                        self._step(hosted)
        finally:
            for hosted in self._hosted.values():
                hosted.engine.close()

    def _handle_commands(self, *, block: bool) -> None:
        try:
            command = self._commands.get(timeout=_IDLE_S) if block else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _step(self, hosted: Hosted) -> None:
        began = time.perf_counter()
        results = hosted.engine.step()
        now = time.perf_counter()
        self.busy_s += now - began
        metrics.ENGINE_STEP_SECONDS.observe(now - began)
        running = sum(other.engine.running for other in self._hosted.values()) + len(results)
        self.profiles.shares.tick(now, running)
        for result in results:
            self._reply(hosted, result, now)
        if self._streaming:
            self._streaming = replies.report_progress(hosted, self._publisher)

    def _admit(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            request = delivery.event
            assert isinstance(request, Assigned)
            self._place(InHand(delivery, request))
        self._admitted += len(deliveries)

    def _place(self, held: InHand) -> None:
        turn = held.turn
        if time.time() >= turn.try_deadline:
            self._drop(held, "expired")
            return
        hosted = self._hosted.get(turn.policy)
        if hosted is None:
            self._homeless.setdefault(turn.policy, []).append(held)
            self._want(turn.policy)
        elif hosted.engine.version < held.min_version:
            hosted.held.append(held)
            self._want(turn.policy)
        else:
            self._add(hosted, held)

    def _add(self, hosted: Hosted, held: InHand) -> None:
        turn = held.turn
        request_id = f"{turn.trajectory_id}/{turn.attempt}/{turn.turn}/{turn.try_number}"
        self._supersede(hosted, turn)
        request = EngineRequest(
            request_id=request_id,
            session=turn.trajectory_id,
            prompt_ids=turn.prompt_ids,
            sampling=turn.sampling,
            context_window=turn.context_window,
            prefill_only=isinstance(held.request, PrefillRequested),
            prefilled=held.prefilled,
        )
        hosted.used_at = time.monotonic()
        if turn.prompt_ids and len(turn.prompt_ids) >= min(turn.context_window, hosted.engine.window):
            self._answer(held, replies.context_full(request_id))
            return
        try:
            hosted.engine.add(request)
        except Conflict:
            # The same request delivered twice: the first one answers, this one has nothing to add.
            held.delivery.ack()
        except RollArtError as error:
            self._reply_failed(held, error)
        else:
            hosted.live[request_id] = held
            self._streaming |= turn.stream

    def _supersede(self, hosted: Hosted, turn: TurnRequested) -> None:
        """An earlier try of the same turn has no reader any more."""
        for number in range(turn.try_number):
            held = hosted.end(f"{turn.trajectory_id}/{turn.attempt}/{turn.turn}/{number}")
            if held is not None:
                self._drop(held, "superseded")

    def _move_in(self, hosted: Hosted) -> None:
        while len(self._hosted) >= self._max_policies:
            idle = [h for h in self._hosted.values() if h.idle]
            if not idle:
                break
            oldest = min(idle, key=lambda h: h.used_at)
            del self._hosted[oldest.reference]
            oldest.engine.close()
            _LOG.info("policy unloaded", policy=oldest.reference)
        hosted.used_at = time.monotonic()
        hosted.engine.attach(lambda: self._commands.put(lambda: None))
        self._hosted[hosted.reference] = hosted
        self.loads += 1
        metrics.WEIGHT_LOADS.labels("loaded").inc()
        for held in self._homeless.pop(hosted.reference, []):
            self._place(held)

    def _swap(self, reference: str, update: WeightLoad, version: int) -> WeightsInvalid | None:
        hosted = self._hosted.get(reference)
        if hosted is None or hosted.engine.version >= version:
            return None
        stalled = bool(hosted.live or hosted.held)
        began = time.perf_counter()
        try:
            update.swap()
        except WeightsInvalid as error:
            return error
        finally:
            if stalled:
                took = time.perf_counter() - began
                self.exposed_s += took
                metrics.WEIGHT_SECONDS.labels("exposed").inc(took)
        self.loads += 1
        metrics.WEIGHT_LOADS.labels("loaded").inc()
        metrics.POLICY_VERSION.set(version)
        held, hosted.held = hosted.held, []
        for turn in held:
            self._place(turn)
        return None

    def _refuse(self, reference: str, error: RollArtError) -> None:
        for held in self._homeless.pop(reference, []):
            self._reply_failed(held, error)

    def _reply(self, hosted: Hosted, result: EngineResult, now: float) -> None:
        held = hosted.live.pop(result.request_id, None)
        if held is None:
            return
        error = fault_of(result)
        if error is not None:
            self._reply_failed(held, error)
        elif result.kv_transfer_params is not None:
            self._hand_over(hosted, held, result)
        else:
            self._answer(held, result)
        if error is None:
            self.profiles.count(held, result, now)
        hosted.judge(error)

    def _hand_over(self, hosted: Hosted, held: InHand, result: EngineResult) -> None:
        request = held.request
        assert isinstance(request, PrefillRequested)
        self._count_tokens(result)
        decode = replies.hand_over(
            request,
            result,
            worker_id=self._worker_id,
            device_class=self._device_class,
            version=hosted.engine.version,
        )
        hosted.handed_over[result.request_id] = held
        topic = worker_topic("decode", request.decode.device_class)
        self._send(held, decode, topic=topic, partition=request.decode.partition)

    def _answer(self, held: InHand, result: EngineResult) -> None:
        self._count_tokens(result, before=len(held.prefilled.token_ids) if held.prefilled else 0)
        if result.recomputed:
            self.recomputed[result.recomputed] = self.recomputed.get(result.recomputed, 0) + 1
            metrics.KV_RECOMPUTED.labels(result.recomputed).inc()
        reply = replies.answer(held, result, worker_id=self._worker_id, device_class=self._device_class)
        self._send(held, reply)

    def _count_tokens(self, result: EngineResult, *, before: int = 0) -> None:
        sampled = max(len(result.token_ids) - before, 0)
        self.tokens_sampled += sampled
        _SAMPLED.inc(sampled)
        _CACHED.inc(result.cached_tokens - result.transferred_tokens)
        _TRANSFERRED.inc(result.transferred_tokens)
        metrics.KV_BYTES.inc(result.transferred_bytes)

    def _reply_failed(self, held: InHand, error: RollArtError) -> None:
        self.failures[error.code] = self.failures.get(error.code, 0) + 1
        metrics.TURNS_FAILED.labels(error.code).inc()
        self._send(held, TurnFailed.of(held.turn, error))

    def _send(
        self, held: InHand, event: Event, *, topic: str = REPLIES, partition: int | None = None
    ) -> None:
        """Publish what becomes of a turn, to its asker or further on; its delivery is then acknowledged."""
        self._publisher.publish(
            topic,
            event,
            partition=held.turn.reply_partition if partition is None else partition,
            run_id=held.turn.run_id,
            traceparent=held.delivery.traceparent,
            on_delivered=held.delivery.ack,
        )

    def _drop(self, held: InHand, reason: str) -> None:
        metrics.TURNS_ABORTED.labels(reason).inc()
        held.delivery.ack()

    def _sweep(self) -> None:
        """Drop what nobody waits for any more; twice a second."""
        if time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + _SWEEP_S
        now = time.time()
        self._abort(lambda held: now >= held.turn.try_deadline, "expired")
        for hosted in self._hosted.values():
            hosted.engine.tend()
        running, waiting, kv_usage = self.load_numbers()
        metrics.ENGINE_RUNNING.set(running)
        metrics.ENGINE_WAITING.set(waiting)
        metrics.KV_USAGE.set(kv_usage)
        metrics.KV_LEASES.set(self.kv_leases)

    def _abort(self, gone: Callable[[InHand], bool], reason: str) -> None:
        dropped = [held for hosted in self._hosted.values() for held in hosted.end_where(gone)]
        for reference, turns in list(self._homeless.items()):
            dropped += [held for held in turns if gone(held)]
            self._homeless[reference] = [held for held in turns if not gone(held)]
        for held in dropped:
            self._drop(held, reason)
