"""A run that has ended, continued for more epochs: no row is lost, whatever its last step was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tiny_runs import Project, check_records, resume_in, train_in

from strop.data.visit_ids import parse_visit_uid
from strop.run import RunFolder
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import resume_run, start_run


def visits_of(folder: Path) -> Counter[tuple[int, int]]:
    """How often each row was visited in each epoch."""
    with RunFolder.open(folder, read_only=True) as run:
        return Counter(parse_visit_uid(uid.split("/")[0]) for uid in run.ledger.consumed())


def test_a_training_of_one_epoch_goes_on_for_another(project: Project, tmp_path: Path) -> None:
    # 24 rows, 10 a step: 10 + 10 + 4, then the second epoch needs three more steps, not two.
    config = project.config(
        "data.prompts_per_step=10", "trainer.num_epochs=1", "trainer.max_steps=null", "data.val_files=[]",
        "run.save_every=1",
    )  # fmt: skip
    first = train_in(tmp_path / "run", config)
    assert [len(record.prompts) for record in first.records] == [10, 10, 4]
    more = resume_in(tmp_path / "run", "trainer.num_epochs=2", "trainer.max_steps=4")
    assert [len(record.prompts) for record in more.records] == [10]
    rest = resume_in(
        tmp_path / "run", "trainer.max_steps=null"
    )  # past the short step, from within the second epoch
    assert [len(record.prompts) for record in rest.records] == [10, 4]
    check_records(tmp_path / "run", num_steps=6)
    assert visits_of(tmp_path / "run") == {(epoch, row): 1 for epoch in range(2) for row in range(24)}


def test_fine_tuning_of_one_epoch_goes_on_for_another(project: Project, tmp_path: Path) -> None:
    config = project.config("sft.num_epochs=1", "sft.examples_per_update=7", "run.save_every=1")
    start = start_run(tmp_path / "run", config, command=["strop", "sft"])
    with start.run:
        fine_tune(config, start.run, say=lambda line: None)
    rows = set(visits_of(tmp_path / "run"))
    steps = -(-len(rows) // 7)
    assert len(rows) % 7, "the last step is a short one"
    start = resume_run(tmp_path / "run", overrides=["sft.num_epochs=2"], say=lambda line: None)
    with start.run:
        fine_tune(start.config, start.run, checkpoint=start.checkpoint, say=lambda line: None)
    check_records(tmp_path / "run", num_steps=2 * steps)
    assert visits_of(tmp_path / "run") == {(epoch, row): 1 for epoch in range(2) for _, row in rows}
