"""Kernel timings to profiles: what a table was made from must be found in it."""

import csv
from itertools import product

import pytest

from sim.engine.kernels import Card, fit_attention, profile_of_kernels
from sim.engine.profiles import StepWork

LAYERS = 4
CARD = Card(
    name="made-up",
    model="m",
    layers=LAYERS,
    kv_tokens=1000,
    max_model_len_tokens=1000,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def write(file, names, rows):
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        writer.writerows(rows)


def attention_us(chunk, before, decodes, context):
    """10 + 0.002 a token read, twice that beside a chunk; 20 + 0.0001 a pair."""
    time = 0.0
    if decodes:
        time += 10 + 0.002 * decodes * context * (2 if chunk else 1)
    if chunk:
        time += 20 + 1e-4 * chunk * (before + chunk / 2)
    return time


@pytest.fixture
def folder(tmp_path):
    """Timings of a card whose constants are known."""
    dense = [
        (layer, tokens, factor * (100 + tokens))
        for layer, factor in (("qkv_proj", 1.0), ("layernorm", 0.1), ("embedding", 0.5))
        for tokens in (1, 16, 64)
    ]
    write(tmp_path / "kernels_dense.csv", ("layer", "tokens", "time_us"), dense)
    heads = [("lm_head", n, 500 + 2 * n) for n in (1, 4, 16)]
    heads += [("sampler", n, 20 + n) for n in (1, 4, 16)]
    write(tmp_path / "kernels_per_sequence.csv", ("layer", "sequences", "time_us"), heads)
    shapes = product((0, 16, 256), (0, 512, 4096), (0, 1, 16, 64), (0, 128, 2048))
    attention = [
        (*shape, attention_us(*shape))
        for shape in shapes
        if (shape[0] or not shape[1]) and bool(shape[2]) == bool(shape[3]) and any(shape)
    ]
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    write(tmp_path / "kernels_attention.csv", names, attention)
    return tmp_path


def test_attention_is_found_again(folder):
    """Base and slope of decodes and chunks, and how much slower decodes are beside a chunk."""
    found = fit_attention(folder / "kernels_attention.csv")
    assert found.decode_s == pytest.approx(10e-6)
    assert found.decode_s_per_context_token == pytest.approx(0.002e-6)
    assert found.prefill_s == pytest.approx(20e-6)
    assert found.pair_s == pytest.approx(1e-10)
    assert found.mixed_decode_factor == pytest.approx(2.0)


def test_layers_are_counted_as_often_as_they_run(folder):
    """Each layer once, its norms twice, the embedding once in all; head and sampler a sequence."""
    profile = profile_of_kernels(folder, CARD)
    per_row_us = LAYERS * (1.0 + 2 * 0.1) + 0.5
    assert profile.linear_layers_s(16) == pytest.approx(116 * per_row_us * 1e-6)
    assert profile.linear_layers_s(40) == pytest.approx(140 * per_row_us * 1e-6)
    assert profile.head_s == pytest.approx(520e-6)
    assert profile.head_s_per_sequence == pytest.approx(3e-6)
    assert profile.decode_s == pytest.approx(LAYERS * 10e-6)


def test_a_whole_step_is_the_sum_of_its_kernels(folder):
    """A chunk of 16 beside 16 decodes of 128: linear, attention, head and host."""
    profile = profile_of_kernels(folder, CARD)
    work = StepWork(
        tokens=32, decodes=16, decode_context_tokens=16 * 128, prefills=1,
        attention_pairs=16 * 8, sequences=17,
    )  # fmt: skip
    kernels_us = LAYERS * attention_us(16, 0, 16, 128) + 132 * 5.3 + 520 + 3 * 17
    assert profile.step_s(work) == pytest.approx(kernels_us * 1e-6 + CARD.host_s)


def test_a_table_that_is_no_table_is_named(folder):
    """File, line and column."""
    with (folder / "kernels_dense.csv").open("a") as out:
        out.write("qkv_proj,many,1\n")
    with pytest.raises(ValueError, match=r"kernels_dense.csv:11: tokens: expected a number"):
        profile_of_kernels(folder, CARD)
