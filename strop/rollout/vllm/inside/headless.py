"""The part of vLLM's engine on a further node that it spans: workers alone, which meet those of the first node.

    python headless.py        with the arguments of the engine as one line of JSON on its standard input

vLLM calls it headless: the engine's core, which schedules, is on the first node. It ends when one of its workers does,
and with its parent, and takes vLLM's own processes with it.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import sys
import traceback

from strop_parent import end_with_parent, follow_forks, kill_group


def main() -> None:
    """Start the workers of this node, and wait until one of them ends.

    Raises:
        RuntimeError: one has ended.
    """
    import strop_worker
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    settings = strop_worker.with_extension(json.loads(sys.stdin.readline()))
    config = AsyncEngineArgs(**settings).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    workers = [worker.proc for worker in executor.workers]
    multiprocessing.connection.wait([worker.sentinel for worker in workers])
    ended = next(worker for worker in workers if not worker.is_alive())
    raise RuntimeError(f"{ended.name} has ended (exit code {ended.exitcode})")


if __name__ == "__mp_main__":  # in a process that vLLM has started
    end_with_parent()
if __name__ == "__main__":
    end_with_parent(kill_group)  # also while vLLM is being imported
    follow_forks()
    try:
        main()
    except Exception:  # noqa: BLE001  (for the log, before this process is gone)
        traceback.print_exc()
    finally:
        kill_group()
