"""MLflow's endpoint for traces: its OpenTelemetry address, and the experiment of the traces."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ANSWER_S = 10.0
_MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """Destination of spans."""

    address: str
    headers: Mapping[str, str]


def mlflow_target(server: str, experiment: str) -> Target:
    """The door of a server, for an experiment, which is made where it does not exist.

    Args:
        server: its address; empty: MLFLOW_TRACKING_URI.
        experiment: its name.

    Raises:
        ValueError: there is no address, or the server does not give the experiment.
    """
    server = (server or os.environ.get("MLFLOW_TRACKING_URI", "")).rstrip("/")
    if not server.startswith(("http://", "https://")):
        raise ValueError(
            f"rollout.trace.backend is mlflow, but the address of its server is {server!r}: set "
            f"rollout.trace.endpoint, or MLFLOW_TRACKING_URI, to one such as http://127.0.0.1:5000"
        )
    api = f"{server}/api/2.0/mlflow/experiments"
    name = urllib.parse.quote(experiment, safe="")
    try:
        try:
            experiment_id = _asked(f"{api}/get-by-name?experiment_name={name}")["experiment"]["experiment_id"]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            experiment_id = _asked(f"{api}/create", {"name": experiment})["experiment_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"rollout.trace: the server of MLflow at {server} does not give the experiment {experiment!r}: {error}"
        ) from error
    return Target(address=f"{server}/v1/traces", headers={"x-mlflow-experiment-id": str(experiment_id)})


def _asked(address: str, body: Mapping[str, str] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        return json.loads(answer.read(_MAX_ANSWER_BYTES))
