"""What SGLang's server takes, read from the source of its package without importing it.

    python tests/rollout/sglang_schemas.py FOLDER > tests/rollout/sglang_0_5_23.json

FOLDER is where the wheel is unpacked. Importing needs a GPU's libraries; names and types of its classes of requests
stand in the source.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from strop.rollout.sglang.config import OURS

REQUESTS = (
    "UpdateWeightsFromTensorReqInput",
    "BeginWeightUpdateReqInput",
    "EndWeightUpdateReqInput",
    "UpdateWeightVersionReqInput",
    "PauseGenerationReqInput",
    "ContinueGenerationReqInput",
    "AbortReq",
    "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
)


ROUTES = (
    "ready",
    "model_info",
    "generate",
    "abort_request",
    "pause_generation",
    "continue_generation",
    "begin_weight_update",
    "update_weights_from_tensor",
    "end_weight_update",
    "update_weight_version",
    "flush_cache",
    "release_memory_occupation",
    "resume_memory_occupation",
)
"""What strop asks of it."""
ARGUMENTS = (*OURS, "mem_fraction_static", "log_level")
"""Arguments of the server that strop sets."""


def fields(tree: ast.Module, name: str) -> dict[str, str]:
    """Annotated fields of a class: name -> its type as it is written."""
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    made = {}
    for statement in found.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            made[statement.target.id] = ast.unparse(statement.annotation)
    return made


def routes(tree: ast.Module) -> dict[str, list[str]]:
    """Path -> methods, of the HTTP server's functions."""
    made: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            continue
        for call in node.decorator_list:
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            if isinstance(call.args[0], ast.Constant) and str(call.args[0].value).startswith("/"):
                given = next((one.value for one in call.keywords if one.arg == "methods"), None)
                methods = [call.func.attr.upper()] if given is None else list(ast.literal_eval(given))
                made.setdefault(call.args[0].value, []).extend(methods)
    return made


def schemas(folder: Path) -> dict[str, object]:
    """Routes of the server, and the fields of what it takes."""
    srt = folder / "sglang" / "srt"
    io_struct = ast.parse((srt / "managers" / "io_struct.py").read_text())
    arguments: dict[str, str] = {}
    for path in sorted((srt / "arg_groups" / "fields").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                        annotation = statement.annotation
                        if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
                            annotation = annotation.slice.elts[0]
                        arguments[statement.target.id] = ast.unparse(annotation)
    common = ast.parse((srt / "utils" / "common.py").read_text())
    unpickler = next(n for n in ast.walk(common) if isinstance(n, ast.ClassDef) and n.name == "SafeUnpickler")
    allowed = next(
        statement.value
        for statement in unpickler.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "ALLOWED_GLOBALS"
    )
    served = routes(ast.parse((srt / "entrypoints" / "http_server.py").read_text()))
    return {
        "routes": {path: methods for path, methods in served.items() if path.removeprefix("/") in ROUTES},
        "requests": {name: {"rid": "Optional[str]", **fields(io_struct, name)} for name in REQUESTS},
        "generate": fields(io_struct, "GenerateReqInput"),
        "sampling_params": fields(
            ast.parse((srt / "sampling" / "sampling_params.py").read_text()), "SamplingParams"
        ),
        "server_args": {name: arguments[name] for name in ARGUMENTS},
        "unpickled": sorted(".".join(one) for one in ast.literal_eval(allowed)),
    }


if __name__ == "__main__":
    print(json.dumps(schemas(Path(sys.argv[1])), indent=1))
