"""The routes. Each says what it takes and gives; what it does is in the modules that it names."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from slipstream import __version__
from slipstream.config import ServerConfig
from slipstream.engine.engine import Engine
from slipstream.errors import SlipstreamError
from slipstream.server import dashboard
from slipstream.server.answer import JSON, Answer
from slipstream.server.ask import Ask, chat_ask, check_model, completion_ask
from slipstream.server.bridge import Bridge
from slipstream.server.failures import (
    HttpFailure,
    error_body,
    headers_of,
    status_of,
)
from slipstream.server.form import ChatForm, CompletionForm, Form
from slipstream.server.gate import Gate
from slipstream.server.metrics import Metrics
from slipstream.server.replies import (
    ChatReply,
    CompletionReply,
    ErrorReply,
    Health,
    ModelList,
    ModelReply,
    Version,
)
from slipstream.server.schema import ChatRequest, CompletionRequest
from slipstream.server.speculation import explain
from slipstream.server.spelling import Speller
from slipstream.server.validation import validation_failure

_REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request was refused."},
    "5XX": {"model": ErrorReply, "description": "The request could not be served."},
}
_EVENT = {
    "type": "object",
    "description": "A server-sent event; its data is a JSON object, that of the last one [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": _EVENT}}}
}


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes work with.

    Attributes:
        model: the served model's name.
    """

    engine: Engine
    bridge: Bridge
    metrics: Metrics
    config: ServerConfig
    model: str


def make_app(service: Service) -> FastAPI:
    """Return the application around an engine."""
    app = FastAPI(
        title="Slipstream",
        version=__version__,
        summary="OpenAI's API, served with speculative decoding that never changes the text.",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # clients do not send a body again, and see an empty answer
        responses=_REFUSED,
    )
    app.add_middleware(Gate, config=service.config, metrics=service.metrics)
    app.exception_handler(SlipstreamError)(_failed)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_failed)
    app.exception_handler(Exception)(_broken)
    _add_completions(app, service)
    _add_facts(app, service)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    """Add what makes the engine work."""
    config, speller = service.config, Speller(service.engine.tokenizer)  # type: ignore[arg-type]

    def answer(ask: Ask, kind: type[Form]) -> Response:
        form = kind(ask, speller, service.model)
        return Answer(service.bridge, ask, form, timeout_s=config.request_timeout)

    @app.post("/v1/chat/completions", response_model=ChatReply, responses=_EVENTS)
    async def chat_completions(body: ChatRequest) -> Response:
        """Continue a conversation."""
        check_model(body.model, service.model)
        return answer(chat_ask(body, config, service.engine.template_roles), ChatForm)

    @app.post("/v1/completions", response_model=CompletionReply, responses=_EVENTS)
    async def completions(body: CompletionRequest) -> Response:
        """Continue a text."""
        check_model(body.model, service.model)
        return answer(completion_ask(body, config), CompletionForm)


def _add_facts(app: FastAPI, service: Service) -> None:
    """Add what tells about the server."""
    engine, bridge, started_s = service.engine, service.bridge, int(time.time())

    def model() -> ModelReply:
        return ModelReply(
            id=service.model,
            object="model",
            created=started_s,
            owned_by="slipstream",
            max_model_len=engine.target.max_model_len,
        )

    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the served models: one."""
        return ModelList(object="list", data=[model()])

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> ModelReply:
        """Describe a served model."""
        check_model(name, service.model)
        return model()

    @app.get("/v1/speculation")
    def speculation() -> dict[str, Any]:  # in a thread: it waits for the end of a step
        """Say how rounds are sized at present, and why."""
        return explain(bridge.threaded)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return counters in Prometheus' format."""
        text, media_type = service.metrics.render()
        return Response(text, media_type=media_type)

    @app.get("/health", response_model=Health)
    async def health() -> Response:
        """Say whether requests are served, with what drafter."""
        state = "failed" if bridge.threaded.is_closed else "ok"
        state = "stopping" if bridge.is_draining else state
        name, failure = engine.pairing.drafter_state()
        value = Health(
            status=state,  # type: ignore[arg-type]
            model=service.model,
            drafter=name,
            drafter_failure=failure,
            running_or_waiting=bridge.num_open,
            kv_pages_used=engine.pages.num_taken,
            kv_pages=engine.pages.num_pages,
        )
        return JSONResponse(value.model_dump(), status_code=200 if state == "ok" else 503)

    @app.get("/version")
    async def version() -> Version:
        """Name the program's version."""
        return Version(version=__version__)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """Show what the server does, live."""
        return HTMLResponse(dashboard.page(), headers=dashboard.headers())


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, SlipstreamError)
    return _error_response(error)


async def _broken(_: Request, __: Exception) -> Response:
    """Answer a fault of our own; the log has what it was."""
    return _error_response(SlipstreamError("the server failed", hint="its log says why"))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _error_response(validation_failure(list(error.errors()), error.body))


def _error_response(error: SlipstreamError) -> Response:
    return Response(error_body(error), status_of(error), headers_of(error), JSON)


async def _http_failed(request: Request, error: Exception) -> Response:
    """Answer what the framework refuses: no such path, a wrong method, a body it cannot read."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, HttpFailure):  # a limit of the body, met while reading it
        return _error_response(error.__cause__)
    codes = {404: "unknown_path", 405: "wrong_method"}
    path = request.url.path
    known = {getattr(route, "path", "") for route in request.app.routes}
    bare = path.rstrip("/")
    meant = next((each for each in (bare, f"/v1{bare}") if each != path and each in known), None)
    asked = f"{request.method} {path if len(path) <= 60 else f'{path[:57]}...'}"
    failure = HttpFailure(
        error.status_code,
        {404: f"no such path: {asked}", 405: f"no such method here: {asked}"}.get(
            error.status_code, error.detail
        ),
        hint=f"did you mean {meant}?" if meant else None,
        code=codes.get(error.status_code, "invalid_body"),
        headers=error.headers,
    )
    return _error_response(failure)
