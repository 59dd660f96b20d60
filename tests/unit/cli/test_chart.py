"""Charts of block characters: what they show, and that they keep their width."""

from __future__ import annotations

import math

import pytest

from cli.report.chart import GUTTER, bars, beside, chart, labels, number


def _area(lines: list[str]) -> list[str]:
    """The chart itself: the cells of its rows, top first."""
    return [line[GUTTER:].rstrip() for line in lines[1:-2]]


def test_a_rising_series_rises_from_its_least_to_its_greatest_value() -> None:
    lines = chart("reward", [(1, 0.25), (2, 0.5), (3, 1.0)], 1, 3, width=GUTTER + 3)
    assert _area(lines) == ["  █", " ▁█", "▁██"]
    assert lines[1].lstrip().startswith("1 ┤")
    assert lines[3].lstrip().startswith("0.25 ┤")
    assert lines[0].startswith("reward  last")


def test_skipped_steps_are_marked_and_have_no_column() -> None:
    lines = chart("loss", [(1, 1.0), (3, 2.0)], 1, 3, width=GUTTER + 3, marked=[2])
    assert lines[-2].rstrip().endswith("└─×─")
    assert [row.ljust(3)[1] for row in _area(lines)] == [" "] * 3


@pytest.mark.parametrize(("steps", "columns"), [(30, 30), (31, 16), (400, 29), (100_000, 30)])
def test_a_long_run_is_binned_into_its_width(steps: int, columns: int) -> None:
    points = [(step, float(step)) for step in range(1, steps + 1)]
    lines = chart("loss", points, 1, steps, width=GUTTER + 30)
    assert len(_area(lines)[-1]) == columns
    assert "█" in _area(lines)[0][-1]
    assert all(len(line) == GUTTER + 30 for line in lines)


def test_a_column_is_the_mean_of_its_steps_or_their_largest() -> None:
    points = [(1, 0.0), (2, 4.0), (3, 8.0), (4, 8.0)]
    assert chart("x", points, 1, 4, width=GUTTER + 2)[3].lstrip().startswith("2 ┤")
    assert chart("x", points, 1, 4, width=GUTTER + 2, largest=True)[3].lstrip().startswith("4 ┤")


@pytest.mark.parametrize("value", [0.0, 5e-4, -3.5])
def test_a_flat_series_is_a_flat_line_with_one_label(value: float) -> None:
    lines = chart("learning rate", [(1, value), (2, value)], 1, 2, width=30)
    assert sum("┤" in line for line in lines) == 1
    assert len({*_area(lines)[-1]}) == 1


def test_labels_tell_the_ends_apart() -> None:
    assert labels(1.0047, 0.9976, 1.0015) == ["1.0047", "0.9976", "1.0015"]
    assert labels(8.0, 6.0, 7.0) == ["8", "6", "7"]
    for high, low in ((5e-4, 0.0), (123456.0, 0.1), (1e12, -1e12), (1e-9, 1e-10)):
        found = labels(high, low)
        assert found[0] != found[1]
        assert all(len(text) <= 7 for text in found)


@pytest.mark.parametrize("value", [0.0, 0.1234567, 12.3456, 1234.56, 1.5e7, -1.5e7, 1e-7, -0.00052, 999999.9])
def test_numbers_are_short_and_true(value: float) -> None:
    assert len(number(value)) <= 7
    assert math.isclose(float(number(value)), value, rel_tol=0.35)


def test_bars_are_in_proportion() -> None:
    long, short = bars({"rollout": 30.0, "update": 10.0}, 60, " s")
    assert (long.count("█"), short.count("█")) == (33, 11)
    assert "75%" in long
    assert "10 s" in short
    assert {len(long), len(short)} == {60}
    assert bars({"export": 0.0}, 40, " s")[0].count("█") == 0


def test_charts_stand_side_by_side() -> None:
    one = chart("a", [(1, 1.0)], 1, 1, width=20)
    both = beside(one, one)
    assert {len(line) for line in both} == {42}
