"""How a figure is made of the steps that an engine took."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from bench.engine.case import Case, Step, Task, decode_sample, prefill_sample, task_from_json


def test_a_prefill_ends_with_the_first_token_however_many_steps_it_takes() -> None:
    sample = prefill_sample(1000, [Step(0.5, 0), Step(2.0, 1), Step(9.0, 1)])

    assert (sample.tokens_per_s, sample.gaps_s) == (500.0, ())


def test_a_prefill_without_a_token_is_no_sample() -> None:
    with pytest.raises(ValueError, match="no step gave a token"):
        prefill_sample(1000, [Step(0.5, 0)])


def test_decode_counts_only_the_time_between_full_steps_after_the_first_four() -> None:
    prompts = [Step(10.0, 1), Step(20.0, 1)]  # two sequences, one after another
    full = [Step(seconds, 2) for seconds in (30.0, 31.0, 32.0, 33.0, 33.5, 34.0, 34.75, 35.0)]
    ragged = [Step(40.0, 1)]  # one sequence has ended

    sample = decode_sample(2, 4, prompts + full + ragged)

    assert sample.gaps_s == (0.5, 0.5, 0.75, 0.25)
    assert sample.tokens_per_s == 4.0  # 8 tokens in 2 s


def test_decode_counts_no_more_steps_than_asked_for() -> None:
    steps = [Step(float(second), 1) for second in range(1, 7)] + [Step(100.0, 1)]

    assert decode_sample(1, 2, steps).gaps_s == (1.0, 1.0)


def test_a_step_that_gave_no_token_is_part_of_the_gap() -> None:
    full = [Step(float(second), 4) for second in range(1, 6)]

    assert decode_sample(4, 2, [*full, Step(5.5, 0), Step(6.0, 4)]).gaps_s == (1.0, 1.0)


def test_too_few_full_steps_are_an_error() -> None:
    steps = [Step(float(second), 2) for second in range(5)]

    with pytest.raises(ValueError, match="5 of 5 steps gave all 2 sequences a token; too few"):
        decode_sample(2, 4, steps)


def test_the_context_lies_in_the_middle_of_what_is_counted() -> None:
    case = Case("decode", 256, batch=16)

    assert (case.prompt_tokens(64), case.output_tokens(64), case.max_len(64)) == (220, 84, 304)


def test_names_say_batch_and_context() -> None:
    assert [Case("prefill", 2048).name, Case("decode", 2048, 4).name] == ["prefill 2,048", "decode 4 at 2,048"]


def test_a_task_survives_json_and_knows_its_largest_case() -> None:
    cases = (Case("prefill", 1000), Case("decode", 256, batch=4))
    task = Task("model.gguf", 2, cases, 64, 49152, 7, 1.5, weights="file", cpus=(0,))

    assert task_from_json(json.loads(json.dumps(asdict(task)))) == task
    assert task.max_batch == 4
    assert task.max_len == 1001
    assert task.num_blocks(16) == 76  # 4 sequences of 304 tokens: 19 blocks each
