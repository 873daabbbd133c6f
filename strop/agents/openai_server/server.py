"""The HTTP server: routes, authentication, limits, and sessions of calls.

A session is named by the address (`/s/NAME/v1/...`), by a suffix of the key (`TOKEN:NAME`), or by the header
X-Strop-Session, so that any client of OpenAI's API has one.

Concurrency: one asyncio loop, that of the engine or of the episodes. A client that goes away cancels its handler, and
with it its calls.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

from strop.agents.openai_server.chat import CompletionFormat
from strop.agents.openai_server.completion import answer
from strop.agents.openai_server.errors import ApiError, invalid
from strop.agents.openai_server.request import CallRequest, read_chat, read_completion
from strop.agents.openai_server.responses import ResponseFormat, read_conversation
from strop.agents.openai_server.scoring import read_scoring, scoring_body
from strop.agents.openai_server.session import Session
from strop.agents.openai_server.token_source import Sampler
from strop.utils.sanitize import read_json, usable

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
MAX_CALLS = 4096
"""Calls that are served at the same time; the client of one more is told to come again (429)."""
_SESSION_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
DEFAULT_SESSION = "default"
_CLOSE_S = 5.0

Format = CompletionFormat | ResponseFormat


class Sessions(Protocol):
    """The open sessions."""

    def find(self, name: str) -> tuple[Session, Sampler]:
        """The session of a name and its sampler; raises an ApiError where there is none."""
        ...

    def remove(self, name: str) -> None:
        """Forget a session."""
        ...


class Gateway:
    """Answers calls of sessions."""

    def __init__(self, sessions: Sessions) -> None:
        """Answer calls of the open sessions."""
        self.token = secrets.token_urlsafe(24)
        """Token that clients give as their key."""
        self._sessions = sessions
        self._num_calls = 0

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve while this lasts; gives the address without a path, such as http://127.0.0.1:8000.

        Raises:
            OSError: the port cannot be bound.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        for prefix in ("", "/s/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/completions", self._completion)
            app.router.add_post(f"{prefix}/v1/responses", self._response)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{name:.+}}", self._model)
            app.router.add_post(f"{prefix}/reward", self._reward)
            app.router.add_get(f"{prefix}/trajectories", self._trajectories)
        app.router.add_delete("/s/{session}", self._delete)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S, handle_signals=False
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            address = runner.addresses[0]
            host_in_url = f"[{address[0]}]" if ":" in address[0] else address[0]
            yield f"http://{host_in_url}:{address[1]}"
        finally:
            await runner.cleanup()

    # ------------------------------------------------------------------ every request

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The token, the number of calls, and errors in OpenAI's form."""
        try:
            self._check_token(request)
            if self._num_calls >= MAX_CALLS:
                raise ApiError(429, f"{MAX_CALLS} calls are being served; send it again later")
            self._num_calls += 1
            try:
                return await handler(request)
            finally:
                self._num_calls -= 1
        except ApiError as error:
            return _error_response(error)
        except web.HTTPRequestEntityTooLarge:
            return _error_response(
                ApiError(413, f"the request has more than {MAX_BODY_BYTES} bytes; send less")
            )
        except web.HTTPException as refused:
            return _error_response(
                ApiError(refused.status, f"{request.method} {request.path}: {refused.reason}")
            )
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            return _error_response(ApiError(500, "the server failed; its log says where"))

    def _check_token(self, request: web.Request) -> None:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        token, _, _ = key.strip().partition(":")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.token.encode()):
            raise ApiError(
                401,
                "the key is not the one that this server printed; give it as api_key",
                code="invalid_api_key",
            )

    def _session_name(self, request: web.Request) -> str:
        """Name of a request's session: from its address, key or header."""
        key = request.headers["Authorization"].partition(" ")[2].strip()
        candidates = [
            request.match_info.get("session"),
            key.partition(":")[2],
            request.headers.get("X-Strop-Session"),
        ]
        names = {name for name in candidates if name}
        if len(names) > 1:
            raise invalid(
                "session", f"is {' and '.join(sorted(names))} in the address, the key or the header; use one"
            )
        name = names.pop() if names else DEFAULT_SESSION
        if not _SESSION_NAME.fullmatch(name):
            raise invalid(
                "session", f"is {name[:140]!r}; use up to 128 letters, digits, dots, dashes and underscores"
            )
        return name

    async def _body(self, request: web.Request) -> Any:
        try:
            return read_json(await request.read())
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}", param="body") from None

    # ------------------------------------------------------------------ calls

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, sampler = self._sessions.find(self._session_name(request))
        call = read_chat(await self._body(request))
        return await self._respond(request, call, session, sampler, CompletionFormat(call, session.model))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        session, sampler = self._sessions.find(self._session_name(request))
        body = await self._body(request)
        scoring = read_scoring(body)
        if scoring is not None:
            prompts = [
                session.new_text_ids(prompt) if isinstance(prompt, str) else prompt
                for prompt in scoring.prompts
            ]
            return web.json_response(scoring_body(scoring, prompts, sampler.score(prompts), session.model))
        call = read_completion(body)
        return await self._respond(request, call, session, sampler, CompletionFormat(call, session.model))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        session, sampler = self._sessions.find(self._session_name(request))
        body = await self._body(request)
        call, conversation = read_conversation(body, session)
        answer_format = ResponseFormat(body, call, conversation, session)
        return await self._respond(request, call, session, sampler, answer_format)

    async def _respond(
        self,
        request: web.Request,
        call: CallRequest,
        session: Session,
        sampler: Sampler,
        answer_format: Format,
    ) -> web.StreamResponse:
        if not call.stream:
            return web.json_response(answer_format.whole(await answer(call, session, sampler)))
        return await self._stream_events(request, call, session, sampler, answer_format)

    async def _stream_events(
        self,
        request: web.Request,
        call: CallRequest,
        session: Session,
        sampler: Sampler,
        answer_format: Format,
    ) -> web.StreamResponse:
        """Answer a call with server-sent events. An error before the first one is an ordinary answer."""
        pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        work = asyncio.create_task(
            answer(call, session, sampler, lambda index, text: pieces.put_nowait((index, text)))
        )
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        stream = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            piece = await pieces.get()
            if piece is None:
                await work  # raises what can still be told with a status
            await stream.prepare(request)
            for event in answer_format.begin():
                await _send(stream, event)
            while piece is not None:
                for event in answer_format.piece(*piece):
                    await _send(stream, event)
                piece = await pieces.get()
            try:
                for event in answer_format.end(await work):
                    await _send(stream, event)
                if isinstance(answer_format, CompletionFormat):
                    await stream.write(b"data: [DONE]\n\n")
            except ApiError as error:  # the status is sent
                await _send(stream, error.body() | {"type": "error", "message": error.message})
            await stream.write_eof()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return stream

    async def _models(self, request: web.Request) -> web.Response:
        session, _ = self._sessions.find(self._session_name(request))
        return web.json_response({"object": "list", "data": [_model_card(session)]})

    async def _model(self, request: web.Request) -> web.Response:
        session, _ = self._sessions.find(self._session_name(request))
        name = request.match_info["name"]
        if name != session.model.name:
            raise ApiError(
                404, f"there is no model {name!r}; there is {session.model.name!r}", code="model_not_found"
            )
        return web.json_response(_model_card(session))

    # ------------------------------------------------------------------ sessions

    async def _reward(self, request: web.Request) -> web.Response:
        session, _ = self._sessions.find(self._session_name(request))
        set_reward(session, await self._body(request))
        return web.json_response({"reward": session.reward})

    async def _trajectories(self, request: web.Request) -> web.Response:
        name = self._session_name(request)
        session, _ = self._sessions.find(name)
        trajectories = [
            {
                "prompt_ids": list(sequence.prompt_ids),
                "response_ids": list(sequence.response_ids),
                "sampled": list(sequence.sampled),
                "log_probs": list(sequence.log_probs),
                "versions": list(sequence.versions),
                "stop_reason": sequence.stop_reason,
            }
            for sequence in session.sequences()
        ]
        body = {
            "session": name,
            "trajectories": trajectories,
            "reward": session.reward,
            "calls": session.num_calls,
        }
        return web.json_response(body | {"forgotten": session.num_forgotten})

    async def _delete(self, request: web.Request) -> web.Response:
        name = self._session_name(request)
        self._sessions.find(name)
        self._sessions.remove(name)
        return web.json_response({"session": name, "deleted": True})


def set_reward(session: Session, value: object) -> None:
    """Give a session its reward: a number, or {"reward": number, "parts": {...}}.

    Raises:
        ApiError: it is no reward.
    """
    parts = value.get("parts", {}) if isinstance(value, Mapping) else {}
    number = value.get("reward") if isinstance(value, Mapping) else value
    reward = None if number is None or isinstance(number, str) else usable(number)
    if reward is None or not isinstance(parts, Mapping):
        raise invalid(
            "reward", f'is {str(value)[:80]!r}; give a number, or {{"reward": number, "parts": {{...}}}}'
        )
    session.reward, session.reward_parts = reward, {str(name): number for name, number in parts.items()}


def _model_card(session: Session) -> dict[str, Any]:
    return {"id": session.model.name, "object": "model", "created": 0, "owned_by": "strop"}


def _error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)


async def _send(stream: web.StreamResponse, event: Mapping[str, Any]) -> None:
    name = f"event: {event['type']}\n" if "type" in event else ""
    await stream.write(f"{name}data: {json.dumps(event)}\n\n".encode())
