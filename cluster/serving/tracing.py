"""A span for each request that was answered, sent by OpenTelemetry where `server.traces_endpoint` says.

A span begins with the request, is a child of the one that the header `traceparent` names, and has the attributes of
OpenTelemetry's conventions for generative models, beside what speculation did under `specdec.*`. It must not know what
requests and replies say.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cluster.serving.generation import Generation

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_NS = 1_000_000_000


class RequestTracer:
    """Starts and ends spans. Without an endpoint there are none, and OpenTelemetry is not imported."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._model = model
        self._provider: Any = None
        if not endpoint:
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "specdec", "service.version": version("specdec")})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("specdec")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, operation: str, headers: Mapping[str, str], request_id: str) -> Span | None:
        """The span of a request; `operation` is "chat" or "text_completion". None without an endpoint."""
        if self._provider is None:
            return None
        from opentelemetry.trace import SpanKind

        names = {"gen_ai.operation.name": operation, "gen_ai.request.model": self._model}
        return self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={**names, "gen_ai.provider.name": "specdec", "specdec.request_id": request_id},
        )

    def end(self, span: Span | None, generation: Generation) -> None:
        """End a span with what became of its request, as far as it came."""
        if span is None:
            return
        completions = [choice.completion for choice in generation.choices]
        clock = time.time_ns() - time.monotonic_ns()
        for at in sorted([one.first_token_at for one in completions if one.first_token_at is not None])[:1]:
            span.add_event("first token", timestamp=clock + int(at * _NS))
        stats = [one.stats for one in completions]
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sum([len(one.token_ids) for one in completions]),
                "gen_ai.response.finish_reasons": [one.finish_reason or "abort" for one in completions],
                "specdec.num_spec_steps": sum([one.num_spec_steps for one in stats]),
                "specdec.num_draft_tokens": sum([one.num_draft_tokens for one in stats]),
                "specdec.num_accepted_tokens": sum([one.num_accepted_tokens for one in stats]),
                "specdec.num_cached_tokens": sum([one.num_cached_tokens for one in stats]),
            }
        )
        span.end()

    def close(self) -> None:
        """Send what was not sent yet; takes seconds where the endpoint does not answer."""
        if self._provider is not None:
            self._provider.shutdown()
