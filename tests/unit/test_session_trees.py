"""What sessions become: every sampled token is trained once, under the distribution it was drawn from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turn_wire import write_tokenizer

from services.router.sessions.bodies import ChatRequest, CompletionRequest, parse
from services.router.sessions.trajectories import trajectories
from services.router.sessions.tree import ROOT, Place, Tree, Turn, answer_key, shown
from shared.errors import Invalid
from shared.events import FinishReason, Message, Sampling, TrajectoryStatus
from shared.state import SessionOutcome, SessionRecord
from shared.tokens import ChatTokenizer

RECORD = SessionRecord(
    session_id="s",
    attempt=0,
    policy="p",
    task="t",
    run_id="r",
    group_id="r/s",
    member=0,
    context_window=None,
    sampling=Sampling(),
    start_version=3,
    created_at=1.0,
    outcome=SessionOutcome(status=TrajectoryStatus.FINISHED, reward=1.0),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatTokenizer.from_folder(folder)


def answered(
    place: Place, number: int, token_ids: list[int], text: str, *, branch: int, temperature: float = 1.0
) -> Turn:
    return Turn(
        number=number,
        parent=ROOT if place.parent is None else place.parent.number,
        branch=branch,
        key=answer_key(place, text),
        context_ids=place.context_ids,
        token_ids=token_ids,
        logprobs=[-0.5 - number] * len(token_ids),
        versions=[(3 + number, len(token_ids))],
        finish_reason=FinishReason.LENGTH,
        sampling=Sampling(temperature=temperature),
        messages=[*place.messages, Message(role="assistant", content=text)],
        worker_id="w",
        device_class="c",
    )


def chat(*texts: str) -> ChatRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return ChatRequest.model_validate({"messages": messages})


def test_sampled_ids_are_kept_though_they_would_be_tokenised_otherwise(tokenizer: ChatTokenizer) -> None:
    tree = Tree()
    first = tree.place_chat(chat("hi"), tokenizer)
    he_llo = [*tokenizer.text_ids("he"), *tokenizer.text_ids("llo")]
    text = shown(tokenizer, he_llo)
    assert (text, len(tokenizer.text_ids(text))) == ("hello", 1)
    tree.add([answered(first, 0, he_llo, text, branch=0)])
    # Space around an answer is lost on the way through many an agent.
    second = tree.place_chat(chat("hi", f" {text}\n", "more"), tokenizer)
    assert second.parent is tree.turns[0]
    ids = tree.ids(second.parent)
    assert ids == [*first.context_ids, *he_llo]
    whole = tokenizer.conversation_ids([m.plain() for m in chat("hi", "hello", "more").messages])
    # But for the space that the template puts before an answer, and this one did not begin with.
    assert tokenizer.decode(ids + second.context_ids) == tokenizer.decode(whole).replace(": hello", ":hello")
    # Edited, it is another conversation.
    assert tree.place_chat(chat("hi", "hullo", "more"), tokenizer).parent is None
    assert tree.place_chat(chat("ho", "hello", "more"), tokenizer).parent is None


def test_a_completion_goes_on_behind_the_longest_that_it_begins_with(tokenizer: ChatTokenizer) -> None:
    tree = Tree()
    ids = tokenizer.text_ids("abc")
    first = tree.place_completion(CompletionRequest.model_validate({"prompt": ids}), tokenizer)
    tree.add([answered(first, 0, [1, 2], shown(tokenizer, [1, 2]), branch=0)])
    for rest in ([9], [9, 8]):
        longer = CompletionRequest.model_validate({"prompt": [*ids, 1, 2, *rest]})
        place = tree.place_completion(longer, tokenizer)
        assert (place.parent, place.context_ids) == (tree.turns[0], rest)
    text = CompletionRequest.model_validate({"prompt": "abc" + shown(tokenizer, [1, 2]) + "x"})
    assert tree.place_completion(text, tokenizer).context_ids == tokenizer.text_ids("x")
    assert tree.place_completion(CompletionRequest.model_validate({"prompt": ids}), tokenizer).parent is None


@given(st.lists(st.tuples(st.integers(-1, 12), st.sampled_from([0.5, 1.0]), st.integers(1, 4)), max_size=13))
def test_every_sampled_token_is_trained_once_under_its_own_distribution(
    shape: list[tuple[int, float, int]],
) -> None:
    tree = Tree()
    continued: set[int] = set()
    for number, (above, temperature, length) in enumerate(shape):
        parent = tree.turns.get(above)
        alone = parent is not None and parent.sampling.temperature != temperature
        at = ROOT if parent is None else parent.number
        first = not alone and at not in continued
        continued |= {at} if first else set()
        branch = number if not first else 0 if parent is None else parent.branch
        place = Place(parent, [100 + number], [], "")
        tokens = [number] * length
        tree.add([answered(place, number, tokens, "", branch=branch, temperature=temperature)])
    made = trajectories(RECORD, tree)
    assert len({one.trajectory_id for one in made}) == len(made) >= 1
    trained: Counter[int] = Counter()
    for one in made:
        for token, mask, logprob, version in zip(
            one.token_ids, one.mask, one.logprobs, one.versions, strict=True
        ):
            if mask:
                trained[token] += 1
                assert (logprob, version) == (-0.5 - token, 3 + token)
                assert tree.turns[token].sampling == one.sampling
            else:
                assert (logprob, version) == (0.0, -1)
        assert sum(turn.sampled for turn in one.turns) == sum(one.mask)
    assert trained == Counter({number: length for number, (_, _, length) in enumerate(shape)})


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"prompt": []}', b'{"prompt": [[1], [2]]}'])
def test_a_body_that_is_none_is_invalid(body: bytes) -> None:
    with pytest.raises(Invalid):
        parse(CompletionRequest, body)
