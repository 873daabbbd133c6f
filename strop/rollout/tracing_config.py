"""Configuration of the backend that receives traces of episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from strop.config.sections import section
from strop.utils.field_types import PositiveInt


@section("rollout.trace")
class TraceConfig:
    """Traces of what agents do, for a program that shows them."""

    backend: Literal["", "otlp", "mlflow"] = ""
    """otlp: any collector that speaks OpenTelemetry's protocol over HTTP. mlflow: a server of MLflow. Both need the
    extra `trace`. Empty: none."""
    endpoint: str = ""
    """Address of the collector (…/v1/traces) or the server; empty: that of the environment,
    OTEL_EXPORTER_OTLP_ENDPOINT or MLFLOW_TRACKING_URI."""
    experiment: str = "strop"
    """Of MLflow; made where it does not exist."""
    max_samples: PositiveInt | None = None
    """Episodes that are traced each time a worker generates: the first ones; None: all."""

    def __post_init__(self) -> None:
        if not self.backend and self.endpoint:
            raise ValueError(
                f"rollout.trace.endpoint is {self.endpoint!r}, but no rollout.trace.backend is set: name otlp or "
                f"mlflow, or remove the address"
            )
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"rollout.trace.endpoint is {self.endpoint!r}: give an address such as http://127.0.0.1:4318/v1/traces"
            )

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Addresses that are contacted (strop.config.sections)."""
        if self.endpoint:
            yield "endpoint", f"{self.endpoint} (is sent every traced episode)", ""
