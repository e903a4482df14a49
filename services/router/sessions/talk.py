"""Answers the calls of outside agents over the turn path, and makes trajectories of their sessions.

State is in Redis, so any router can take any call. What is kept of a turn is what its worker sampled; how a
session ends is decided once there, and its trajectories are published before it counts as ended: whoever dies
in between, a sweep finishes it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.router.sessions.bodies import ChatRequest, CompletionRequest, OpenSession
from services.router.sessions.trajectories import branch_id, trajectories
from services.router.sessions.tree import ROOT, Place, Tree, Turn, answer_key, shown
from shared import metrics, topics
from shared.errors import Conflict, FieldProblem, Invalid, NotFound, RollArtError
from shared.events import Message, Sampling, TrajectoryStatus, TurnGenerated, TurnProgressed, TurnRequested
from shared.policies import Policies, PolicyView
from shared.service import Context
from shared.settings import RouterSettings
from shared.state import SessionOutcome, SessionRecord
from shared.tokens import ChatTokenizer
from shared.turns import TurnClient

_LOG = structlog.get_logger()
_SWEEP_S = 2.0
_UNFINISHED_S = 10.0
"""A decided end that nobody has finished after this is finished by the sweep."""
_TREES = 4096
OnProgress = Callable[[TurnProgressed], None]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, placed in its session and ready to be asked."""

    record: SessionRecord
    place: Place
    prompt_ids: list[int]
    sampling: Sampling
    hidden: tuple[int, ...]
    """Stop tokens that the caller has asked for: not shown."""
    tokenizer: ChatTokenizer
    stream: bool
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])


class Sessions:
    """The sessions of this router."""

    def __init__(self, context: Context, settings: RouterSettings) -> None:
        self._context = context
        self._state = context.state
        self._settings = settings
        self._policies = Policies(context.state, context.store)
        self._trees: OrderedDict[tuple[str, int], Tree] = OrderedDict()
        self._client: TurnClient | None = None
        self._starting = asyncio.Lock()
        self._asking: dict[tuple[str, int], set[asyncio.Task[Turn]]] = {}

    async def open(self, wanted: OpenSession) -> SessionRecord:
        """Open a session; one that is open already under this attempt is given as it is.

        Raises NotFound for an unknown policy, CapacityReached, or Conflict as `State.open_session` says.
        """
        view = await self._policies.view(wanted.policy)
        session_id = wanted.session_id or f"s-{uuid.uuid4().hex[:16]}"
        known = await self._state.session(session_id)
        if known is not None and known.attempt < wanted.attempt and known.state != "ended":
            outcome = SessionOutcome(status=TrajectoryStatus.ABORTED, reason="replaced")
            await self.end(session_id, known.attempt, outcome)
        record = SessionRecord(
            session_id=session_id,
            attempt=wanted.attempt,
            policy=wanted.policy,
            task=wanted.task,
            run_id=wanted.run_id,
            group_id=wanted.group_id or f"{wanted.run_id}/{session_id}",
            member=wanted.member,
            context_window=wanted.context_window,
            sampling=Sampling.model_validate(wanted.sampling.model_dump()),
            affinity=wanted.affinity,
            prefill_affinity=wanted.prefill_affinity,
            phases=wanted.phases,
            start_version=view.version,
            created_at=time.time(),
        )
        return await self._state.open_session(record, limit=self._settings.max_sessions)

    async def find(self, session_id: str) -> tuple[SessionRecord, Tree]:
        """A session and its turns. Raises NotFound."""
        record = await self._state.session(session_id)
        if record is None:
            raise NotFound(f"no session {session_id!r}")
        return record, await self._tree(record)

    async def place(
        self, session_id: str, attempt: int | None, request: ChatRequest | CompletionRequest
    ) -> Call:
        """Where a call goes on; a session that is not known yet, or a later attempt, is opened by it.

        Raises Invalid naming the numbers where there is no room in the context window, and what `open`
        raises.
        """
        record = await self._record(session_id, attempt, request.model)
        view = await self._policies.view(record.policy)
        tokenizer = view.tokenizer
        tree = await self._tree(record)
        if isinstance(request, ChatRequest):
            place = tree.place_chat(request, tokenizer)
        else:
            place = tree.place_completion(request, tokenizer)
        hidden = _stop_ids(request.stop or [], tokenizer)
        prompt_ids = tree.ids(place.parent) + place.context_ids
        limit = _window(record, view)
        if limit is not None and len(prompt_ids) >= limit:
            raise _too_long(len(prompt_ids), limit)
        return Call(
            record=record,
            place=place,
            prompt_ids=prompt_ids,
            sampling=request.sampling(record.sampling, (*tokenizer.end_ids, *hidden)),
            hidden=(*hidden, *request.stop_token_ids),
            tokenizer=tokenizer,
            stream=request.stream,
        )

    async def ask(self, call: Call, on_progress: OnProgress | None = None) -> Turn:
        """The answer, kept in its session. Cancelled, its sampling is aborted and nothing is kept.

        Raises what `TurnClient.ask` raises, Invalid where the prompt leaves no room in the worker's window,
        or Conflict where the session has ended meanwhile.
        """
        record = call.record
        task = asyncio.create_task(self._ask(call, on_progress))
        asking = self._asking.setdefault((record.session_id, record.attempt), set())
        asking.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise Conflict(f"session {record.session_id!r} has ended meanwhile") from None
        finally:
            asking.discard(task)
            if not asking:
                self._asking.pop((record.session_id, record.attempt), None)

    async def _ask(self, call: Call, on_progress: OnProgress | None) -> Turn:
        record, parent = call.record, call.place.parent
        client = await self._turns()
        above = ROOT if parent is None else parent.number
        changed = parent is not None and parent.draw != _draw(call.sampling)
        number, first = await self._state.next_session_turn(record, parent=above, alone=changed)
        branch = number if not first else 0 if parent is None else parent.branch
        began = time.perf_counter()
        kept = False
        try:
            turn = self._request(call, client, number=number, branch=branch)
            generated = await client.ask(turn, on_progress=on_progress)
            wait_s = time.perf_counter() - began
            answered = self._answered(call, generated, number=number, branch=branch, wait_s=wait_s)
            await self._state.add_session_turn(record, number, answered.model_dump_json())
            kept = True
        except asyncio.CancelledError:
            await self._state.abort_turns(branch_id(record, branch), record.attempt)
            metrics.SESSION_TURNS.labels("aborted").inc()
            raise
        except RollArtError as error:
            metrics.SESSION_TURNS.labels(error.code).inc()
            raise
        finally:
            if first and not kept:
                await self._state.give_up_session_turn(record, parent=above)
        metrics.SESSION_TURNS.labels("answered").inc()
        return answered

    def _request(self, call: Call, client: TurnClient, *, number: int, branch: int) -> TurnRequested:
        record, parent = call.record, call.place.parent
        deadline = time.time() + self._settings.turn_deadline_s
        window = record.context_window or len(call.prompt_ids) + call.sampling.max_tokens
        return TurnRequested(
            run_id=record.run_id,
            trajectory_id=branch_id(record, branch),
            attempt=record.attempt,
            turn=number,
            task=record.task,
            policy=record.policy,
            prompt_ids=call.prompt_ids,
            sampling=call.sampling,
            context_window=window,
            min_version=record.start_version,
            deadline=deadline,
            try_deadline=client.try_deadline(deadline),
            asker=client.asker,
            reply_partition=client.partition,
            last_worker=parent.worker_id if parent else None,
            last_prefill_worker=parent.prefill_worker if parent else None,
            affinity=record.affinity,
            prefill_affinity=record.prefill_affinity,
            phases=record.phases,
            stream=call.stream,
        )

    def _answered(
        self, call: Call, generated: TurnGenerated, *, number: int, branch: int, wait_s: float
    ) -> Turn:
        if not generated.token_ids:
            raise _too_long(len(call.prompt_ids), None)
        text = shown(call.tokenizer, generated.token_ids, hidden=call.hidden)
        place = call.place
        return Turn(
            number=number,
            parent=ROOT if place.parent is None else place.parent.number,
            branch=branch,
            key=answer_key(place, text),
            context_ids=place.context_ids,
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            versions=generated.versions,
            finish_reason=generated.finish_reason,
            sampling=call.sampling,
            messages=[*place.messages, Message(role="assistant", content=text)],
            worker_id=generated.worker_id,
            device_class=generated.device_class,
            prefill_worker=generated.handover.prefill_worker if generated.handover else None,
            cached_tokens=generated.cached_tokens,
            wait_s=wait_s,
        )

    async def end(self, session_id: str, attempt: int | None, outcome: SessionOutcome) -> SessionRecord:
        """End a session; the same again is fine. Its trajectories are in the broker when this returns.

        Raises NotFound, or Conflict as `State.decide_session` says.
        """
        record = await self._state.decide_session(session_id, attempt, outcome)
        for task in list(self._asking.get((session_id, record.attempt), ())):
            task.cancel()
        return record if record.state == "ended" else await self._finish(record)

    async def _finish(self, record: SessionRecord) -> SessionRecord:
        """Publish what a session has become. May happen twice where a router dies; ids are the same then."""
        tree = await self._tree(record)
        made = trajectories(record, tree)
        for trajectory in made:
            await self._context.bus.send(
                topics.TRAJECTORIES,
                trajectory,
                key=trajectory.group_id,
                run_id=trajectory.run_id,
                purpose=trajectory.purpose,
            )
        assert record.outcome is not None
        metrics.SESSIONS_ENDED.labels(record.outcome.status.value, record.outcome.reason).inc()
        self._trees.pop((record.session_id, record.attempt), None)
        return await self._state.close_session(record, [one.trajectory_id for one in made])

    async def sweep(self) -> None:
        """Loop. Ends sessions that are idle, finishes ends that nobody finished; woken every 2 s."""
        while True:
            metrics.SESSIONS_OPEN.set(await self._state.count_sessions())
            now = time.time()
            for session_id, at in await self._state.quiet_sessions(now - _UNFINISHED_S):
                record = await self._state.session(session_id)
                if record is None:
                    continue
                try:
                    if record.state == "ending":
                        await self._finish(record)
                    elif record.state == "open" and at < now - self._settings.session_idle_s:
                        outcome = SessionOutcome(status=TrajectoryStatus.ABORTED, reason="idle")
                        await self.end(session_id, record.attempt, outcome)
                except Conflict:
                    pass  # its caller, or another router, was quicker
                except RollArtError as error:
                    _LOG.warning("session not ended", session=session_id, error=error.message)
            await asyncio.sleep(min(_SWEEP_S, self._settings.session_idle_s))

    async def follow(self) -> None:
        """Loop. Keeps the versions of policies up to date; see `Policies.follow`."""
        await self._policies.follow()

    async def stop(self) -> None:
        """Give the reply partition back."""
        if self._client is not None:
            await self._client.stop()

    async def _record(self, session_id: str, attempt: int | None, model: str) -> SessionRecord:
        known = await self._state.session(session_id)
        if known is None or (attempt is not None and attempt > known.attempt):
            policy = model if known is None else known.policy
            if not policy:
                raise NotFound(f"no session {session_id!r}; open it, or name a policy as model")
            body = {"session_id": session_id, "attempt": attempt or 0, "policy": policy}
            if known is not None:
                kept = ("task", "run_id", "group_id", "member", "context_window", "phases")
                body |= {name: getattr(known, name) for name in (*kept, "affinity", "prefill_affinity")}
                body["sampling"] = known.sampling.model_dump(exclude={"stop_token_ids"})
            return await self.open(OpenSession.model_validate(body))
        if attempt is not None and attempt < known.attempt:
            raise Conflict(f"attempt {attempt} of session {session_id!r} was replaced by {known.attempt}")
        if known.state != "open":
            raise Conflict(f"session {session_id!r}, attempt {known.attempt}, has ended: ask a later attempt")
        return known

    async def _tree(self, record: SessionRecord) -> Tree:
        """Its turns, those of other routers too."""
        key = (record.session_id, record.attempt)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = Tree()
            while len(self._trees) > _TREES:
                self._trees.popitem(last=False)
        self._trees.move_to_end(key)
        found = await self._state.session_turns(record, tree.turns.keys())
        tree.add(Turn.model_validate_json(raw) for raw in found.values())
        return tree

    async def _turns(self) -> TurnClient:
        """The asking side; started by the first call, so that a router without sessions reads no replies."""
        async with self._starting:
            if self._client is None:
                context = self._context
                client = TurnClient(
                    context.bus,
                    context.state,
                    asker=context.settings.process_id,
                    try_deadline_s=self._settings.try_deadline_s,
                )
                await client.start(context.supervisor)
                self._client = client
        return self._client


def _draw(sampling: Sampling) -> tuple[float, float, int]:
    return sampling.temperature, sampling.top_p, sampling.top_k


def _window(record: SessionRecord, view: PolicyView) -> int | None:
    known = [limit for limit in (record.context_window, view.window) if limit is not None]
    return min(known, default=None)


def _too_long(tokens: int, limit: int | None) -> Invalid:
    window = f"the context window {limit}" if limit is not None else "as many as the model's window or more"
    message = f"the prompt has {tokens} tokens, {window}: no room for a new one"
    return Invalid(message, fields=[FieldProblem(field="prompt", message=message)])


def _stop_ids(texts: list[str], tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Stop texts as tokens. Raises Invalid where one is not exactly one token."""
    found = []
    for text in texts:
        ids = tokenizer.text_ids(text)
        if len(ids) != 1:
            message = f"{text!r} is {len(ids)} tokens; a stop text must be one: name it in stop_token_ids"
            raise Invalid(f"stop: {message}", fields=[FieldProblem(field="stop", message=message)])
        found += ids
    return tuple(found)
