"""What was forecast is held against what came, and corrects what is forecast next."""

from __future__ import annotations

import pytest

from coordinator.calibration import Calibration, PlacedForecast, Way
from coordinator.forecast import Forecast


def placed_forecast(worked_out_s: float, way: Way = Way.HANDOFF) -> PlacedForecast:
    return PlacedForecast(way, worked_out_s, worked_out_s, itl_s=0.02, at=100.0)


def test_what_came_is_told_with_what_was_forecast() -> None:
    told: list[tuple[str, float, float]] = []
    calibration = Calibration(lambda *came: told.append(came))
    calibration.first_token(placed_forecast(0.5), now=100.75)
    calibration.ended(placed_forecast(0.5), itl_s=0.03)
    calibration.ended(PlacedForecast(Way.TAIL, 0.5, 0.5, itl_s=0.0, at=0.0), itl_s=0.03)  # nothing was forecast of it
    assert told == [("ttft", 0.5, 0.75), ("itl", 0.02, 0.03)]


def test_a_few_requests_correct_nothing() -> None:
    calibration = Calibration()
    for _ in range(7):
        calibration.first_token(placed_forecast(0.5), now=101.0)
    assert calibration.correct_s(Way.HANDOFF, 0.5) == 0.5


def test_a_bias_is_learned_for_each_way_by_itself() -> None:
    """Handoffs come 0.1 s later than worked out, however long they take."""
    calibration = Calibration()
    for worked_out_s in (0.2, 0.4, 0.9, 1.5) * 5:
        calibration.first_token(placed_forecast(worked_out_s), now=100.1 + worked_out_s)
    assert calibration.correct_s(Way.HANDOFF, 1.0) == pytest.approx(1.1, rel=0.01)
    assert calibration.correct_s(Way.TAIL, 1.0) == 1.0


def test_what_comes_in_half_the_time_is_forecast_so() -> None:
    calibration = Calibration()
    for worked_out_s in (0.2, 0.4, 0.9, 1.5) * 20:
        calibration.first_token(placed_forecast(worked_out_s), now=100.0 + worked_out_s / 2)
    assert calibration.correct_s(Way.HANDOFF, 1.0) == pytest.approx(0.5, rel=0.02)


def test_what_was_out_of_order_counts_with_four_times_what_was_worked_out() -> None:
    calibration = Calibration()
    for _ in range(20):
        calibration.first_token(placed_forecast(0.5), now=700.0)
    assert calibration.correct_s(Way.HANDOFF, 0.5) <= 2.125


def test_tokens_that_come_slower_than_steps_take_are_forecast_so() -> None:
    """Twice as slow, and 5 ms."""
    calibration = Calibration()
    for itl_s in (0.01, 0.03, 0.05, 0.02) * 20:
        calibration.ended(
            PlacedForecast(Way.TAIL, 1.0, 1.0, itl_s, at=0.0, worked_out_itl_s=itl_s), itl_s=2 * itl_s + 0.005
        )
    assert calibration.correct_itl_s(0.04) == pytest.approx(0.085, rel=0.02)
    assert calibration.correct_itl_s(0.0) == 0.0
    assert calibration.correct(Way.HANDOFF, Forecast(1.0, 0.04)).itl_s == calibration.correct_itl_s(0.04)


def test_parts_of_a_corrected_forecast_still_add_up() -> None:
    calibration = Calibration()
    for _ in range(20):
        calibration.first_token(placed_forecast(1.0), now=101.5)
    corrected = calibration.correct(Way.HANDOFF, Forecast(1.0, 0.02, 0.5, 0.0, 0.4, 0.1))
    assert corrected.ttft_s == pytest.approx(1.5)
    parts = corrected.queue_s + corrected.load_s + corrected.prefill_s + corrected.handoff_s
    assert parts == pytest.approx(corrected.ttft_s)
