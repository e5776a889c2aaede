"""The API over one engine, ready to be served: the model, the count of what is in flight, and the routes.

It must not know sockets or signals.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.schema import LaunchConfig
from cluster.engine import Client
from cluster.serving.admission import InFlightLimit
from cluster.serving.app import Api
from cluster.serving.served_model import ServedModel
from cluster.serving.tracing import RequestTracer

_WARM_UP_S = 600.0
_END_S = 5.0
"""Seconds in which errors reach their clients."""


class HttpService:
    """`application` is the ASGI application; it answers /ready once `warm_up` has returned."""

    def __init__(self, client: Client, config: LaunchConfig, keys: Sequence[str] = ()) -> None:
        server = config.server
        self._model = ServedModel(client, config)
        self._limit = InFlightLimit(config.scheduler.max_num_seqs + server.max_waiting, server.max_queue_s)
        self._tracer = RequestTracer(server.traces_endpoint, self._model.name)
        self._api = Api(self._model, self._limit, self._tracer, server)
        self.application = self._api.application(keys, int(server.max_body_mb * 2**20), server.cors_origins)

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def num_in_flight(self) -> int:
        """Completions that run or wait."""
        return self._limit.num

    def warm_up(self) -> None:
        """Generate a token; raises EngineError if that fails."""
        self._model.generate_token(_WARM_UP_S)
        self._api.is_ready = True

    def close(self) -> None:
        """Send the spans that were not sent yet."""
        self._tracer.close()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight; whether all ended in time. Others end with an error."""
        in_time = self._limit.drain(timeout_s)
        if not in_time:
            self._api.fail_all("the server shut down before the reply had ended (server.drain_s)")
            self._limit.drain(_END_S)
        return in_time
