"""Engines are made once for all tests of a run: a vLLM engine takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract import Pair, Versioned


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versioned]:
    engine = Versioned(tmp_path_factory.mktemp("both"))
    yield engine
    engine.engine.close()


@pytest.fixture
def driven(made: Versioned) -> Versioned:
    """An engine with the weights of seed 1."""
    made.take(1)
    return made


@pytest.fixture(scope="session")
def made_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.prefill.engine.close()
    pair.decode.engine.close()


@pytest.fixture
def pair(made_pair: Pair) -> Pair:
    """Both with the weights of seed 1."""
    made_pair.take(1)
    return made_pair
