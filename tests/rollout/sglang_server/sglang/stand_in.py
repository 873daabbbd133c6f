"""A server that speaks SGLang's protocol, with strop's own engine behind it: routes and answers of sglang 0.5.23.

Bodies are held against the schemas read from its source; tensors are unpickled by its list of what may be in a pickle.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import io
import json
import os
import pickle
from collections.abc import AsyncGenerator
from typing import Any

import torch
from aiohttp import web
from transformers import AutoConfig, AutoModelForCausalLM

from sglang.srt.server_args import SCHEMAS
from strop.engines.causal_lm import CausalLM
from strop.engines.model_support.parity import check_packed
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling

BODIES = {
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}


class SafeUnpickler(pickle.Unpickler):
    """Takes what SGLang's takes."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in SCHEMAS["unpickled"]:
            raise RuntimeError(f"unpickling {module}.{name} is not allowed")
        return super().find_class(module, name)


class Model:
    """A model as SGLang's are: it takes weights by name."""

    def __init__(self, args: dict[str, Any]) -> None:
        config = AutoConfig.from_pretrained(args["model_path"])
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args["dtype"])).eval()
        check_packed(module, torch.device("cpu"))
        self.lm = CausalLM(module, compute_dtype=torch.float32)

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        live = self.lm.module.state_dict()
        for name, value in weights:
            live[name].copy_(value)


class Server:
    """State of one server."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args
        self.model = Model(args)
        self.engine = NativeEngine(self.model.lm, max_running=args["max_running_requests"])
        self.version = "default"
        self.is_open = False
        self.released: set[str] = set()
        self.running: set[str] = set()
        self.asked: list[str] = []

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.checked], client_max_size=1 << 26)
        for path, methods in SCHEMAS["routes"].items():
            for method in methods:
                app.router.add_route(method, path, getattr(self, path[1:]))
        return app

    @web.middleware
    async def checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if (
            request.path != "/ready"
            and request.headers.get("Authorization") != f"Bearer {self.args['api_key']}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.asked.append(request.path)
        if kind := BODIES.get(request.path):
            body = await request.json()
            if unknown := set(body) - set(SCHEMAS["requests"][kind]):
                return web.json_response({"error": f"unknown field {min(unknown)}"}, status=422)
        response: web.StreamResponse = await handler(request)
        return response

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        said = {"model_path": self.args["model_path"], "weight_version": self.version, "asked": self.asked}
        return web.json_response(said)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = body["sampling_params"]
        if unknown := (set(body) - set(SCHEMAS["generate"])) | (set(asked) - set(SCHEMAS["sampling_params"])):
            return web.json_response({"error": f"unknown field {min(unknown)}"}, status=400)
        if self.released:
            os._exit(3)  # the real one reads memory that is not there
        if not body.get("stream"):
            return web.json_response(await self.scored(body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with contextlib.aclosing(self.events(body, asked)) as events:
            async for event in events:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def events(
        self, body: dict[str, Any], asked: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        heard: asyncio.Queue[tuple[int, float, int] | None] = asyncio.Queue()
        how = Sampling(
            key=asked["sampling_seed"],
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            top_k=max(asked["top_k"], 0),
            max_tokens=asked["max_new_tokens"],
            stop_token_ids=tuple(asked["stop_token_ids"]),
        )
        # Added to the logits before temperature and log-probs, as the real one does; here for all requests alike.
        self.model.lm.unused_tokens = tuple(
            int(t) for t, b in (asked.get("logit_bias") or {}).items() if b <= -1e8
        )
        self.running.add(body["rid"])
        task = asyncio.create_task(
            self.engine.generate(body["rid"], body["input_ids"], how, on_token=lambda *t: heard.put_nowait(t))
        )
        task.add_done_callback(lambda _: heard.put_nowait(None))
        sent: list[tuple[int, float, int]] = []
        spans: list[str] = []
        try:
            while (token := await heard.get()) is not None:
                sent.append(token)
                spans.append(self.version)
                yield {"output_ids": [token[0]], "meta_info": self.meta(sent, spans, len(sent) - 1, None)}
            output = await task
        finally:  # also where the client has hung up
            task.cancel()
            self.running.discard(body["rid"])
        reason = {"type": "abort" if output.stop_reason == "aborted" else output.stop_reason}
        # As the real one where an aborted request still waits: the last token again, and all log-probs.
        start = 0 if output.stop_reason == "aborted" else len(sent)
        yield {"output_ids": [t[0] for t in sent[-1:]], "meta_info": self.meta(sent, spans, start, reason)}

    def meta(
        self, sent: list[tuple[int, float, int]], spans: list[str], start: int, reason: dict[str, str] | None
    ) -> dict[str, Any]:
        versions: list[dict[str, Any]] = []
        for place, version in enumerate(spans):
            if versions and versions[-1]["version"] == version:
                versions[-1]["end"] = place + 1
            else:
                versions.append({"version": version, "start": place, "end": place + 1})
        return {
            "finish_reason": reason,
            "completion_tokens": len(sent),
            "output_token_logprobs": [[log_prob, token, None] for token, log_prob, _ in sent[start:]],
            "output_token_logprobs_length": len(sent),
            "weight_version": self.version,
            "weight_versions": versions,
        }

    async def scored(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(body["input_ids"])
        self.model.lm.module.set_attn_implementation("eager")
        with torch.no_grad():
            rows = self.model.lm.module(ids[None]).logits[0].log_softmax(-1)
        self.model.lm.module.set_attn_implementation("strop_packed")
        found = [[None, int(ids[0]), None]]
        found += [[float(rows[i, t]), int(t), None] for i, t in enumerate(ids[1:])]
        return {
            "output_ids": [0],
            "meta_info": {"input_token_logprobs": found, "finish_reason": {"type": "length"}},
        }

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.engine.abort(None if body.get("abort_all") else [body["rid"]])
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        await self.engine.pause()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self.engine.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        self.is_open = True
        return web.json_response({"success": True, "message": "Success"})

    async def end_weight_update(self, request: web.Request) -> web.Response:
        self.is_open = False
        await self.engine.set_version(self.engine.version + 1)  # retracted requests are computed again
        return web.json_response({"success": True, "message": "Success"})

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.is_open:
            return web.json_response({"success": False, "message": "no session"}, status=400)
        try:
            module, _, name = body["load_format"].rpartition(".")
            assert body["load_format"] in self.args["custom_weight_loader"]
            data = base64.b64decode(body["serialized_named_tensors"][0], validate=True)
            getattr(importlib.import_module(module), name)(self.model, SafeUnpickler(io.BytesIO(data)).load())
        except (ValueError, RuntimeError, KeyError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": "Success"})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["abort_all_requests"]:
            await self.engine.abort()
        self.version = body["new_version"]
        return web.json_response({"success": True, "message": "Weight version updated"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        if self.running and not self.is_paused:
            return web.Response(status=400, text="Flush cache failed.")
        await self.engine.flush_cache()
        return web.Response(text="Cache flushed.")

    @property
    def is_paused(self) -> bool:
        return "/pause_generation" in self.asked and self.asked[::-1].index("/pause_generation") < (
            [*self.asked[::-1], "/continue_generation"].index("/continue_generation")
        )

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        self.released |= set((await request.json())["tags"])
        return web.Response(text="null")

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        self.released -= set((await request.json())["tags"])
        return web.Response(text="null")


def serve(args: dict[str, Any]) -> None:
    """Serve until the process is killed."""
    torch.set_num_threads(1)
    web.run_app(Server(args).app(), host=args["host"], port=args["port"], print=None)
