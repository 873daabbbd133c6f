"""MCP servers as tools: a real server, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_cases import make_session
from command_lines import command_line

from references.tiny_vision import BLUE, RED, picture, png, save_tiny_vision
from strop.agents.tools.loading import load_all_tools
from strop.agents.tools.mcp import McpServer, McpTool, close_servers
from strop.agents.tools.mcp_config import McpServerConfig
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.placeholders import ToolImages

pytestmark = pytest.mark.timeout(120)

PICTURE = png(picture(24, 17, RED, BLUE))
SERVER = '''
import base64, os, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import AudioContent, ImageContent, TextContent

server = MCPServer("test")
memory = []

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
def remember(word: str) -> str:
    """Remember a word."""
    memory.append(word)
    return " ".join(memory)

@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such thing")

@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    import anyio
    await anyio.sleep(seconds)
    return "awake"

@server.tool()
def crash() -> str:
    """End the server."""
    print("going down", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def pid() -> str:
    """Its process."""
    return str(os.getpid())

@server.tool(structured_output=False)
def picture() -> list:
    """A picture."""
    return [TextContent(text="see"), ImageContent(data="CONTENTS", mime_type="image/png")]

@server.tool(structured_output=False)
def voice() -> list:
    """A voice."""
    return [AudioContent(data="UklG", mime_type="audio/wav")]

if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
'''.replace("CONTENTS", base64.b64encode(PICTURE).decode())


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    close_servers()


def tools_file(folder: Path, mcp: Mapping[str, Any], **config: Any) -> str:
    entry = {"config": {"type": "mcp", **config}, "mcp": mcp}
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": [entry]}), encoding="utf-8")  # JSON is YAML
    return str(path)


def stdio(script: Path, **more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(script)], **more}


def servers() -> list[int]:
    """Server processes that this test started and that still run."""
    return [
        child.pid for child in psutil.Process().children(recursive=True) if "server.py" in command_line(child)
    ]


@pytest.mark.slow
def test_a_stdio_server_gives_its_tools_and_ends_with_the_connection(script: Path, tmp_path: Path) -> None:
    tools = load_all_tools(tools_file(tmp_path, stdio(script)))
    assert sorted(tools) == ["add", "crash", "fail", "picture", "pid", "remember", "sleep", "voice"]
    assert servers() == [], "the server that was asked has ended"
    schema = tools["add"].tool_schema.model_dump()["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"
    assert schema["parameters"]["required"] == ["a", "b"]

    async def run() -> None:
        async with make_session(tools, max_parallel_calls=8) as session:
            results = await asyncio.gather(*(session.call("add", {"a": n, "b": 1}) for n in range(5)))
            assert [result.text for result in results] == ["1", "2", "3", "4", "5"]
            wrong = await session.call("fail", {})
            assert "no such thing" in wrong.text
            assert wrong.facts == {"is_error": True}
            bad = await session.call("add", {"a": "x"})
            assert bad.text == (
                "Invalid arguments for 'add': the argument 'b' is missing; "
                "the argument 'a' must be integer, but is 'x'"
            )
            unseen = await session.call("picture", {})
            assert unseen.response is not None
            assert unseen.response.image == [PICTURE]
            assert unseen.text == "see\n(1 image cannot be shown: the model takes text alone)"
            assert unseen.error == "not_shown"
            unheard = await session.call("voice", {})
            assert unheard.text == (
                "(1 audio cannot be shown: results of tools are shown as text and images alone)"
            )
            assert unheard.error == "not_shown"

    asyncio.run(run())
    assert len(servers()) == 1, "one server for all calls of the process"
    close_servers()
    assert servers() == []


def test_calls_start_no_faster_than_the_rate_limit() -> None:
    starts: list[float] = []

    class Client:
        async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
            starts.append(time.monotonic())
            return name

    async def run() -> None:
        server = McpServer(McpServerConfig(name="s", command="x", rate_limit=10.0, timeout_s=0.05))
        server._client, server._task = Client(), asyncio.create_task(asyncio.sleep(60))
        starts.append(time.monotonic())
        calls = [asyncio.create_task(server.call("t", {})) for _ in range(14)]
        await asyncio.sleep(0)
        calls[11].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        server._task.cancel()

    asyncio.run(run())
    # Ten start at once, and three at 0.1, 0.2 and 0.3 s, although a call itself may take only 0.05 s. The one that was
    # cancelled takes no place.
    begun, *called = starts
    assert len(called) == 13
    assert all(start - begun >= 0.1 * number - 1e-6 for number, start in enumerate(called[10:], start=1))


def test_an_entry_of_verl_is_read_with_its_rate_limit(script: Path, tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"s": stdio(script)}}), encoding="utf-8")
    entry: dict[str, Any] = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"rate_limit": 120, "timeout": 60, "use_mcp": True},
        "mcp": {"mcp_servers_config_path": str(tmp_path / "servers.json"), "tool_selected_list": ["add"]},
    }
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps({"tools": [entry]}), encoding="utf-8")
    (tool,) = load_all_tools(str(path)).values()
    assert isinstance(tool, McpTool)
    assert (tool.server.rate_limit, tool.server.timeout_s) == (120.0, 60.0)


def test_what_an_entry_would_not_use_is_refused(tmp_path: Path) -> None:
    for wrong, sentence in [
        (
            {"class_name": "mine.Tool"},
            "has the class_name 'mine.Tool', but a server's tools are called as they are",
        ),
        ({"tool_schema": {}}, "has the key 'tool_schema', but an MCP entry has config and mcp"),
    ]:
        path = tmp_path / "tools.yaml"
        entry = {"config": {"type": "mcp"}, "mcp": {"command": "x"}, **wrong}
        path.write_text(json.dumps({"tools": [entry]}), encoding="utf-8")
        with pytest.raises(ValueError, match=sentence):
            load_all_tools(str(path))


@pytest.mark.slow
def test_a_picture_of_a_server_is_an_image_for_a_model_that_sees(script: Path, tmp_path: Path) -> None:
    tools = load_all_tools(tools_file(tmp_path, {**stdio(script), "tool_selected_list": ["picture"]}))
    processor = load_media_processor(save_tiny_vision("qwen2_vl", tmp_path / "model"))
    assert processor is not None
    images = ToolImages(processor)

    async def run() -> None:
        async with make_session(tools, images=images) as session:
            seen = await session.call("picture", {})
            assert (seen.text, seen.error) == ("see", "")
            assert [(one.parts, one.size, one.num_tokens) for one in seen.images] == [
                ((PICTURE,), (24, 17), 6)
            ]

    asyncio.run(run())


@pytest.mark.slow
def test_a_server_that_crashes_is_an_error_for_the_model_and_starts_again(
    script: Path, tmp_path: Path
) -> None:
    tools = load_all_tools(
        tools_file(tmp_path, stdio(script, tool_selected_list=["remember", "crash"]), max_restarts=1)
    )
    assert sorted(tools) == ["crash", "remember"]

    async def run() -> list[Any]:
        async with make_session(tools) as session:
            for name, arguments in [
                ("remember", {"word": "one"}), ("crash", {}), ("remember", {"word": "two"}), ("crash", {}),
                ("crash", {}),
            ]:  # fmt: skip
                await session.call(name, arguments)
            return session.results

    one, gone, two, *again = asyncio.run(run())
    assert (one.text, one.error) == ("one", "")
    assert gone.error == "failed"
    assert "ended while it was called" in gone.text
    assert (two.text, two.error) == ("two", ""), "a fresh server, without the memory of the first"
    assert [one.error for one in again] == ["failed", "failed"], "however often: the arguments may be why"
    assert servers() == []


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_cut_off_and_the_server_lives_on(script: Path, tmp_path: Path) -> None:
    tools = load_all_tools(tools_file(tmp_path, stdio(script), timeout=1.0))

    async def run() -> list[Any]:
        async with make_session(tools) as session:
            before = await session.call("pid", {})
            slow = await session.call("sleep", {"seconds": 60})
            after = await session.call("pid", {})
            return [before, slow, after]

    before, slow, after = asyncio.run(run())
    assert "no answer within 1 s" in slow.text
    assert before.text == after.text


def test_a_server_over_http_is_called_the_same_way(script: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(400):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        config = tmp_path / "servers.json"
        server = {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "secret"}
        config.write_text(json.dumps({"mcpServers": {"web": server}}), encoding="utf-8")
        tools = load_all_tools(
            tools_file(
                tmp_path, {"mcp_servers_config_path": str(config), "tool_selected_list": ["add", "crash"]}
            )
        )

        async def run() -> list[Any]:
            async with make_session(tools) as session:
                await session.call("add", {"a": 20, "b": 22})
                await session.call("crash", {})
                return session.results

        worked, gone = asyncio.run(run())
        assert worked.text == "42"
        assert gone.error == "failed"
    finally:
        close_servers()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("mcp", "config", "sentence"),
    [
        (
            {"command": sys.executable, "args": ["-c", "raise SystemExit('no luck')"]},
            {},
            "could not be started: no luck",
        ),
        ({"command": "/no/such/program"}, {}, "could not be started"),
        ({"url": "ftp://x"}, {}, "begins with http"),
        ({}, {}, "either a command or a url"),
        ({"command": "x", "colour": 1}, {}, "unknown key 'colour'"),
        (
            {"command": "x"},
            {"retries": 3},
            "unknown key 'retries'; an MCP entry has type, timeout, max_restarts and",
        ),
        ({"command": "x"}, {"rate_limit": 0}, "rate_limit 0.0; it is a number of calls per second above 0"),
        (
            {"command": "x"},
            {"rate_limit": "slow"},
            "timeout, max_restarts and rate_limit are numbers: could not",
        ),
        ({"mcp_servers_config_path": "/no/such.json"}, {}, "cannot be read as JSON"),
    ],
)
def test_mistakes_in_an_entry_are_one_sentence(
    tmp_path: Path, mcp: Mapping[str, Any], config: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_all_tools(tools_file(tmp_path, mcp, **config))
