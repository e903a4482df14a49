"""What a router has chosen, for people: `GET /v1/affinity`."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends

from services.router.affinity import MIN_TURNS, Affinity, Choice, Figures
from services.router.plans import Planner, Wish
from services.router.serving import Serving, serving
from shared.api import AffinityFallback, AffinityOption, AffinityReport, AffinityWish, TaskAffinity

router = APIRouter(tags=["affinity"])


@router.get("/v1/affinity", summary="Which hardware takes the turns of each task, and why")
async def affinity(at: Annotated[Serving, Depends(serving)]) -> AffinityReport:
    """Declared and measured choices, what they cost, and what had to fall back."""
    dispatch = at.dispatch
    return report(dispatch.affinity, dispatch.planner, time.time())


def report(affinity: Affinity, planner: Planner, now: float) -> AffinityReport:
    """The answer."""
    choices = sorted(affinity.choices.items(), key=lambda item: item[0])
    return AffinityReport(
        tasks=[_task(affinity, planner, task, wish, choice, now) for (task, wish), choice in choices]
    )


def _task(
    affinity: Affinity, planner: Planner, task: str, wish: Wish, choice: Choice, now: float
) -> TaskAffinity:
    typical = affinity.measured.typical(task, now)
    acting = choice.acting
    return TaskAffinity(
        task=task,
        wish=AffinityWish(
            phases=wish.phases,
            device_class=wish.together,
            decode_class=wish.decode,
            prefill_class=wish.prefill,
        ),
        phases=acting.phases,
        device_class=acting.device_class,
        prefill_class=acting.prefill_class,
        why=choice.why,
        since=choice.since,
        switches=choice.switches,
        assigned=choice.assigned,
        explored=choice.explored,
        prompt_tokens=typical.prompt_tokens if typical else None,
        generated_tokens=typical.generated_tokens if typical else None,
        cached_share=typical.cached_share if typical else None,
        options=[_option(affinity, choice, figures) for figures in choice.figures],
        fallbacks=_fallbacks(planner, wish, choice),
    )


def _option(affinity: Affinity, choice: Choice, figures: Figures) -> AffinityOption:
    option = figures.option
    known = figures.turns > 0
    return AffinityOption(
        phases=option.phases,
        device_class=option.device_class,
        prefill_class=option.prefill_class,
        turns=round(figures.turns, 1),
        prefill_s=figures.prefill_s if known else None,
        decode_s=figures.decode_s if known else None,
        transfer_s=figures.transfer_s if known else None,
        price=affinity.price(option.device_class),
        prefill_price=affinity.price(option.prefill_class or option.device_class),
        cost=figures.cost if known else None,
        exploring=option in choice.unsure and figures.turns < MIN_TURNS,
    )


def _fallbacks(planner: Planner, wish: Wish, choice: Choice) -> list[AffinityFallback]:
    plan = planner.plan(wish, choice.acting)
    active = plan.fallbacks if plan else ()
    kinds: tuple[Literal["phases", "class", "prefill_class"], ...] = ("phases", "class", "prefill_class")
    return [
        AffinityFallback(kind=kind, turns=choice.fallbacks.get(kind, 0), active=kind in active)
        for kind in kinds
        if kind in active or choice.fallbacks.get(kind)
    ]
