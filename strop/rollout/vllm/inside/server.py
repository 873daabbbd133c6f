"""The process that owns vLLM's engine: it obeys the process that started it, over a pair of sockets without an address.

    python server.py FD        with the settings as the first message

Messages are JSON, one a line. A request has a number `n` and a `do`; its answer has the same number and `result` or
`error`. A generation says `tokens` on its way, and is answered at its end.

Concurrency: one asyncio loop. Each request is a task of its own; an update of weights holds every request where it is
meanwhile. The process ends with the socket or with its parent, and takes vLLM's own processes with it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from strop_parent import end_with_parent, follow_forks, kill_group

MAX_LINE_BYTES = 1 << 30
NUMBERS = {
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens": "prefilled_tokens",
    "vllm:prompt_tokens_cached": "cached_tokens",
    "vllm:generation_tokens": "decoded_tokens",
    "vllm:num_preemptions": "preempted",
    "vllm:kv_cache_usage_perc": "cache_share",
}
"""Counters of vLLM, and their names in `health` of strop's engines."""


class Server:
    """One engine and one owner."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._engine: Any = None
        self._version = 0
        """Of the weights; each token is told with it."""
        self._is_held = False
        """The owner has asked for a pause."""
        self._asleep: set[str] = set()
        """Parts of the memory that were given back."""
        self._is_updating = self._reads_media = False
        self._routed_layers: list[int] = []
        """Layers with experts, where their choices are recorded."""
        self._does: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "start": self.start,
            "ping": self.ping,
            "generate": self.generate,
            "score": self.score,
            "abort": self.abort,
            "pause": self.pause,
            "resume": self.resume,
            "flush": self.flush,
            "sleep": self.sleep,
            "wake": self.wake,
            "begin_update": self.begin_update,
            "load": self.load,
            "try_memory": self.try_memory,
            "set_version": self.set_version,
        }

    def tell(self, **message: Any) -> None:
        """Send a message."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def obey(self, message: dict[str, Any]) -> None:
        """Do what a message asks, and answer it."""
        try:
            result = await self._does[message["do"]](message)
        except Exception as error:  # noqa: BLE001  (the owner hears of it)
            if getattr(self._engine, "errored", False):
                kill_group()  # the log says why; nothing can be asked of it any more
            is_refusal = isinstance(error, ValueError)
            self.tell(
                n=message["n"],
                error=f"{error}" if is_refusal else f"{type(error).__name__}: {error}",
                bad=is_refusal,
            )
        else:
            self.tell(n=message["n"], result=result)

    async def start(self, message: Any) -> dict[str, Any]:
        """Make the engine; what it is."""
        self._version = message["version"]
        import strop_worker  # it registers the transfer of weights; its workers import it too
        import torch
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = strop_worker.with_extension(message["engine_args"])
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        model = self._engine.model_config
        self._reads_media = model.supports_multimodal_inputs
        await self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        if settings["pipeline_parallel_size"] > 1:
            await self._engine.collective_rpc("prepare_stage")
        if message["never"]:
            await self._engine.collective_rpc("never_sample", args=(message["never"],))
        if settings.get("enable_return_routed_experts"):
            self._routed_layers = (await self._engine.collective_rpc("routed_layers"))[0]
        await self._engine.get_supported_tasks()  # known from here on, so that a request is entered at once
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": vllm.platforms.current_platform.device_type,
            "vocab_size": model.get_vocab_size(),
            "max_model_len": model.max_model_len,
        }

    async def ping(self, message: object) -> dict[str, float]:
        """vLLM's own counts, by the names in NUMBERS."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        numbers = dict.fromkeys(NUMBERS.values(), 0.0)
        for metric in get_metrics_snapshot():
            if metric.name in NUMBERS:  # one of each engine core
                numbers[NUMBERS[metric.name]] += float(metric.value)
        numbers["prefilled_tokens"] -= numbers["cached_tokens"]
        numbers["block_tokens"] = float(self._engine.vllm_config.cache_config.block_size)
        return numbers

    async def generate(self, message: Any) -> dict[str, Any]:
        """Continue a prompt; how it ended, and the experts of its tokens where they are recorded."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        options = SamplingParams(
            **message["sampling"], logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        reason = experts = None
        # In this form a request is entered before anything else happens, so that an abort that follows finds it.
        prompt = tokens_input(message["prompt"])
        if message["media"]:
            from strop_pictures import with_pictures
            from strop_worker import digest_tensor

            prompt = with_pictures(message["prompt"], message["media"], digest_tensor)
        async for output in self._engine.generate(prompt, options, message["id"]):
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            if ids:
                chosen = [at[token].logprob for token, at in zip(ids, completion.logprobs, strict=True)]
                self.tell(n=message["n"], tokens=ids, log_probs=chosen, version=self._version)
                await self._writer.drain()
            reason, experts = completion.finish_reason, completion.routed_experts
        if experts is None:
            return {"reason": reason}
        from strop_routing import encoded

        return {"reason": reason, "experts": encoded(experts, self._routed_layers)}

    async def score(self, message: Any) -> list[float]:
        """Log-probs of all tokens but the first."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        options = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        ids = message["ids"]
        outputs = [
            output async for output in self._engine.generate(tokens_input(ids), options, message["id"])
        ]
        of_prompt = outputs[-1].prompt_logprobs[1:]
        return [at[token].logprob for token, at in zip(ids[1:], of_prompt, strict=True)]

    async def abort(self, message: Any) -> None:
        """End requests with the tokens they have."""
        await self._engine.abort(message["ids"])

    async def pause(self, message: object) -> None:
        """Hold every request where it is."""
        self._is_held = True
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self, message: object) -> None:
        """Go on."""
        self._is_held = False
        await self._engine.resume_generation()

    async def flush(self, message: object) -> None:
        """Forget computed prompts; running requests compute theirs again."""
        is_held = self._is_held or self._is_updating
        if self._reads_media and not is_held:  # a request may not go on between the two
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        await self._forget()
        if self._reads_media and not is_held and not (self._is_held or self._is_updating):
            await self._engine.resume_generation()

    async def _forget(self) -> None:
        await self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._reads_media:  # what a tower made of media is kept apart
            await self._engine.reset_encoder_cache()

    async def sleep(self, message: Any) -> None:
        """Give memory back: that of the cache, with the weights in host memory (1), or weights dropped (2)."""
        await self._engine.sleep(level=message["level"], mode="keep")
        self._asleep = {"weights", "kv_cache"}

    async def wake(self, message: Any) -> None:
        """Take memory again, the parts in `tags`. Requests that came meanwhile run once all of it is there."""
        await self._engine.wake_up(tags=message["tags"])
        self._asleep -= set(message["tags"])
        if not (self._asleep or self._is_held or self._is_updating):
            await self._engine.resume_generation()

    async def begin_update(self, message: object) -> None:
        """Hold the requests, and get ready for weights."""
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        if self._is_updating:  # the update before has failed on its way; vLLM begins one only after another
            await self._engine.collective_rpc("finish_weight_update")
        await self._engine.collective_rpc("start_weight_update")
        self._is_updating = True

    async def load(self, message: Any) -> None:
        """One bucket."""
        try:
            await self._engine.collective_rpc("update_weights", kwargs={"update_info": message["bucket"]})
        except BaseException:
            self._is_updating = False  # vLLM has ended it
            raise

    async def try_memory(self, message: Any) -> str:
        """Reason for which a worker cannot open memory of a device; "" where all can."""
        reasons: list[str] = await self._engine.collective_rpc("try_memory", args=(message["memory"],))
        return next(filter(None, reasons), "")

    async def set_version(self, message: Any) -> None:
        """The weights are whole: forget what was computed with those before, and go on."""
        if self._is_updating:
            await self._engine.collective_rpc("finish_weight_update")
            self._is_updating = False
        else:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        self._version = message["version"]
        await self._forget()
        if not (self._is_held or self._asleep):
            await self._engine.resume_generation()


async def main(descriptor: int) -> None:
    """Serve until the owner is gone."""
    sock = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES)
    server = Server(writer)
    tasks: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(server.obey(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__mp_main__":  # in a process that vLLM has started
    end_with_parent()
    # The engine's core checks its configuration here once more, and refuses to record experts unless this was imported.
    if "STROP_ROUTING" in os.environ:
        importlib.import_module("strop_routing")
if __name__ == "__main__":
    end_with_parent(kill_group)  # also while vLLM is being imported or holds the loop
    follow_forks()
    try:
        asyncio.run(main(int(sys.argv[1])))
    finally:
        kill_group()
