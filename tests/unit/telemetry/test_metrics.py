"""Metrics of steps: by base and method alone, and only what is known and finite."""

from __future__ import annotations

from shared.telemetry.metrics import REGISTRY, STEP_FIGURES, STEP_PART_SECONDS, TURN_WAIT_SECONDS, record_step_metrics


def _value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_a_step_is_recorded_under_its_base_and_method() -> None:
    labels = {"base": "tiny-watched", "method": "grpo"}
    metrics = {"loss": -0.5, "mismatch_mean": 0.011, "mismatch_max": 0.4, "ratio_mean": 1.001, "kl": 0.03}
    record_step_metrics("tiny-watched", "grpo", metrics | {"grad_norm": 0.9, "effective_sample_size": 0.97})
    record_step_metrics("tiny-watched", "grpo", metrics | {"loss": 0.25})
    assert _value("mint_step_loss", **labels) == 0.25
    assert _value("mint_step_mismatch_mean_sum", **labels) == 0.022
    assert _value("mint_step_mismatch_max_count", **labels) == 2
    # 1.001 is within 1 ± 0.02, which is what an alert looks at
    assert _value("mint_step_ratio_mean_bucket", **labels, le="1.02") == 2
    assert _value("mint_step_ratio_mean_bucket", **labels, le="0.98") == 0
    assert _value("mint_step_grad_norm_count", **labels) == 1
    assert _value("mint_steps_skipped_total", **labels) is None


def test_a_skipped_step_is_counted_and_has_no_figures() -> None:
    labels = {"base": "tiny-skipped", "method": "grpo"}
    record_step_metrics("tiny-skipped", "grpo", {"kept_groups": 0.0}, skipped=True)
    record_step_metrics("tiny-skipped", "grpo", {"loss": float("nan"), "kl": float("inf")}, skipped=True)
    assert _value("mint_steps_skipped_total", **labels) == 2
    assert _value("mint_step_loss", **labels) is None
    assert _value("mint_step_kl_count", **labels) is None


def test_no_label_names_a_policy_or_a_run() -> None:
    for figure in (*STEP_FIGURES.values(), STEP_PART_SECONDS, TURN_WAIT_SECONDS):
        assert set(figure._labelnames) <= {"base", "method", "part"}
