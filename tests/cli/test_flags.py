"""The command line's flags, pinned: a change here is a change of the interface."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from ridgeline.cli import main as cli

COMMON = "--help --json --debug"
FLAGS = {
    "quickstart": "--out --redo --device --windows --calibration-sequences --train-steps "
    "--max-new-tokens --prompt",
    "doctor": "--device --measure --no-measure --budget-s",
    "explain attention": "--seqlen --seqlen-k --batch --heads --kv-heads --head-dim --head-dim-v "
    "--dtype --causal --no-causal --window-left --window-right --softcap --dropout --no-dropout "
    "--alibi --no-alibi --sinks --no-sinks --bias --no-bias --varlen --no-varlen --page-size "
    "--kv-cache --no-kv-cache --needs-grad --no-needs-grad --deterministic --no-deterministic "
    "--direction --arch --impl",
    "explain w4a16": "--m --n --k --group-size --dtype --scale-dtype --symmetric --no-symmetric "
    "--act-order --no-act-order --bias --no-bias --silu-mul --no-silu-mul --batch-invariant "
    "--no-batch-invariant --arch --impl",
    "tune attention": "--seqlen --seqlen-k --batch --heads --kv-heads --head-dim --head-dim-v "
    "--dtype --causal --no-causal --window-left --window-right --softcap --dropout --no-dropout "
    "--alibi --no-alibi --sinks --no-sinks --bias --no-bias --varlen --no-varlen --page-size "
    "--direction --workers --seconds",
    "warmup": "--ops --dtypes --head-dims --masks --layouts --softcap --no-softcap --sinks "
    "--no-sinks --model --layers --group-sizes --scale-dtype --symmetric --no-symmetric "
    "--arch --workers",
    "train": "--config --run-dir --steps --batch-samples --micro-batch-samples --seed --dtype "
    "--device --loss-chunk-tokens --timeout-s --layout.dp-replicate --layout.dp-shard --layout.tp "
    "--layout.pp --layout.cp --layout.zero --layout.schedule --layout.stages-per-rank "
    "--layout.num-microbatches --layout.sequence-parallel --layout.no-sequence-parallel "
    "--layout.activation-checkpointing --layout.reduce --layout.compile-blocks "
    "--layout.no-compile-blocks --layout.async-tp --layout.no-async-tp --model.preset "
    "--model.folder --model.init --data.files "
    "--data.eval-files --data.eval-fraction --data.documents --data.separator --data.json-field "
    "--data.tokenizer --data.vocab-size --data.seqlen --data.cache --optim.lr "
    "--optim.min-lr-ratio --optim.warmup-steps --optim.beta1 --optim.beta2 --optim.eps "
    "--optim.weight-decay --optim.max-grad-norm --checkpoint.every-steps --checkpoint.keep-last "
    "--checkpoint.resume --checkpoint.accept-changes --checkpoint.no-accept-changes "
    "--checkpoint.asynchronous --checkpoint.no-asynchronous "
    "--checkpoint.export --checkpoint.no-export --log.every-steps --log.eval-every-steps "
    "--log.eval-samples --log.peak-tflops --log.tensorboard --log.no-tensorboard "
    "--log.breakdown-every-steps --log.profile-step",
    "verify": "--layout.dp-replicate --layout.dp-shard --layout.tp --layout.pp --layout.cp "
    "--layout.zero --layout.schedule --layout.stages-per-rank --layout.num-microbatches "
    "--layout.sequence-parallel --layout.no-sequence-parallel --layout.activation-checkpointing "
    "--layout.reduce --layout.compile-blocks --layout.no-compile-blocks --layout.async-tp "
    "--layout.no-async-tp --shape.num-layers --shape.num-heads --shape.num-kv-heads "
    "--shape.head-dim --shape.intermediate-size --shape.vocab-size --shape.tie-embeddings "
    "--shape.no-tie-embeddings --shape.qk-norm --shape.no-qk-norm --steps --seqlen "
    "--micro-batch-samples --seed --tolerance --device",
    "quantize": "--model --out --text --json-field --method --bits --format --group-size "
    "--symmetry --act-order --damp --clip --no-clip --sequences --sequence-tokens "
    "--batch-sequences --seed --skip --override --lm-head --no-lm-head "
    "--target-bits --widths --held-out "
    "--held-out-windows --max-kl --max-ppl-increase --max-shard-gb --dry-run --no-dry-run "
    "--overwrite --no-overwrite --dtype --device",
    "eval": "--model --text --window --max-windows --dtype --device",
    "generate": "--model --prompt --chat --no-chat --system --max-new-tokens --temperature "
    "--top-k --top-p --seed --dtype --device",
    "serve": "--model --name --host --port --api-key-file --without-key --no-without-key --dry-run "
    "--no-dry-run --dtype --device --tensor-parallel --kv-dtype --max-model-len --max-num-seqs "
    "--max-step-tokens --memory-gib --prefix-cache --no-prefix-cache --batch-invariant "
    "--no-batch-invariant --speculate-tokens --cuda-graphs --no-cuda-graphs --max-queue-requests "
    "--max-queue-tokens --deadline-s --drain-s --watch --reload-root",
    "bench serve": "--url --model --requests --rate --concurrency --input-tokens --output-tokens "
    "--lengths --spread --prefix-tokens --prefix-groups --temperature --warmup --seed --vocab-size "
    "--out",
    "convert": "--source --out --dtype --format --lossy --no-lossy --max-shard-gb --overwrite "
    "--no-overwrite",
}


def test_every_command_is_pinned():
    assert {name.split()[0] for name in FLAGS} == set(cli.COMMANDS)


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name, capsys):
    assert cli.main([*name.split(), "--help"]) == 0
    said = set(re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]|--[a-z]\b", capsys.readouterr().out))
    assert said == set(f"{COMMON} {FLAGS[name]}".split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_a_function_of_its_name(name):
    command = cli.load_command(name)
    assert command.run.__name__ == name
    assert command.run.__module__ == f"ridgeline.cli.{name}"


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"explain", "tune", "train", "bench"}))
def test_the_summary_is_the_configs(name):
    assert cli.load_command(name).config.__doc__ == cli.COMMANDS[name]


@pytest.mark.parametrize("name", FLAGS)
def test_every_field_has_a_docstring(name):
    """The docstring under a field is its help."""
    words = name.split()
    command = cli.load_command(words[0])
    config = command.config if len(words) == 1 else command.config[words[1]]
    body = ast.parse(inspect.getsource(config)).body[0].body
    bare = [
        statement.target.id
        for statement, after in zip(body, [*body[1:], None], strict=True)
        if isinstance(statement, ast.AnnAssign)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
        and "default_factory" not in ast.unparse(statement)
    ]
    assert bare == []
