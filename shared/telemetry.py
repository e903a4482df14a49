"""Logs with bound ids, and one trace per trajectory.

The trace context travels in the Kafka header `traceparent` (W3C). Where no OpenTelemetry SDK is
configured, spans cost nothing and the context still travels, so that a collector can be attached to
any single service.
"""

from __future__ import annotations

import hashlib
import logging
import sys

import structlog
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags

from shared.settings import TelemetrySettings

_TRACER = trace.get_tracer("rollart")


def configure_logs(settings: TelemetrySettings, *, service: str) -> None:
    """Structured logs of this process on stderr, every line with the service's name."""
    level = getattr(logging, settings.log_level.upper())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")


def root_traceparent(trajectory_id: str) -> str:
    """The trace of a trajectory: its id follows from the trajectory's, so that a replay joins it."""
    digest = hashlib.blake2b(trajectory_id.encode("utf-8", "replace"), digest_size=24).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def span(name: str, traceparent: str) -> Span:
    """Start a span below the context of a message. The caller ends it."""
    parent = _context_of(traceparent)
    return _TRACER.start_span(name, context=trace.set_span_in_context(parent) if parent else None)


def traceparent_of(current: Span, fallback: str) -> str:
    """The context to put into an outgoing message: the span's own where it records, else what came in."""
    context = current.get_span_context()
    if not current.is_recording():
        return fallback
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _context_of(traceparent: str) -> Span | None:
    parts = traceparent.split("-")
    if len(parts) != 4:
        return None
    try:
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16)))
    except ValueError:
        return None
    return NonRecordingSpan(context) if context.is_valid else None
