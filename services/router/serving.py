"""What the endpoints of a router reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fastapi import Request

from services.router.dispatch import Dispatch
from services.router.sessions.talk import Sessions


@dataclass(frozen=True)
class Serving:
    """Made by `services.router.app`."""

    dispatch: Dispatch
    sessions: Sessions


async def serving(request: Request) -> Serving:
    """Dependency of every endpoint."""
    return cast(Serving, request.state.service)
