"""The train command over the trainer: its result, its config file, interruption and bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli import train as command
from ridgeline.train import trainer
from ridgeline.train.metrics import read_rows


@pytest.fixture
def words(text_file, tmp_path) -> list[str]:
    flags = {
        "--run-dir": tmp_path / "run",
        "--steps": 4,
        "--batch-samples": 2,
        "--micro-batch-samples": 2,
        "--data.files": text_file,
        "--data.documents": "file",
        "--data.eval-fraction": 0,
        "--data.seqlen": 32,
        "--optim.warmup-steps": 1,
    }
    return ["train", *(str(word) for pair in flags.items() for word in pair)]


def test_it_trains_and_tells(words, tmp_path, capsys):
    assert cli.main([*words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    result = events[-1]
    assert (result["step"], result["steps"], len(result["losses"])) == (4, 4, 4)
    rows = [row["loss"] for row in read_rows(tmp_path / "run") if "tokens_per_s" in row]
    assert rows == result["losses"]
    assert 4.0 < result["losses"][-1] < result["losses"][0] < 7.0
    assert result["exported"] == str(tmp_path / "run" / "model")


def test_a_config_file_gives_the_defaults_and_flags_go_over_it(words, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 3\nseed = 5\n[optim]\nlr = 0.002\nwarmup_steps = 2\n")
    start, rest = command.config_file(["--config", str(file), "--seed", "7"])
    config, _ = cli.parse("ridgeline train", command.COMMAND.config, rest, start)
    assert (config.steps, config.seed, config.optim.lr) == (3, 7, 0.002)
    start, rest = command.config_file(["--seed", "7", f"--config={file}"])
    assert start is not None and (start.steps, rest) == (3, ["--seed", "7"])


def test_ctrl_c_saves_and_the_same_command_goes_on(words, tmp_path, capsys, monkeypatch):
    rows = []

    def on_step(row):
        rows.append(row["loss"])
        if row["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    train = trainer.train
    monkeypatch.setattr(
        trainer, "train", lambda config, **more: train(config, on_step=on_step, **more)
    )
    assert cli.main(words) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("ridgeline: train: interrupted;") and "step-00000002 is kept" in line
    assert cli.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["resumed_from"] == 2 and len(rows) == 4
    other = [*words, "--run-dir", str(tmp_path / "again"), "--json"]
    rows.clear()
    monkeypatch.setattr(trainer, "train", train)
    assert cli.main(other) == 0
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert whole["losses"][2:] == result["losses"]


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (["--steps", "0"], 2, "steps must be at least 1, got 0"),
        (
            ["--micro-batch-samples", "3"],
            2,
            "--micro-batch-samples must divide --batch-sam",
        ),
        (["--model.preset", "huge"], 2, "model.preset must be one of tiny"),
        (["--data.seqlen", "1"], 2, "data.seqlen must be at least 2, got 1"),
        (["--data.seqlen", "100000"], 1, "too short for one sample of 100000"),
        (["--config"], 2, "--config must name a TOML file"),
        (["--config", "/nowhere.toml"], 1, "could not read /nowhere.toml"),
        (["--data.files", "/nowhere.txt"], 1, "/nowhere.txt"),
    ],
)
def test_bad_input(words, capsys, flags, code, part):
    assert cli.main([*words, *flags]) == code
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("ridgeline: ") and part in line, line


@pytest.mark.parametrize(
    "flags",
    [
        ["--layout.dp_shard", "3"],  # the batch of 2 does not divide either
        ["--layout.tp=3", "--micro-batch-samples", "5"],
        ["--layout.pp", "2", "--layout.cp", "2"],
    ],
)
def test_the_product_of_the_sizes_is_refused_before_what_follows_from_it(words, capsys, flags):
    assert cli.main([*words, *flags]) == 2
    line = capsys.readouterr().err
    assert "layout: sizes must multiply to the number of ranks (1), got pp " in line, line


def test_the_sizes_of_a_config_file_count(words, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("batch_samples = 4\nmicro_batch_samples = 1\n[layout]\ntp = 2\n")
    assert cli.main([*words, "--config", str(file)]) == 2
    assert "x tp 2 = 2; start 2 processes (torchrun --nproc-per-node 2)" in capsys.readouterr().err
    assert cli.main([*words, "--config", str(file), "--layout.tp", "1", "--steps", "0"]) == 2
    assert "steps must be at least 1" in capsys.readouterr().err


def test_refusals_import_no_torch():
    script = (
        "import sys\n"
        "from ridgeline.cli.main import main\n"
        "codes = [main(['train', '--layout.tp', '3']), main(['train', '--steps', '0']),\n"
        "  main(['train']), main(['verify', '--layout.tp', '2', '--shape.num-heads', '9'])]\n"
        "heavy = {'torch', 'numpy', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if heavy or codes != [2, 2, 2, 2] else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_words_at_all(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train"]) == 2
    assert "data.files must name at least one text file" in capsys.readouterr().err


def test_no_text(tmp_path, capsys):
    assert cli.main(["train", "--run-dir", str(tmp_path / "run")]) == 2
    assert "data.files must name at least one text file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
