"""What every table of a recipe is made of: strict, frozen models and their number and name types.

Used by `shared.recipe`, `shared.placement` and by the REST models that take the same values.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number_only(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError(f"a number is needed here, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a finite number is needed here, not {value}")
    return value


Float = Annotated[float, BeforeValidator(_number_only), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_number_only)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class Section(BaseModel):
    """Root of all recipe sections: strict and frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )
