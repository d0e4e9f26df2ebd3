"""Conversations of codecs, with all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gradientflow.compress import Conversation, Feedback, Gather, Parcel, Swap
from gradientflow.plan import Message, Slice


def converse(conversations: Sequence[Conversation]) -> tuple[int, int]:
    """Run them in lockstep, one a rank; rounds and bytes that the first asked for."""
    rounds = nbytes = 0
    answers: list[object] = [None] * len(conversations)
    while True:
        questions = [_ask(each, answer) for each, answer in zip(conversations, answers, strict=True)]
        if questions[0] is None:
            assert questions == [None] * len(conversations), "ranks ask differently often"
            return rounds, nbytes
        kinds = {type(question) for question in questions}
        assert len(kinds) == 1, "ranks ask different things"
        rounds += 1
        nbytes += questions[0].nbytes
        if kinds == {Gather}:
            assert len({(q.tensor.shape, q.tensor.dtype) for q in questions}) == 1, "ranks ask differently"
            answers = [[question.tensor.clone() for question in questions] for _ in questions]
            continue
        if kinds == {Swap}:
            answers = [[question.outgoing[rank].clone() for question in questions] for rank in range(len(questions))]
            for answer, question in zip(answers, questions, strict=True):
                assert [len(part) for part in answer] == list(question.incoming), "what is sent is not expected"
            continue
        shapes = [[(t.shape, t.dtype) for t in question.tensors] for question in questions]
        assert all(shape == shapes[0] for shape in shapes), "ranks ask differently"
        for same in zip(*(question.tensors for question in questions), strict=True):
            total = torch.stack(list(same)).sum(0)
            for tensor in same:
                tensor.copy_(total)
        answers = [None] * len(conversations)


class HasCodec(Protocol):
    codec: Feedback
    parcels: list[Parcel]


def converse_about_all(ranks: Sequence[HasCodec]) -> bool:
    """All messages of a step, and what closes it: whether it counts."""
    for number in range(len(ranks[0].parcels)):
        converse([rank.codec.converse(rank.parcels[number]) for rank in ranks])
    converse([rank.codec.close() for rank in ranks])
    counted = [rank.codec.settle() for rank in ranks]
    assert len(set(counted)) == 1, "ranks do not agree"
    return counted[0]


def _ask(conversation: Conversation, answer: object) -> object:
    try:
        return conversation.send(answer)  # type: ignore[arg-type]
    except StopIteration:
        return None


def parcels(messages: Sequence[Sequence[torch.Tensor]]) -> list[Parcel]:
    """Messages of ranges, each range a tensor of its own by name."""
    found = []
    for number, ranges in enumerate(messages):
        slices = tuple(
            Slice(tensor=f"{number}.{place}", start=0, stop=values.numel()) for place, values in enumerate(ranges)
        )
        found.append(Parcel(number, Message(slices=slices), list(ranges)))
    return found
