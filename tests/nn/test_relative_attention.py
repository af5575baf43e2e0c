"""Relative attention against its formula, written as loops over queries and keys."""

import math

import pytest
import torch

from tests.golden import weights
from vivavoce.models.checkpoint import published_tensors
from vivavoce.nn.attention import RelativeAttention, distance_encoding, relative_shift, segment_distances
from vivavoce.nn.streaming import Silence

DIM, HEADS = 8, 2


def test_relative_shift_of_distances_is_query_less_key():
    for queries, keys, offset in [(4, 4, 0), (1, 5, 4), (3, 1, 2), (2, 7, -3), (1, 1, 0)]:
        by_distance = segment_distances(torch.tensor([offset]), queries, keys).expand(queries, -1)
        expected = [[offset + query - key for key in range(keys)] for query in range(queries)]
        assert relative_shift(by_distance).tolist() == expected


def test_distance_encoding_interleaves_sine_and_cosine():
    encoding = distance_encoding(torch.tensor([-3]), 4)[0]
    expected = [math.sin(-3), math.cos(-3), math.sin(-0.03), math.cos(-0.03)]
    assert encoding.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def attention():
    module = RelativeAttention(DIM, HEADS).requires_grad_(False)
    for name, tensor in published_tensors(module).items():
        tensor.copy_(torch.from_numpy(weights.tensor(name, tuple(tensor.shape), seed=2)))
    return module


def test_scores_have_a_content_and_a_distance_term(attention):
    time, head_dim = 5, DIM // HEADS
    x = torch.randn(1, time, DIM, generator=torch.Generator().manual_seed(0))
    encodings = [distance_encoding(segment_distances(torch.tensor([0]), time, time), DIM)]
    query, key, value = (part.view(time, HEADS, head_dim) for part in attention.packed(x)[0].chunk(3, dim=-1))
    expected = torch.zeros(time, HEADS, head_dim)
    for head in range(HEADS):
        for i in range(time):
            scores = []
            for j in range(time):
                position = attention.linear_pos(distance_encoding(torch.tensor(i - j), DIM)).view(HEADS, head_dim)[head]
                content = (query[i, head] + attention.pos_bias_u[head]) @ key[j, head]
                distance = (query[i, head] + attention.pos_bias_v[head]) @ position
                scores.append((content + distance) / math.sqrt(head_dim))
            expected[i, head] = torch.stack(scores).softmax(0) @ value[:, head]
    expected = attention.linear_out(expected.flatten(1))
    assert torch.allclose(attention(x, encodings, None, Silence())[0], expected, atol=1e-5)
