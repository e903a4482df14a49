"""Every metric of every service, in one table. Ids are never labels.

`docs/metrics.md` is generated from these definitions.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

# Bus
EVENTS_PUBLISHED = Counter("rollart_events_published", "Events handed to the broker", ["topic"])
EVENTS_CONSUMED = Counter("rollart_events_consumed", "Events read and decoded", ["topic"])
EVENTS_DEAD = Counter("rollart_events_dead_lettered", "Events moved to deadletters", ["topic", "reason"])
EVENTS_LOST = Counter("rollart_events_lost", "Offsets that jumped without our having read them", ["topic"])
EVENTS_UNACKED = Gauge("rollart_events_unacknowledged", "Events in hand, not yet acknowledged", ["group"])
CLAIM_CHECKS = Counter("rollart_claim_checks", "Payloads moved through the object store", ["topic"])
FENCED_ACKS = Counter("rollart_fenced_acks", "Acknowledgements after their partition had moved", ["group"])

# Environment
EPISODES = Counter("rollart_episodes", "Episodes ended", ["task", "status", "reason"])
EPISODES_RUNNING = Gauge("rollart_episodes_running", "Episodes in progress")
ENV_STEP_SECONDS = Histogram("rollart_env_step_seconds", "One environment step", ["task"], buckets=_LATENCY)
ENV_RESET_SECONDS = Histogram(
    "rollart_env_reset_seconds", "One environment reset", ["task"], buckets=_LATENCY
)
TURN_SECONDS = Histogram(
    "rollart_turn_seconds", "From asking for a turn to its answer", ["task"], buckets=_LATENCY
)
TURN_RETRIES = Counter("rollart_turn_retries", "Turns asked again under the next try", ["reason"])
LATE_REPLIES = Counter("rollart_late_replies", "Replies of an earlier try, or to nobody, dropped")

# Router
ASSIGNMENTS = Counter(
    "rollart_assignments",
    "Turns assigned, a split one once per role; `fallback`: what was preferred and had no live worker",
    ["task", "role", "device_class", "fallback", "sticky"],
)
AFFINITY_SWITCHES = Counter("rollart_affinity_switches", "Changes of a measured choice of hardware", ["task"])
TURNS_WAITING = Gauge("rollart_turns_waiting", "Turns that wait for a live worker")
WORKERS_EJECTED = Counter("rollart_workers_ejected", "Workers that let a try pass and answered nobody")
TURNS_EXPIRED = Counter("rollart_turns_expired", "Turns dropped after their try deadline", ["where"])
SESSIONS_OPEN = Gauge("rollart_sessions_open", "Sessions of outside agents, over all routers")
SESSIONS_ENDED = Counter("rollart_sessions_ended", "Sessions ended by this router", ["status", "reason"])
SESSION_TURNS = Counter("rollart_session_turns", "Calls of outside agents, by outcome", ["outcome"])

# Generation
TOKENS = Counter("rollart_tokens", "Tokens processed by engines", ["kind"])
ENGINE_STEP_SECONDS = Histogram("rollart_engine_step_seconds", "One engine step", buckets=_LATENCY)
ENGINE_RUNNING = Gauge("rollart_engine_running", "Sequences in the running batch")
ENGINE_WAITING = Gauge("rollart_engine_waiting", "Requests that wait for the engine")
KV_USAGE = Gauge("rollart_kv_usage", "Share of KV slots in use, 0 to 1")
KV_LEASES = Gauge("rollart_kv_leases", "Prefilled prompts whose KV waits to be fetched")
KV_BYTES = Counter("rollart_kv_bytes", "KV fetched from prefill workers, bytes")
KV_RECOMPUTED = Counter(
    "rollart_kv_recomputed", "Split turns whose prompt the decode worker computed again", ["reason"]
)
POLICY_VERSION = Gauge("rollart_policy_version", "Newest policy version live in this process")
WEIGHT_LOADS = Counter("rollart_weight_loads", "Weight loads", ["outcome"])
WEIGHT_SECONDS = Counter("rollart_weight_seconds", "Seconds of weight transfer", ["part"])
TURNS_FAILED = Counter("rollart_turns_failed", "Turns that a worker answered with an error", ["code"])
TURNS_ABORTED = Counter("rollart_turns_aborted", "Turns aborted in the engine", ["reason"])

# Reward
SCORES = Counter("rollart_scores", "Trajectories scored", ["task", "outcome"])
SCORE_SECONDS = Histogram("rollart_score_seconds", "One scoring", buckets=_LATENCY)

# Training
STEPS = Counter("rollart_training_steps", "Optimiser steps published")
GROUPS = Counter("rollart_groups", "Groups by outcome", ["task", "outcome"])
GROUPS_OPEN = Gauge("rollart_groups_open", "Groups issued and not closed")
LAG = Histogram("rollart_lag_versions", "Lag of trained trajectories", buckets=(0, 1, 2, 3, 4, 6, 8, 16))
BATCH_WAIT_SECONDS = Histogram("rollart_batch_wait_seconds", "Waiting for a batch", buckets=_LATENCY)
TRAIN_SECONDS = Histogram("rollart_train_seconds", "Forward, backward and optimiser", buckets=_LATENCY)
PUBLISH_SECONDS = Histogram("rollart_publish_seconds", "Publishing a version", buckets=_LATENCY)

# Gateway
HTTP_REQUESTS = Counter("rollart_http_requests", "HTTP requests", ["service", "route", "status"])
