"""Every row of the table of schedules: shape, options and resume."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments

from halftune.config.optimizers import SCHEDULES, Schedule
from halftune.config.sections.training import TrainingSection
from halftune.core.errors import ConfigError
from halftune.train.schedule import check_steps, ends_part, make_schedule, warmup_steps

TOTAL, WARMUP, PEAK = 40, 4, 1e-2


def schedule(name: str, **options: Any) -> LRScheduler:
    training = TrainingSection(
        output_dir="x", lr_scheduler_type=name, learning_rate=PEAK, warmup_steps=WARMUP, **options
    )  # type: ignore[arg-type]
    return make_schedule(training, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=PEAK), TOTAL)


def rates(one: LRScheduler, steps: int = TOTAL) -> list[float]:
    """Learning rates over the peak, of the next steps and the one after them."""
    found = [one.get_last_lr()[0] / PEAK]
    for _ in range(steps):
        one.optimizer.step()
        one.step()
        found.append(one.get_last_lr()[0] / PEAK)
    return found


def test_each_name_has_a_row() -> None:
    assert set(get_args(Schedule)) == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_warms_up_to_the_peak_and_resumes_exactly(name: str) -> None:
    whole = rates(schedule(name))
    assert whole[0] == (0.0 if SCHEDULES[name].warmup else 1.0)
    assert max(whole) == pytest.approx(whole[WARMUP]) == pytest.approx(1.0)
    begun, resumed = schedule(name), schedule(name)
    rates(begun, 10)
    resumed.load_state_dict(begun.state_dict())
    assert rates(resumed, TOTAL - 10)[1:] == whole[11:]


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if "lr_min_ratio" in row.options])
def test_a_floor_is_where_a_schedule_ends(name: str) -> None:
    default = SCHEDULES[name].options["lr_min_ratio"]
    assert rates(schedule(name))[-1] == pytest.approx(default, abs=1e-12)
    assert rates(schedule(name, lr_min_ratio=0.25))[-1] == pytest.approx(0.25)


def ratio(total: int, share: float, **more: Any) -> TrainingSection:
    return TrainingSection(output_dir="x", warmup_ratio=share, max_steps=total, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 10, 100])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.51, 0.8, 0.99])
def test_a_share_of_warm_up_is_transformers_but_for_the_last_step(total: int, share: float) -> None:
    theirs = TrainingArguments(output_dir="x", warmup_steps=share).get_warmup_steps(total)
    assert warmup_steps(ratio(total, share), total) == min(theirs, total - 1)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.warmup])
def test_warm_up_beyond_half_of_the_run_ends_where_it_is_asked(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=PEAK)
    found = rates(make_schedule(ratio(10, 0.8, lr_scheduler_type=name), optimizer, 10), 9)
    assert found[8] == max(found)
    assert found[:9] == pytest.approx([step / 8 for step in range(9)])


@pytest.mark.parametrize(
    ("total", "options"),
    [
        (5, {"warmup_steps": 5}),
        (5, {"warmup_steps": 9}),
        (1, {"warmup_steps": 1}),
        (20, {"warmup_steps": 15, "lr_scheduler_type": "warmup_stable_decay", "lr_decay_ratio": 0.5}),
        (20, {"warmup_ratio": 0.8, "lr_scheduler_type": "warmup_stable_decay", "lr_decay_ratio": 0.5}),
    ],
)
def test_warm_up_that_does_not_fit_into_the_run_is_refused(total: int, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        check_steps(TrainingSection(output_dir="x", **options), total)
    assert error.value.code == "config.out_of_range"


@pytest.mark.parametrize(
    ("total", "options"),
    [
        (5, {"warmup_steps": 4}),
        (1, {}),
        (5, {"warmup_steps": 0}),
        (3, {"lr_scheduler_type": "warmup_stable_decay", "warmup_ratio": 0.4, "lr_decay_ratio": 0.6}),
        (10, {"lr_scheduler_type": "warmup_stable_decay", "warmup_ratio": 0.1, "lr_decay_ratio": 0.9}),
    ],
)
def test_warm_up_that_fits_is_taken(total: int, options: dict[str, Any]) -> None:
    check_steps(TrainingSection(output_dir="x", **options), total)


def test_restarts_return_to_the_peak() -> None:
    found = rates(schedule("cosine_with_restarts", lr_cycles=3))
    assert [step for step, rate in enumerate(found) if rate == 1.0] == [4, 16, 28]


def test_the_decay_of_a_stable_schedule_takes_its_share() -> None:
    found = rates(schedule("warmup_stable_decay", lr_decay_ratio=0.25))
    assert found[WARMUP:31] == [1.0] * 27
    assert all(after < before for before, after in pairwise(found[30:]))


def test_a_power_bends_the_polynomial() -> None:
    assert rates(schedule("polynomial", lr_power=2.0))[22] == pytest.approx(0.25)


def test_rex_is_its_formula() -> None:
    left = [1 - step / 36 for step in range(37)]
    assert rates(schedule("rex"))[WARMUP:] == pytest.approx([z / (0.5 + 0.5 * z) for z in left])


@pytest.mark.parametrize(
    ("steps", "times", "due"), [(8, 4, [2, 4, 6, 8]), (7, 3, [3, 5, 7]), (3, 9, [1, 2, 3]), (5, 1, [5])]
)
def test_parts_of_an_epoch_end_at_whole_steps(steps: int, times: int, due: list[int]) -> None:
    assert [step for step in range(1, steps + 1) if ends_part(step / steps, steps, times)] == due
