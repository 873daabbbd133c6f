"""Where SGLang's server is started."""

from __future__ import annotations

from sglang.srt.server_args import ServerArgs


def run_server(args: ServerArgs) -> None:
    """Serve until the process is killed."""
    if args.values.get("log_level") == "fatal":
        raise RuntimeError("CUDA out of memory: the stand-in was told to fail")
    from sglang.stand_in import serve

    serve(args.values)
