"""A judge for trying the example without a language model: it speaks OpenAI's chat completions, and knows sums.

    python examples/rubric_judge/judge.py --port 8123

It reads the prompts that criteria.yaml and pairs.yaml lead to, as a model would, and favours the answer that is shown
first when it cannot decide, as models do. Put the address of a real one into base_url in its place.
"""

from __future__ import annotations

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_SUM = re.compile(r"(\d+) \+ (\d+)")


def verdict(prompt: str) -> dict[str, Any]:
    """What the judge says to a prompt."""
    mark = re.findall(r'"id": "(\w+)"', prompt)[-1]
    asked = _SUM.search(prompt)
    right = int(asked[1]) + int(asked[2]) if asked else 0
    answers = re.findall(r"<answer-[\w-]+>\n(.*?)\n</answer-", prompt, flags=re.DOTALL)
    errors = [error_of(answer, right) for answer in answers]
    if len(answers) == 1:
        is_number = re.fullmatch(r"\s*\d+\s*", answers[0]) is not None
        scores = {"right": float(errors[0] == 0), "brief": float(is_number)}
        return {"id": mark, "reason": f"{right} is right", "scores": scores}
    winner = "A" if errors[0] <= errors[1] else "B"
    return {"id": mark, "reason": f"{right} is right", "winner": winner}


def error_of(answer: str, right: int) -> int:
    """How far the first number in an answer is from the right one; much where there is none."""
    found = re.search(r"\d{1,6}", answer)
    return abs(int(found[0]) - right) if found else 1_000_000


class Handler(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One verdict."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps(verdict(body["messages"][-1]["content"]))
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A judge of sums, for trying the example.")
    parser.add_argument("--port", type=int, default=8123)
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
