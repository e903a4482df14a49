"""`[affinity]` is checked by name, and what it says reaches every turn."""

from __future__ import annotations

import json

import pytest
from test_recipe import problems

from services.gateway import tasks
from services.training.rollouts import Issuer
from shared import recipe
from shared.api import TaskRequest
from shared.bus import Bus
from shared.events import PolicyPublished, RolloutRequested, Sampling
from shared.placement import Placement
from shared.state import RunRecord, State

TASKS: dict[str, object] = {
    "lake": {"environment": "frozenlake"},
    "number": {"environment": "guess_number", "affinity": "bandwidth"},
    "other": {"environment": "guess_number"},
}
PHASES = {"prefill": "compute", "decode": "bandwidth"}
TABLE: dict[str, object] = {"lake": PHASES, "default": "edge", "phases": "together"}


def with_affinity(affinity: object) -> dict[str, object]:
    return {"tasks": TASKS, "affinity": affinity}


def test_each_task_gets_its_own_class_or_classes_or_the_default() -> None:
    found = recipe.validate(with_affinity(TABLE))
    assert found.placement("lake") == Placement("bandwidth", "compute", "split")
    assert found.placement("number") == Placement("bandwidth", None, "together")
    assert found.placement("other") == Placement("edge", None, "together")
    assert recipe.validate(json.loads(found.model_dump_json())) == found
    assert recipe.validate({"tasks": TASKS}).placement("lake") == Placement(None, None, None)


def test_the_short_form_leaves_everything_to_the_router() -> None:
    found = recipe.validate(with_affinity("auto"))
    assert found.placement("lake") == Placement("auto", None, "auto")
    assert found.placement("number") == Placement("bandwidth", None, "auto")
    assert found == recipe.validate(with_affinity({"default": "auto", "phases": "auto"}))


@pytest.mark.parametrize(
    ("affinity", "field", "said"),
    [
        ({"lak": "compute"}, "affinity.lak", "did you mean 'lake'?"),
        ({"defaul": "compute"}, "affinity.defaul", "did you mean 'default'?"),
        ({"zebra": "compute"}, "affinity.zebra", "known: lake, number, other"),
        ({"number": "compute"}, "affinity.number", "tasks.number.affinity is 'bandwidth'"),
        ({"number": PHASES}, "affinity.number", "keep one of the two"),
        ({"lake": "No Class"}, "affinity.lake", "pattern"),
        ({"lake": 3}, "affinity.lake", "needs a device class"),
        ({"lake": {"prefill": "compute"}}, "affinity.lake.decode", "required"),
        ({"lake": PHASES | {"dekode": "x"}}, "affinity.lake.dekode", "unknown key"),
        ({"phases": "apart"}, "affinity.phases", "'together', 'split' or 'auto'"),
        ({"default": PHASES}, "affinity.default", "string"),
        ("compute", "affinity", 'write [affinity] default = "compute"'),
        (["auto"], "affinity", "dictionary"),
    ],
)
def test_each_mistake_is_told_by_its_key_and_its_fix(affinity: object, field: str, said: str) -> None:
    found = problems(with_affinity(affinity))
    assert list(found) == [field]
    assert said in found[field]


def test_the_same_class_in_both_places_is_no_contradiction() -> None:
    assert recipe.validate(with_affinity({"number": "bandwidth"})).placement("number").affinity == "bandwidth"


@pytest.mark.parametrize("name", ["default", "phases"])
def test_a_task_cannot_have_the_name_of_a_key_of_the_table(name: str) -> None:
    found = problems({"tasks": {name: {"environment": "frozenlake"}}})
    assert "rename the task" in found[f"tasks.{name}"]


class RunsState(State):
    """Redis with one run and its policy in it."""

    def __init__(self, recipe_json: str) -> None:
        self._record = RunRecord(run_id="run", state="running", recipe=recipe_json, created_at=0.0)

    async def run(self, run_id: str) -> RunRecord:
        """The one run."""
        assert run_id == "run"
        return self._record

    async def policy(self, name: str) -> tuple[PolicyPublished, str] | None:
        """The newest version."""
        record = PolicyPublished(policy=name, version=1, step=0, uri="", digest="", published_at=0.0)
        return record, "model"


def asked(rollout: RolloutRequested) -> Placement:
    return Placement(rollout.affinity, rollout.prefill_affinity, rollout.phases)


def test_rollouts_of_a_run_carry_what_the_table_says() -> None:
    made = recipe.validate(with_affinity(TABLE))
    issuer = Issuer(Bus.__new__(Bus), made, run_id="run")
    for task in made.tasks:
        rollout = issuer.request(
            task, group="g", seed=1, purpose="train", policy="run", sampling=Sampling(max_tokens=1)
        )
        assert asked(rollout) == made.placement(task)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"task": "lake"}, Placement("bandwidth", "compute", "split")),
        ({"task": "lake", "affinity": "edge"}, Placement("edge", None, "together")),
        ({"task": "other"}, Placement("edge", None, "together")),
        ({"task": "lake", "environment": "frozenlake"}, Placement(None, None, None)),
    ],
)
async def test_tasks_over_rest_inherit_the_runs_table_and_may_name_a_class_of_their_own(
    body: dict[str, object], expected: Placement
) -> None:
    state = RunsState(recipe.validate(with_affinity(TABLE)).model_dump_json())
    request = TaskRequest.model_validate({"run_id": "run", "seeds": [1, 2], **body})
    resolved = await tasks.resolve(state, request)
    remembered = tasks.Resolved.model_validate_json(resolved.model_dump_json())
    assert [asked(rollout) for rollout in tasks.rollouts("t", remembered)] == [expected] * 2
