import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import tyro

from ridgeline.core.errors import UserError
from ridgeline.train import config as config_module
from ridgeline.train.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelChoice,
    OptimConfig,
    TrainConfig,
    config_hash,
    differences,
    identity_hash,
    require_files,
    to_dict,
)
from ridgeline.train.toml import load_config, merge, to_toml

ODD = TrainConfig(
    run_dir=Path('runs/a "quoted"\\name\twith ünïcode\x7f'),
    steps=1000,
    seed=2**62,
    model=ModelChoice(folder=Path("somewhere"), init="weights"),
    data=DataConfig(files=(Path("a.txt"), Path("b.jsonl")), separator="<|endoftext|>"),
    optim=OptimConfig(lr=1e-22, eps=1.0, max_grad_norm=None),
    log=LogConfig(peak_tflops=989.0, tensorboard=True),
)


@pytest.mark.parametrize("config", [TrainConfig(), ODD], ids=["default", "odd"])
def test_toml_round_trip(config, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    # A none stands as a comment, so it comes back over a base that has none there.
    base = dataclasses.replace(TrainConfig(), optim=OptimConfig(max_grad_norm=None))
    assert load_config(file, base if config is ODD else None) == config


def test_flags_go_over_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 77\n[optim]\nlr = 0.5\nbeta1 = 0.8\n", encoding="utf-8")
    flags = ["--optim.lr", "0.25", "--data.files", "a.txt", "b.txt", "--model.preset", "small"]
    found = tyro.cli(TrainConfig, default=load_config(file), args=flags)
    assert (found.steps, found.optim.lr, found.optim.beta1) == (77, 0.25, 0.8)
    assert found.data.files == (Path("a.txt"), Path("b.txt"))
    assert found.model.preset == "small"


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"stepz": 3}, ValueError, r"config: stepz must be one of run_dir, steps.*got 'stepz'"),
        ({"optim": {"rate": 1}}, ValueError, r"config: optim.rate must be one of lr"),
        ({"optim": 3}, TypeError, r"config: optim must be a table, got 3; write \[optim\]"),
        ({"steps": 1.5}, TypeError, r"config: steps must be of type int, got 1.5"),
        ({"steps": True}, TypeError, r"config: steps must be of type int, got True"),
        ({"dtype": "fp64"}, ValueError, r"config: dtype must be one of float32, bfloat16"),
        ({"data": {"files": "a.txt"}}, TypeError, r"config: data.files must be a list"),
        ({"data": {"files": [1]}}, TypeError, r"config: data.files must be of type str, got 1"),
        ({"optim": {"lr": "fast"}}, TypeError, r"config: optim.lr must be of type float"),
        ({"optim": {"lr": -1.0}}, ValueError, r"train: optim.lr must lie in \[0, 10\], got -1.0"),
    ],
)
def test_bad_values_of_a_file(values, error, text):
    with pytest.raises(error, match=text) as caught:
        merge(TrainConfig(), values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"steps = ", r"is not valid TOML"),
        (b"steps = 1 # \xff", r"is not UTF-8"),
        (None, r"could not read .*: No such file"),
    ],
)
def test_bad_files(content, text, tmp_path):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=text):
        load_config(file)


def test_values_of_a_file_are_converted():
    values = {"optim": {"lr": 1, "max_grad_norm": 2}, "run_dir": "x", "log": {"peak_tflops": 9}}
    found = merge(TrainConfig(), values)
    assert isinstance(found.optim.lr, float) and found.optim.lr == 1.0
    assert found.optim.max_grad_norm == 2.0 and found.log.peak_tflops == 9.0
    assert found.run_dir == Path("x")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: TrainConfig(steps=0), "steps must be at least 1, got 0"),
        (lambda: TrainConfig(batch_samples=0), "batch_samples must be at least 1"),
        (
            lambda: TrainConfig(batch_samples=6, micro_batch_samples=4),
            r"divide batch_samples \(6\)",
        ),
        (lambda: TrainConfig(seed=-1), r"seed must lie in \[0, 2\^63\), got -1"),
        (lambda: TrainConfig(loss_chunk_tokens=0), "loss_chunk_tokens must be at least 1"),
        (
            lambda: TrainConfig(steps=5, optim=OptimConfig(warmup_steps=6)),
            r"optim.warmup_steps must be at most steps \(5\), got 6",
        ),
        (lambda: ModelChoice(init="weights"), "model.init must be random where no model.folder"),
        (lambda: ModelChoice(preset=""), "model.preset must be one of tiny, .*, got ''"),
        (lambda: ModelChoice(preset="big"), "model.preset must be one of tiny, .*, got 'big'"),
        (lambda: DataConfig(seqlen=1), "data.seqlen must be at least 2, got 1"),
        (lambda: DataConfig(eval_fraction=0.6), r"data.eval_fraction must lie in \[0, 0.5\]"),
        (lambda: DataConfig(vocab_size=10), r"data.vocab_size must lie in \[258, 1e\+06\], got 10"),
        (lambda: DataConfig(separator=" \n"), "data.separator must be one line that is not blank"),
        (lambda: DataConfig(documents="separator"), "data.separator must be given with documents"),
        (lambda: DataConfig(documents="file", separator="x"), "data.separator must be empty with"),
        (lambda: OptimConfig(beta1=1.0), r"optim.beta1 must lie in \[0, 1\), got 1.0"),
        (lambda: OptimConfig(lr=float("nan")), r"optim.lr must lie in \[0, 10\], got nan"),
        (lambda: OptimConfig(max_grad_norm=0.0), "optim.max_grad_norm must be above 0"),
        (lambda: OptimConfig(warmup_steps=-1), "optim.warmup_steps must be at least 0"),
        (lambda: CheckpointConfig(keep_last=0), "checkpoint.keep_last must be at least 1"),
        (lambda: CheckpointConfig(every_steps=-1), "checkpoint.every_steps must be at least 0"),
        (lambda: LogConfig(every_steps=0), "log.every_steps must be at least 1"),
        (lambda: LogConfig(peak_tflops=0.0), "log.peak_tflops must be above 0"),
        (lambda: require_files(TrainConfig()), "data.files must name at least one text file"),
    ],
)
def test_values_that_cannot_be(build, text):
    with pytest.raises(ValueError, match=text) as caught:
        build()
    message = str(caught.value)
    assert message.startswith("train: ") and "; " in message and "\n" not in message


def test_hashes_tell_what_they_should():
    base = TrainConfig()
    elsewhere = dataclasses.replace(
        base,
        run_dir=Path("other"),
        micro_batch_samples=4,
        loss_chunk_tokens=7,
        log=LogConfig(every_steps=9),
        data=DataConfig(files=(Path("moved.txt"),)),
    )
    assert config_hash(base) != config_hash(elsewhere)
    assert identity_hash(base) == identity_hash(elsewhere)
    for changes in ({"seed": 1}, {"steps": 300}, {"dtype": "bfloat16"}, {"batch_samples": 16}):
        assert identity_hash(dataclasses.replace(base, **changes)) != identity_hash(base)
    assert identity_hash(base) == identity_hash(TrainConfig())


def test_differences_name_the_fields():
    new = dataclasses.replace(TrainConfig(), steps=300, optim=OptimConfig(lr=0.5))
    assert differences(to_dict(TrainConfig()), to_dict(new)) == [
        "optim.lr: 0.001 -> 0.5",
        "steps: 200 -> 300",
    ]


def test_every_field_is_described():
    classes = [
        node
        for node in ast.parse(inspect.getsource(config_module)).body
        if isinstance(node, ast.ClassDef)
    ]
    parts = {f.name for f in dataclasses.fields(TrainConfig) if f.name[0] != "_"}
    undescribed = []
    for node in classes:
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if not text:
                    undescribed.append(ast.unparse(statement.target))
    assert set(undescribed) == {"layout", "model", "data", "optim", "checkpoint", "log"}
    assert set(undescribed) <= parts


def test_a_short_run_needs_no_other_flag():
    assert TrainConfig(steps=1).optim.warmup_steps is None
