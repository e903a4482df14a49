"""What every service answers: health without a key, all else with one, errors in one shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict
from structlog.testing import capture_logs

from shared import errors, service
from shared.errors import CapacityReached, FieldProblem, Invalid, NotFound, Problem, RollArtError
from shared.service import Context, read_json_body
from shared.settings import Settings

KEYS = "key-one, key-two"


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    number: float


def make_app(keys: str = KEYS) -> FastAPI:
    router = APIRouter()

    @router.get("/fail/{kind}")
    async def fail(kind: str) -> None:
        raise {
            "full": CapacityReached("too much"),
            "surrogate": Invalid("bad \ud800", fields=[FieldProblem(field="x\udfff", message="\ud800")]),
            "gone": NotFound("no such thing"),
            "bug": ZeroDivisionError("secret detail"),
        }[kind]

    @router.post("/body")
    async def body(body: Body) -> float:
        return body.number

    @router.post("/raw")
    async def raw(request: Request) -> int:
        return len(await read_json_body(request))

    @asynccontextmanager
    async def lifespan(context: Context) -> AsyncIterator[object]:
        yield None

    settings = Settings(ROLLART_API_KEYS=keys)
    return service.build("tiny", settings, lifespan=lifespan, routers=[router])


def client(app: FastAPI, key: str | None = "key-one") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://tiny", headers=headers)


def problem(response: httpx.Response) -> errors.ProblemDetail:
    json.loads(response.content)
    return Problem.model_validate_json(response.content).error


async def test_health_answers_without_a_key_and_is_not_ready_before_the_start() -> None:
    async with client(make_app(), key=None) as http:
        assert (await http.get("/healthz")).json() == {"status": "alive"}
        response = await http.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {"ready": False, "redis": False, "loops": {}}


@pytest.mark.parametrize("path", ["/metrics", "/v1/status", "/fail/gone", "/body"])
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic key-one", "key-one"])
async def test_everything_else_needs_a_key(path: str, header: str | None) -> None:
    async with client(make_app(), key=None) as http:
        headers = {} if header is None else {"Authorization": header}
        response = await http.request("POST" if path == "/body" else "GET", path, headers=headers)
    assert response.status_code == 401
    assert problem(response).code == "unauthorized"
    assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_without_keys_nothing_but_health_answers() -> None:
    async with client(make_app(keys=" , "), key="") as http:
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/healthz")).status_code == 200


async def test_each_of_the_keys_opens() -> None:
    for key in ("key-one", "key-two"):
        async with client(make_app(), key=key) as http:
            response = await http.get("/metrics")
            assert response.status_code == 200
            assert "rollart_events_published" in response.text


async def test_a_key_outside_ascii_is_wrong_not_a_crash() -> None:
    async with client(make_app(), key=None) as http:
        response = await http.get(
            "/metrics", headers={b"Authorization": "Bearer schlüssel".encode("latin-1")}
        )
    assert response.status_code == 401


async def test_errors_keep_their_code_and_status_through_http() -> None:
    async with client(make_app()) as http:
        gone, full = await http.get("/fail/gone"), await http.get("/fail/full")
    assert (gone.status_code, problem(gone).code) == (404, "not_found")
    assert (full.status_code, problem(full).retryable, full.headers["Retry-After"]) == (429, True, "1")
    assert isinstance(errors.from_problem(Problem(error=problem(full))), CapacityReached)


async def test_an_unexpected_error_is_a_500_that_tells_nothing() -> None:
    with capture_logs() as logs:
        async with client(make_app()) as http:
            response = await http.get("/fail/bug")
    assert isinstance(logs[0]["exc_info"], ZeroDivisionError)
    assert (response.status_code, problem(response).code) == (500, RollArtError.code)
    assert "secret" not in response.text


async def test_an_error_with_unencodable_text_is_valid_json() -> None:
    async with client(make_app()) as http:
        response = await http.get("/fail/surrogate")
    assert response.status_code == 422
    assert problem(response).fields[0].field == "x\\udfff"


@pytest.mark.parametrize(
    "content",
    [b'{"number": NaN}', b'{"number": 1e999}', b'{"number": "x"}', b'{"nummer": 1}', b"{", b""],
)
async def test_a_body_that_is_not_accepted_is_a_422_that_names_the_field(content: bytes) -> None:
    async with client(make_app()) as http:
        response = await http.post("/body", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    detail = problem(response)
    assert detail.code == "invalid"
    assert detail.fields
    assert all(field.field.startswith("body") for field in detail.fields)


async def test_a_body_that_is_no_text_is_refused_in_the_same_shape() -> None:
    async with client(make_app()) as http:
        response = await http.post("/body", content=b"\xff", headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert problem(response).code


async def test_an_unknown_route_and_a_wrong_method_have_the_same_shape() -> None:
    async with client(make_app()) as http:
        missing, wrong = await http.get("/nothing"), await http.delete("/body")
    assert (missing.status_code, problem(missing).code) == (404, "not_found")
    assert wrong.status_code == 405
    assert problem(wrong).code == "http_405"


async def test_a_body_over_the_limit_is_refused() -> None:
    async with client(make_app()) as http:
        assert (await http.post("/raw", content=b"x" * 4_000_000)).json() == 4_000_000
        response = await http.post("/raw", content=b"x" * 4_000_001)
    assert response.status_code == 422
    assert "4000000" in problem(response).message
