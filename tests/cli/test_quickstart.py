"""The quickstart's machinery on small stages, and (slow) the real thing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli import quickstart as command
from ridgeline.cli.stage import (
    Context,
    QuickstartConfig,
    Stage,
    all_stages,
    keep,
    kept_result,
    need,
)
from ridgeline.cli.stages import train
from ridgeline.core.arch import detect
from ridgeline.core.errors import UserError
from ridgeline.report.section import Section


@pytest.fixture
def stages(monkeypatch):
    """Two stages that count their runs, in the place of the real ones."""
    ran: list[str] = []

    def first(context: Context):
        ran.append("first")
        path = context.folder / "made.txt"
        path.write_text("x")
        return {"value": 1, "path": str(path)}

    def last(context: Context):
        ran.append("report")
        return {"path": "report.html", "sum": need(context, "first")["value"] + 1}

    def stage(name, order, run, **more):
        return Stage(
            name=name, order=order, title=name, run=run, say=lambda result: f"{name} said",
            section=lambda result, context: Section(title=name), **more,
        )  # fmt: skip

    made = [
        stage("first", 1, first, depends=("windows",), outputs=lambda result: (result["path"],)),
        stage("report", 2, last, kept=False),
    ]
    monkeypatch.setattr(command, "all_stages", lambda: made)
    return ran


def _run(tmp_path, *flags: str) -> int:
    return cli.main(["quickstart", "--out", str(tmp_path / "run"), "--device", "cpu", *flags])


def test_results_are_kept_and_given_to_later_stages(stages, tmp_path, capsys):
    assert _run(tmp_path, "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["stage"] * 4 + ["result"]
    assert events[-1]["stages"]["report"]["sum"] == 2
    kept = json.loads((tmp_path / "run" / "results" / "first.json").read_text())
    assert kept["result"]["value"] == 1
    assert _run(tmp_path) == 0
    assert stages == ["first", "report", "report"]
    assert "[1/2] first: kept from 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "again", [("--redo", "first"), ("--redo", "all"), ("--windows", "3"), "removed", "damaged"]
)
def test_a_stage_runs_again_when_it_must(stages, tmp_path, again):
    assert _run(tmp_path) == 0
    if again == "removed":
        (tmp_path / "run" / "made.txt").unlink()
    elif again == "damaged":
        (tmp_path / "run" / "results" / "first.json").write_text("{")
    assert _run(tmp_path, *(again if isinstance(again, tuple) else ())) == 0
    assert stages == ["first", "report", "first", "report"]


def test_what_a_stage_does_not_depend_on_keeps_it(stages, tmp_path):
    assert _run(tmp_path) == 0
    assert _run(tmp_path, "--train-steps", "9") == 0
    assert stages == ["first", "report", "report"]


def test_ctrl_c_keeps_finished_stages(stages, tmp_path, capsys, monkeypatch):
    def interrupt(context, name):
        raise KeyboardInterrupt

    monkeypatch.setitem(globals(), "need", interrupt)
    assert _run(tmp_path) == 1
    assert "quickstart: interrupted; finished stages are kept" in capsys.readouterr().err
    monkeypatch.undo()
    assert (tmp_path / "run" / "results" / "first.json").is_file()
    assert not (tmp_path / "run" / "results" / "report.json").exists()


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (("--redo", "nothing"), 2, "redo must be one of first, report, all, got nothing"),
        (("--windows", "0"), 2, "windows must be at least 1, got 0"),
        (("--device", "tpu"), 2, "device must be auto, cpu or cuda"),
    ],
)
def test_bad_input(stages, tmp_path, capsys, flags, code, part):
    assert _run(tmp_path, *flags) == code
    assert part in capsys.readouterr().err


def test_the_stages_are_found_by_listing_and_in_order():
    found = all_stages()
    folder = Path(command.__file__).parent / "stages"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {stage.name for stage in found} == files
    names = [stage.name for stage in found]
    assert names[0] == "machine" and names[-1] == "report"
    for index, stage in enumerate(found):
        fields = set(QuickstartConfig.__dataclass_fields__)
        assert set(stage.depends) <= fields | set(names[:index]), stage.name


def test_a_stage_that_has_not_run_is_named():
    context = Context(config=QuickstartConfig(), folder=Path(), device="cpu")
    with pytest.raises(UserError, match="stage weights must run first"):
        need(context, "weights")


class _Text(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.feed(page)

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.slow
@pytest.mark.weights
def test_the_whole_path_on_real_weights(tmp_path, monkeypatch):
    monkeypatch.undo()  # the user's own cache: the weights are fetched once
    config = QuickstartConfig(
        out=tmp_path / "run", windows=2, calibration_sequences=8, train_steps=12,
        max_new_tokens=16,
    )  # fmt: skip
    results = command.quickstart(config)["stages"]
    four = results["quantize"]
    assert 8 < four["ppl_before"] < four["ppl_gptq"] < four["ppl_rtn"] < 40
    assert four["bytes_after"] < 0.5 * four["bytes_before"]
    assert results["train"]["largest_difference"] == 0.0
    assert results["train"]["losses"][-1] < results["train"]["losses"][0]
    assert results["generate"]["new_tokens"] > 1 and results["generate"]["tokens_per_s"] > 0
    page = Path(results["report"]["path"]).read_text(encoding="utf-8")
    text = " ".join(_Text(page).words)
    for figure in ("ppl_before", "ppl_rtn", "ppl_gptq"):
        assert f"{four[figure]:.3f}" in text
    assert f"resumed at step {results['train']['resumed_at']}" in text
    assert results["machine"]["device"]["name"] in text
    assert len(re.findall("<svg", page)) == 3


def test_only_the_stages_own_folder_is_emptied(tmp_path):
    mine, foreign = tmp_path / "train", tmp_path / "other" / train.FOLDER
    for folder in (mine, foreign):
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("keep")
    made = train.fresh_folder(tmp_path)
    (made / "run" / "model").mkdir(parents=True)
    (made / "text.jsonl").touch()
    assert [p.name for p in train.fresh_folder(tmp_path).iterdir()] == [train.MARKER]
    with pytest.raises(UserError, match=r"must be a folder that quickstart made to be replaced"):
        train.fresh_folder(foreign.parent)
    assert [(folder / "notes.txt").read_text() for folder in (mine, foreign)] == ["keep"] * 2


def test_a_result_of_another_torch_or_machine_does_not_count(tmp_path, monkeypatch):
    context = Context(config=QuickstartConfig(), folder=tmp_path, device="cpu")
    keep(train.STAGE, context, {"folder": str(tmp_path)})
    assert kept_result(train.STAGE, context) is not None
    with monkeypatch.context() as patch:
        patch.setattr("ridgeline.cli.stage.metadata.version", lambda name: "0.1")
        assert kept_result(train.STAGE, context) is None
    other = replace(detect("cpu"), device="another CPU, 96 cores")
    monkeypatch.setattr("ridgeline.cli.stage.detect", lambda device: other)
    assert kept_result(train.STAGE, context) is None
