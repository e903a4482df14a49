"""A run's metrics on disk: `metrics.jsonl`, and the same numbers as TensorBoard events.

Written by the trainer, one line per record; read by the report and by anything that follows a run.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import structlog
from pydantic import ValidationError
from torch.utils.tensorboard import SummaryWriter

from shared.archive import append_lines, read_lines
from shared.records import (
    RECORD,
    AnyRecord,
    EvaluationRecord,
    PhaseRecord,
    StepRecord,
    WarmStartRecord,
)

log = structlog.get_logger()

FILE = "metrics.jsonl"


class MetricsLog:
    """Append-only; a record is a whole line on disk when `write` returns. Also a context manager."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's; a resumed run goes on in the same files."""
        self._path = folder / FILE
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)

    def write(self, record: AnyRecord) -> None:
        """Append one record. Raises OSError."""
        append_lines(self._path, record.model_dump_json().encode() + b"\n")
        if isinstance(record, PhaseRecord):
            return
        for tag, value in _scalars(record).items():
            if value is not None:
                self._tensorboard.add_scalar(tag, value, record.step, walltime=record.time)

    def close(self) -> None:
        """Finish the TensorBoard file."""
        self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[AnyRecord]:
    """The records of a `metrics.jsonl`, oldest first; none where it does not exist. A line cut short by a
    kill is left out. Of a step written twice (a resumed run redoes it), the later one counts."""
    records: list[AnyRecord] = []
    for line in read_lines(path):
        try:
            records.append(RECORD.validate_json(line))
        except ValidationError as error:
            log.warning("metrics.line_unreadable", path=str(path), error=str(error).splitlines()[0])
    last = {record.step: index for index, record in enumerate(records) if isinstance(record, StepRecord)}
    return [
        record
        for index, record in enumerate(records)
        if not isinstance(record, StepRecord) or last[record.step] == index
    ]


def _scalars(record: StepRecord | WarmStartRecord | EvaluationRecord) -> dict[str, float | None]:
    """TensorBoard tag → value."""
    if isinstance(record, WarmStartRecord):
        return {"warm_start/loss": record.loss}
    if isinstance(record, EvaluationRecord):
        return {f"evaluation/{task}": value for task, value in record.reward.items()}
    return {
        **{f"reward/{task}": value for task, value in record.reward.items()},
        **{f"turns/{task}": value for task, value in record.turns_mean.items()},
        **{f"stage/{stage}": share for stage, share in record.stages.items()},
        "loss/policy": record.loss,
        "loss/entropy": record.entropy,
        "loss/grad_norm": record.grad_norm,
        "loss/mismatch_kl": record.mismatch_kl,
        "loss/ess": record.ess,
        "loss/clip_fraction": record.clip_fraction,
        "loss/ratio_max": record.ratio_max,
        "loss/learning_rate": record.learning_rate,
        "time/wait_s": record.wait_s,
        "time/train_s": record.train_s,
        "time/publish_s": record.publish_s,
        "time/step_s": record.step_s,
        "lag/max": max(map(int, record.lag), default=None),
        "tokens_per_s": record.tokens_per_s,
        "groups/open": record.open_groups,
        "groups/zero_variance": record.zero_variance_groups,
    }
