"""The JSON of every event and REST model is pinned: a change of a wire format is a change of a file here.

`python tests/unit/test_golden.py` writes the files anew after a deliberate change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from shared import api, errors, events, records, summary
from shared.bus.codec import EVENTS, Claim
from shared.bus.tail import Tailed
from shared.recipe import Recipe
from shared.service import Status

GOLDEN = Path(__file__).parents[1] / "golden"

SAMPLING = events.Sampling(temperature=0.5, top_p=0.9, top_k=40, max_tokens=8, stop_token_ids=(2, 7))
REWARD = events.RewardSpec(scorer="success", config={"threshold": 0.5})
TURN = events.TurnRequested(
    run_id="lake-3f2a91",
    trajectory_id="lake-3f2a91/lake-17.3#0",
    attempt=0,
    turn=1,
    try_number=1,
    task="lake",
    policy="lake-3f2a91@4",
    prompt_ids=[1, 5, 9],
    sampling=SAMPLING,
    context_window=512,
    deadline=1700000060.0,
    try_deadline=1700000010.0,
    asker="env-1",
    reply_partition=3,
    last_worker="gen-1",
    last_prefill_worker="gen-2",
    affinity="bandwidth",
    prefill_affinity="compute",
    phases="split",
    stream=True,
    min_version=4,
)
TRAJECTORY = events.TrajectoryCompleted(
    run_id="lake-3f2a91",
    trajectory_id="lake-3f2a91/lake-17.3#0",
    group_id="lake-3f2a91/lake-17",
    member=3,
    attempt=0,
    task="lake",
    purpose="train",
    split="train",
    seed=17,
    policy="lake-3f2a91",
    status=events.TrajectoryStatus.TRUNCATED,
    reason="max_turns",
    token_ids=[1, 5, 9],
    mask=[0, 1, 1],
    logprobs=[0.0, -0.25, -1.5],
    versions=[-1, 4, 5],
    start_version=4,
    sampling=SAMPLING,
    turns=[
        events.TurnRecord(
            start=1,
            sampled=2,
            reward=1.0,
            finish_reason=events.FinishReason.LENGTH,
            worker_id="gen-1",
            device_class="bandwidth",
            cached_tokens=1,
            wait_s=0.5,
            env_s=0.125,
        )
    ],
    messages=[
        events.Message(role="user", content="You see ice."),
        events.Message(role="assistant", content="left"),
    ],
    reward=REWARD,
    reset_s=0.125,
    started_at=1700000000.0,
    completed_at=1700000001.5,
)
SCORED = events.TrajectoryScored(
    trajectory=TRAJECTORY,
    reward=1.0,
    reason="",
    components={"return": 1.0},
    scored_at=1700000002.0,
    score_s=0.001,
)

EVENT_EXAMPLES: list[BaseModel] = [
    events.RolloutRequested(
        run_id="lake-3f2a91",
        trajectory_id="lake-3f2a91/lake-17.3#0",
        group_id="lake-3f2a91/lake-17",
        member=3,
        attempt=0,
        task="lake",
        environment="frozenlake",
        config={"size": 4},
        seed=17,
        split="train",
        purpose="train",
        actor="policy",
        skill=0.0,
        policy="lake-3f2a91",
        sampling=SAMPLING,
        max_turns=16,
        context_window=512,
        max_staleness=1,
        deadline=1700000120.0,
        affinity="compute",
        prefill_affinity="compute",
        phases="auto",
        reward=REWARD,
    ),
    TURN,
    events.GenerateRequested(
        turn=TURN, worker_id="gen-1", device_class="bandwidth", fallback=True, assigned_at=1700000000.5
    ),
    events.PrefillRequested(
        turn=TURN,
        worker_id="gen-2",
        device_class="compute",
        decode=events.DecodeTarget(worker_id="gen-1", device_class="bandwidth", partition=3),
        fallback=True,
        assigned_at=1700000000.5,
    ),
    events.DecodeRequested(
        turn=TURN,
        worker_id="gen-1",
        device_class="bandwidth",
        prefilled=events.Prefilled(
            worker_id="gen-2",
            device_class="compute",
            token_ids=[5],
            logprobs=[-0.25],
            versions=[(4, 1)],
            version=4,
            cached_tokens=2,
            queued_s=0.001,
            prefill_s=0.02,
            kv_transfer_params={"do_remote_prefill": True, "remote_host": "gpu-1", "remote_port": 7000},
        ),
        fallback=True,
        assigned_at=1700000000.5,
    ),
    events.TurnProgressed(
        run_id="lake-3f2a91",
        trajectory_id="lake-3f2a91/lake-17.3#0",
        attempt=0,
        turn=1,
        try_number=1,
        asker="env-1",
        start=1,
        token_ids=[9],
        logprobs=[-1.5],
    ),
    events.TurnGenerated(
        run_id="lake-3f2a91",
        trajectory_id="lake-3f2a91/lake-17.3#0",
        attempt=0,
        turn=1,
        try_number=1,
        asker="env-1",
        worker_id="gen-1",
        device_class="bandwidth",
        token_ids=[5, 9],
        logprobs=[-0.25, -1.5],
        versions=[(4, 1), (5, 1)],
        finish_reason=events.FinishReason.STOP,
        handover=events.Handover(
            prefill_worker="gen-2",
            prefill_class="compute",
            prefill_cached_tokens=2,
            transferred_tokens=1,
            transferred_bytes=4096,
            transfer_s=0.002,
            recomputed="late",
        ),
        cached_tokens=2,
        timings=events.TurnTimings(queued_s=0.01, prefill_s=0.02, decode_s=0.03),
    ),
    events.TurnFailed(
        run_id="lake-3f2a91",
        trajectory_id="lake-3f2a91/lake-17.3#0",
        attempt=0,
        turn=1,
        try_number=1,
        asker="env-1",
        code="no_worker",
        message="no live worker serves 'compute'",
        retryable=True,
    ),
    TRAJECTORY,
    SCORED,
    events.PolicyPublished(
        policy="lake-3f2a91",
        version=5,
        step=5,
        uri="weights/lake-3f2a91/v000005",
        digest="ab12",
        published_at=1700000003.0,
    ),
]

RUN = {
    "run_id": "lake-3f2a91",
    "state": "running",
    "phase": "train",
    "name": "lake",
    "created_at": 1700000000.0,
    "started_at": 1700000001.0,
    "ended_at": None,
    "step": 12,
    "steps": 40,
    "version": 12,
    "error": "",
}
RESULT = api.TaskResult(
    trajectory_id="task-3f2a91bc/5.0#0",
    seed=5,
    member=0,
    status=events.TrajectoryStatus.FINISHED,
    reward=None,
    reason="timeout",
    turns=3,
)
BRIEF = api.TrajectoryBrief(
    trajectory_id="lake-3f2a91/lake-17.3#0",
    task="lake",
    seed=17,
    purpose="train",
    status=events.TrajectoryStatus.FINISHED,
    reward=1.0,
    turns=4,
    tokens=120,
    start_version=4,
    completed_at=1700000001.5,
)
WORKER = api.Worker(
    worker_id="gen-1",
    role="both",
    device_class="bandwidth",
    gpu_model="H20",
    url="http://gen-1:8000",
    partitions=[0, 1],
    running=12,
    waiting=3,
    kv_usage=0.5,
    policies={"lake-3f2a91": 12},
    draining=False,
    updated_at=1700000000.0,
)
AFFINITY = api.TaskAffinity(
    task="lake",
    wish=api.AffinityWish(phases="auto", device_class="auto", decode_class="auto", prefill_class="compute"),
    phases="split",
    device_class="bandwidth",
    prefill_class="compute",
    why="split compute → bandwidth costs 0.5 a turn",
    since=1700000000.0,
    switches=1,
    assigned=4096,
    explored=17,
    prompt_tokens=800.0,
    generated_tokens=40.0,
    cached_share=0.75,
    options=[
        api.AffinityOption(
            phases="split",
            device_class="bandwidth",
            prefill_class="compute",
            turns=120.5,
            prefill_s=0.0625,
            decode_s=0.25,
            transfer_s=0.0078125,
            price=1.0,
            prefill_price=2.85,
            cost=0.5,
            exploring=False,
        )
    ],
    fallbacks=[api.AffinityFallback(kind="prefill_class", turns=3, active=True)],
)
RECIPE: dict[str, object] = {"name": "lake", "tasks": {"lake": {"environment": "frozenlake"}}}

REST_EXAMPLES: list[BaseModel] = [
    api.RunRequest.model_validate({"recipe": RECIPE}),
    api.Run.model_validate(RUN),
    api.RunDetail.model_validate(RUN | {"recipe": RECIPE, "folder": "/runs/lake-3f2a91"}),
    api.RunList(runs=[api.Run.model_validate(RUN)]),
    api.TaskRequest(
        run_id="lake-3f2a91",
        task="lake",
        environment="frozenlake",
        config={"size": 4},
        reward="success",
        reward_config={},
        policy="lake-3f2a91@12",
        seeds=[5, 6],
        members=2,
        split="eval",
        actor="policy",
        skill=1.0,
        temperature=0.0,
        max_turns=16,
        max_tokens_per_turn=8,
        context_window=512,
        affinity="compute",
        deadline_s=60.0,
    ),
    RESULT,
    api.Task(
        task_id="task-3f2a91bc",
        state="running",
        task="lake",
        environment="frozenlake",
        policy="lake-3f2a91@12",
        created_at=1700000000.0,
        total=2,
        done=1,
        lost=0,
        reward_mean=None,
        failures={"timeout": 1},
        results=[RESULT],
        trajectory_ids=["task-3f2a91bc/5.0#0", "task-3f2a91bc/6.0#0"],
    ),
    BRIEF,
    api.TrajectoryList(trajectories=[BRIEF]),
    WORKER,
    api.WorkerList(workers=[WORKER]),
    AFFINITY.wish,
    AFFINITY.options[0],
    AFFINITY.fallbacks[0],
    AFFINITY,
    api.AffinityReport(tasks=[AFFINITY]),
    Recipe.model_validate(RECIPE),
    Status(
        service="gateway",
        process="host-1",
        ready=True,
        uptime_s=2.5,
        loops={"hints": "running"},
        detail={"busy_s": 0.5},
    ),
    errors.Problem(
        error=errors.ProblemDetail(
            code="invalid",
            message="seeds: too short",
            retryable=False,
            fields=[errors.FieldProblem(field="seeds", message="too short")],
        )
    ),
    summary.Summary(
        run_id="lake-3f2a91",
        state="finished",
        wall_s=210.5,
        steps=40,
        versions=40,
        tokens=summary.Tokens(sampled=1000, trained=900),
        tokens_per_s=3214.5,
        tasks={
            "lake": summary.TaskSummary(reward_before=0.25, reward_after=0.875, episodes=5120, turns_mean=6.5)
        },
        lag=summary.Lag(histogram={"0": 100, "1": 5020}, max=1),
        stages={"generation": summary.StageSummary(busy_s=180.5, share=0.875)},
        step_time=summary.StepTime(mean_s=2.5, wait_s=1.0, train_s=1.25, publish_s=0.125),
        weights=summary.WeightsTime(push_s=2.0, pull_s=3.0, exposed_s=0.5),
        groups=summary.Groups(issued=645, trained=640, dropped={"stale": 3}, in_flight=2),
        errors={"restart_reward": 1},
    ),
    records.StepRecord(
        step=12,
        version=12,
        time=1700000100.0,
        elapsed_s=100.0,
        reward={"lake": 0.5, "sea": None},
        episodes={"lake": 128},
        turns_mean={"lake": 6.5},
        lag={"0": 28, "1": 100},
        tokens_sampled=5000,
        tokens_trained=4900,
        tokens_per_s=3214.5,
        wait_s=1.0,
        train_s=1.25,
        publish_s=0.125,
        step_s=2.5,
        loss=0.125,
        entropy=1.5,
        grad_norm=0.75,
        mismatch_kl=0.001,
        ess=0.875,
        clip_fraction=0.0625,
        ratio_max=1.5,
        learning_rate=0.001,
        zero_variance_groups=2,
        dropped={"stale": 1},
        open_groups=32,
        stages={"generation": 0.875},
    ),
    records.PhaseRecord(
        phase="warm_start", start=1700000000.0, end=1700000030.0, detail={"episodes": 1024.0}
    ),
    records.WarmStartRecord(step=10, time=1700000010.0, loss=1.25),
    records.EvaluationRecord(
        version=0, step=0, time=1700000040.0, reward={"lake": 0.25}, episodes={"lake": 128}
    ),
    Tailed(
        topic="samples",
        partition=1,
        offset=9,
        time=1700000000.0,
        key="k",
        headers={"purpose": "task"},
        event={"reward": 1.0},
        fault="",
    ),
    Claim(key="payloads/ab/ab12", sha256="ab12", size=1000001),
]


def cases() -> Iterator[tuple[Path, BaseModel]]:
    """Golden file and example of every model."""
    for folder, examples in (("events", EVENT_EXAMPLES), ("rest", REST_EXAMPLES)):
        for example in examples:
            yield GOLDEN / folder / f"{type(example).__name__}.json", example


def golden(example: BaseModel) -> dict[str, object]:
    """What a golden file holds."""
    return {
        "schema": type(example).model_json_schema(),
        "example": json.loads(example.model_dump_json()),
    }


@pytest.mark.parametrize(("path", "example"), list(cases()), ids=lambda value: getattr(value, "stem", ""))
def test_the_json_is_the_pinned_one_and_reads_back_unchanged(path: Path, example: BaseModel) -> None:
    pinned = json.loads(path.read_bytes())
    assert golden(example) == pinned
    assert type(example).model_validate_json(json.dumps(pinned["example"])) == example


def test_every_event_and_rest_model_is_pinned() -> None:
    assert {type(example).__name__ for example in EVENT_EXAMPLES} == set(EVENTS)
    models = {
        name
        for name, value in vars(api).items()
        if isinstance(value, type)
        and issubclass(value, api.Body | api.Answer)
        and value not in (api.Body, api.Answer)
    }
    assert models <= {type(example).__name__ for example in REST_EXAMPLES}
    pinned = {path.name for path in GOLDEN.rglob("*.json")}
    assert pinned == {path.name for path, _ in cases()}


@pytest.mark.parametrize("example", EVENT_EXAMPLES, ids=lambda value: type(value).__name__)
def test_an_event_of_a_newer_version_is_understood(example: BaseModel) -> None:
    newer = json.loads(example.model_dump_json()) | {"field_of_tomorrow": {"x": 1}}
    assert type(example).model_validate(newer) == example


@pytest.mark.parametrize("example", EVENT_EXAMPLES, ids=lambda value: type(value).__name__)
def test_the_example_of_an_event_sets_every_field(example: BaseModel) -> None:
    assert type(example).model_fields.keys() == example.model_fields_set


if __name__ == "__main__":
    for target, model in cases():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(golden(model), indent=2, ensure_ascii=False) + "\n")
