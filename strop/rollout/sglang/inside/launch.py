"""SGLang's server, started with arguments that stand in no list of processes: it reads them from its standard input.

    python launch.py           one line of JSON, the arguments of ServerArgs by name; then nothing more

The process leads a group of its own, and ends with everything it has started when its standard input ends: that is,
with its owner, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading


def _end_with_input() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock a thread may not hold when Python ends
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    arguments = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, name="strop: owner", daemon=True).start()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**arguments))
