"""The maps of alarms: what is white, what is grey."""

from moe_rl.study import RunWriter, load
from moe_rl.study.figures import FIGURES


def test_a_step_at_which_a_signal_was_not_recorded_is_not_drawn_as_one_without_an_alarm(tmp_path):
    """Probes are made every few steps, and the last evaluation stands one step behind the last rollout."""
    for seed in range(5):
        with RunWriter(tmp_path, arm="mine", seed=seed, config={"label": "Mine"}) as run:
            for step in range(4):
                run.rollout(step, reward=0.5)
                run.update(step, 1, grad_norm=1.0)
                if step % 2 == 0:
                    run.probe(step, 1, shift_over_margin=2.0)
            for step in (2, 4):
                run.eval(step, reward=0.5 if seed else 0.1)
    (tmp_path / "study.yaml").write_text("alarms: {low: {metric: eval.reward, below: 0.2}}")
    axes = FIGURES["alarms"](load(tmp_path)).figure.axes
    drawn = {ax.get_title(loc="left").split()[0]: ax.images[0].get_array().filled(-1) for ax in axes if ax.images}
    assert [rows.tolist() for rows in drawn.values()] == [[[1, -1, 1, -1, -1]], [[-1, -1, 0.2, -1, 0.2]]]


def test_steps_that_no_run_made_are_not_drawn_as_without_alarms(tmp_path):
    """Grey, as the steps of an arm without the signal are; a share is of the runs that came so far."""
    for arm, seed, steps in (("short", 0, 2), ("long", 0, 4), ("long", 1, 3), ("silent", 0, 4)):
        with RunWriter(tmp_path / "s", arm=arm, seed=seed) as run:
            for step in range(steps):
                run.rollout(step, reward=0.5)
                run.update(step, 1, grad_norm=1.0, **({} if arm == "silent" else {"ess_token": 0.9 - 0.3 * step}))
    ax = FIGURES["alarms"](load(tmp_path / "s")).figure.axes[0]
    rows = dict(
        zip([label.get_text() for label in ax.get_yticklabels()], ax.images[0].get_array().filled(-1), strict=True)
    )
    assert {name: row.tolist() for name, row in rows.items()} == {
        "short": [0, 0, -1, -1], "long": [0, 0, 0, 1], "silent": [-1] * 4
    }  # fmt: skip
