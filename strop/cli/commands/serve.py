"""`strop serve`: a model behind OpenAI's API, every call recorded."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.model_argument import add_step_argument, with_model
from strop.cli.settings import add_config_arguments, add_trust_argument, load_settings
from strop.cli.unused_keys import ENGINES, Reads, reads_with_engine, refuse_unread
from strop.evaluation.models import HELP, find_model
from strop.utils.quiet_libraries import quiet_models
from strop.utils.terminal import UsageError, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.agents.openai_server.chat_model import ChatModel
    from strop.agents.openai_server.session import Session
    from strop.agents.openai_server.token_source import Sampler
    from strop.rollout.engine_group import Generation
    from strop.trainer.config import Config

SUMMARY = "serve a model behind OpenAI's API on this machine and record every call token by token"
EPILOG = """\
examples:
  strop serve runs/arithmetic
  strop serve models/smollm2 --port 8000 data.max_response_tokens=512
  strop serve models/smollm2 agent.tool_format=hermes

It prints the address and the key, and serves until Ctrl-C or SIGTERM. Clients set base_url and api_key; KEY:NAME as
the key, or ADDRESS/s/NAME/v1 as the address, makes the calls one session, whose trajectories are at
ADDRESS/s/NAME/trajectories.
"""
READS = Reads(
    keys=(
        "model", "data.max_response_tokens", "data.chat_template_kwargs", *ENGINES, "rollout.max_running",
        "rollout.stop_token_ids", "rollout.timeout_s", "resources.device", "resources.num_threads",
        "algorithm.extensions", "agent.files", "agent.tool_format", "actor.engine.max_tokens_per_device",
    ),
    but=("model.path", "model.revision", "model.local_files_only"),
    instead={
        "model.path": "MODEL_OR_RUN", "model.revision": "MODEL_OR_RUN to ORG/NAME@REVISION",
        "model.local_files_only": "HF_HUB_OFFLINE=1",
    },
    is_one_process=True,
)  # fmt: skip
MAX_SESSIONS = 1000
MAX_SESSION_TOKENS = 1_000_000
"""Kept of each; the oldest sequences are forgotten beyond that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL_OR_RUN", help=HELP)
    add_config_arguments(parser, source="the settings of the run")
    add_trust_argument(parser)
    add_step_argument(parser)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve at (default 127.0.0.1: this machine alone)"
    )
    parser.add_argument("--json", action="store_true", help="print address and key as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    if not 0 <= args.port < 1 << 16:
        raise UsageError(f"--port is {args.port}; use a number up to 65535, 0 for a free one")
    source = find_model(args.model, step=args.step)
    for line in source.lines:
        say(line)
    config = load_settings(args, source=source.config, needs=("rollout",))
    refuse_unread(args, "serve", reads_with_engine(READS, config.rollout.engine))
    if config.rollout.remote:
        raise UsageError(
            f"rollout.engine={config.rollout.engine} is a server already: give its address to the agent; `strop serve` "
            f"records tokens that it samples itself"
        )
    config = with_model(config, source, args)
    quiet_models()
    asyncio.run(_serve(config, args))
    return 0


async def _serve(config: Config, args: argparse.Namespace) -> None:
    from strop.agents.openai_server.server import Gateway
    from strop.trainer.standalone import generation, model_backend

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with model_backend(config).configured(config):
        async with generation(config) as engines:
            gateway = Gateway(any_session(config, engines))
            async with gateway.serving(args.host, args.port) as address:
                if args.json:
                    print_json({"address": address, "base_url": f"{address}/v1", "api_key": gateway.token})
                else:
                    print_plain(f"base_url  {address}/v1\napi_key   {gateway.token}")
                say("Ctrl-C ends it")
                await ended.wait()


def any_session(config: Config, engines: Generation) -> AnySession:
    """Sessions that an engine samples for.

    Args:
        config: with the folder of the model in model.path.
        engines: the engine.

    Raises:
        ValueError: the model has no chat template, or there is no such tool format.
    """
    from strop.agents.openai_server.chat_model import ChatModel
    from strop.agents.openai_server.prompt_scorer import PromptScorer
    from strop.agents.openai_server.token_source import EngineSampler
    from strop.agents.tools.formats import formats
    from strop.agents.tools.templates import ChatTemplate
    from strop.data.chat import require_chat_template
    from strop.engines.tokenizer import load_tokenizer
    from strop.rollout.types import Sampling
    from strop.trainer.setup import stop_token_ids
    from strop.utils.user_files import load_user_file

    tokenizer = load_tokenizer(config.model)
    require_chat_template(tokenizer)
    stops = stop_token_ids(config.model, tokenizer, config.rollout.stop_token_ids)
    started_for = config.data.max_prompt_tokens + config.data.max_response_tokens
    sampler = EngineSampler(
        engine=engines.engine,
        sampling=Sampling(key=0, max_tokens=config.data.max_response_tokens, stop_token_ids=stops),
        max_positions=started_for if engines.policy is None else engines.policy.max_positions,
        timeout_s=config.rollout.timeout_s,
        scorer=None if engines.policy is None else PromptScorer(engines.policy, config.actor.engine),
    )
    template = ChatTemplate(tokenizer, config.data.chat_template_kwargs)
    images = None if engines.media is None else engines.media.image_encoder()
    tool_format = config.agent.tool_format
    if tool_format not in ("auto", *formats):  # of one of the user's files
        for file in config.agent.files:
            load_user_file(file, setting="agent.files")
    model = ChatModel(Path(config.model.path).name, tokenizer, template, stops, images, tool_format)
    return AnySession(model, sampler)


class AnySession:
    """Every name is a session, which begins with its first call; the one that was used longest ago makes room."""

    def __init__(self, model: ChatModel, sampler: Sampler) -> None:
        self._model, self._sampler = model, sampler
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def find(self, name: str) -> tuple[Session, Sampler]:
        """As of Sessions."""
        from strop.agents.openai_server.session import Session

        if name not in self._sessions:
            while len(self._sessions) >= MAX_SESSIONS:
                self._sessions.popitem(last=False)
            self._sessions[name] = Session(self._model, uid=name, max_tokens=MAX_SESSION_TOKENS)
        self._sessions.move_to_end(name)
        return self._sessions[name], self._sampler

    def remove(self, name: str) -> None:
        """As of Sessions."""
        self._sessions.pop(name, None)
