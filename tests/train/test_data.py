import numpy as np
import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.parallel.loss import IGNORE
from ridgeline.train.config import DataConfig
from ridgeline.train.data import PackedSamples, evaluation_documents, load_data
from ridgeline.train.tokens import byte_tokenizer
from tests.train.helpers import store_of


def plain_samples(documents, seqlen):
    """Samples token by token: (ids, targets, positions, lengths of sequences)."""
    stream = [
        (token, document[i + 1] if i + 1 < len(document) else IGNORE, number)
        for number, document in enumerate(documents)
        for i, token in enumerate(document)
    ]
    found = []
    for start in range(0, len(stream) - seqlen + 1, seqlen):
        part = stream[start : start + seqlen]
        positions, lengths = [], []
        for i, (_, _, number) in enumerate(part):
            new = i == 0 or part[i - 1][2] != number
            positions.append(0 if new else positions[-1] + 1)
            if new:
                lengths.append(0)
            lengths[-1] += 1
        found.append(([p[0] for p in part], [p[1] for p in part], positions, lengths))
    return found


@pytest.mark.parametrize("seqlen", [2, 3, 7, 16, 40])
def test_samples_equal_the_plain_form(seqlen):
    generator = np.random.default_rng(seqlen)
    documents = [
        generator.integers(0, 1000, size=n).tolist() for n in (1, 5, 16, 2, 1, 1, 33, 7, 3, 20)
    ]
    kept = [0, 2, 3, 4, 5, 6, 8, 9]
    samples = PackedSamples(store_of(documents), np.asarray(kept), seqlen)
    plain = plain_samples([documents[i] for i in kept], seqlen)
    assert samples.num_samples == len(plain) > 0
    order = generator.permutation(len(plain))
    batch = samples.batch(order)
    for k, column in enumerate((batch.token_ids_P, batch.targets_P, batch.position_ids_P)):
        assert column.tolist() == [value for i in order for value in plain[i][k]]
        assert column.dtype == torch.int64
    lengths = [length for i in order for length in plain[i][3]]
    assert list(batch.seqlens) == lengths and batch.max_seqlen == max(lengths)
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    assert batch.cu_seqlens.dtype == torch.int32
    valid = sum(target != IGNORE for i in order for target in plain[i][1])
    assert batch.num_valid == samples.num_valid(order) == valid


def test_a_batch_is_its_samples_joined():
    samples = PackedSamples(store_of([list(range(50))]), np.asarray([0]), 8)
    joined = samples.batch([3, 1, 1])
    single = [samples.batch([i]) for i in (3, 1, 1)]
    assert joined.token_ids_P.tolist() == sum((b.token_ids_P.tolist() for b in single), [])
    assert samples.num_valid([]) == 0


def test_too_short():
    with pytest.raises(
        UserError, match=r"the training text has 3 tokens, too short .* sample of 4"
    ):
        PackedSamples(store_of([[1, 2, 3]]), np.asarray([0]), 4)


def test_evaluation_documents_are_kept_apart():
    mask = evaluation_documents(1000, 0.1)
    assert mask.sum() == 100
    assert 30 < mask[:500].sum() < 70
    assert evaluation_documents(2, 0.001).sum() == 1
    assert evaluation_documents(5, 0.0).sum() == 0
    assert (evaluation_documents(1000, 0.1) == mask).all()


def write_letters(tmp_path, name, letters, repeats=9):
    file = tmp_path / name
    file.write_text("\n\n".join(letter * repeats for letter in letters))
    return file


def load(tmp_path, **values):
    config = DataConfig(seqlen=10, cache=tmp_path / "cache", **values)
    return load_data(config, byte_tokenizer(), seed=5)


def test_training_and_evaluation_share_no_document(tmp_path):
    file = write_letters(tmp_path, "a.txt", "abcdefghijklmnopqrst")
    data = load(tmp_path, files=(file,), eval_fraction=0.2)
    seen = [
        set(samples.batch(range(samples.num_samples)).token_ids_P.tolist()) - {256}
        for samples in (data.train, data.evaluation)
    ]
    assert len(seen[0]) == 16 and len(seen[1]) == 4 and not seen[0] & seen[1]


def test_own_evaluation_files(tmp_path):
    file = write_letters(tmp_path, "a.txt", "abc")
    other = write_letters(tmp_path, "b.txt", "xy")
    data = load(tmp_path, files=(file,), eval_files=(other,))
    assert data.train.num_tokens == 30 and data.evaluation.num_tokens == 20
    without = load(tmp_path, files=(file,), eval_fraction=0.0)
    assert without.evaluation is None and without.train.num_tokens == 30
    assert data.fingerprint != without.fingerprint


def test_the_order_is_the_seeds(tmp_path):
    file = write_letters(tmp_path, "a.txt", "abcdefgh")
    data = load(tmp_path, files=(file,), eval_fraction=0.0)
    whole = data.order(0, 16).tolist()
    assert sorted(whole[:8]) == sorted(whole[8:]) == list(range(8))
    assert data.order(3, 4).tolist() + data.order(7, 9).tolist() == whole[3:]


def test_one_document_cannot_be_split(tmp_path):
    file = write_letters(tmp_path, "a.txt", "a", repeats=100)
    with pytest.raises(
        UserError, match=r"a.txt is one document, nothing can be kept for evaluation"
    ):
        load(tmp_path, files=(file,))
    assert load(tmp_path, files=(file,), eval_fraction=0.0).train.num_samples == 10
