"""The configuration record of the HTTP server that `job=serve` starts. It must not know how requests are answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from parallel.ranges import OneOf, Range, Section, require


@dataclass(frozen=True, slots=True)
class ServerConfig(Section):
    """The HTTP server of job=serve: where it listens, who may use it, and what its requests may cost."""

    host: str = "127.0.0.1"
    """Address to listen on: this machine alone by default, 0.0.0.0 for every network."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """TCP port; 0 = any that is free."""
    model_name: str = ""
    """Name of the model in requests and replies; empty = the name of its checkpoint."""
    api_key: str = ""
    """Key that requests must bring as `Authorization: Bearer KEY`, for all but /health and the page at /; empty = none
    is asked for. It can be read in the process list and in the run directory: prefer a file."""
    api_key_file: str = ""
    """File with such keys, one in each line."""
    metrics_alias: Annotated[str, OneOf(("none", "vllm"))] = "none"
    """vllm: /metrics also has the names of vLLM, `vllm:...`, for gateways, dashboards and benchmarks."""
    traces_endpoint: str = ""
    """URL that receives a span of OpenTelemetry for each answered request (OTLP over HTTP), such as
    http://localhost:4318/v1/traces; empty = none is sent."""
    max_body_mb: Annotated[float, Range(above=0)] = 16.0
    """MiB that the body of a request may have."""
    max_waiting: Annotated[int, Range(0)] = 256
    """Completions that may wait for a place in the batch, beside `scheduler.max_num_seqs` that run. A request with
    more of them is answered with 429 and a time after which to come again."""
    max_queue_s: Annotated[float, Range(above=0)] = 120.0
    """Seconds that a completion may wait for its first token. While others wait, a request whose wait would be longer,
    by how fast they begin, is answered with 429 and the time after which to come again."""
    timeout_s: Annotated[float, Range(above=0)] = 600.0
    """Seconds after which a request that has not ended is aborted."""
    drain_s: Annotated[float, Range(0)] = 60.0
    """Seconds that running requests get to end after SIGTERM or Ctrl-C."""

    def check_fields(self, where: str) -> None:
        url = self.traces_endpoint
        is_url = not url or url.startswith(("http://", "https://"))
        require(is_url, f"{where}.traces_endpoint", url, "is no URL; give http://HOST:4318/v1/traces")
        remedy = "is one key; put it into the file, and drop this"
        require(not (self.api_key and self.api_key_file), f"{where}.api_key", "...", remedy)
